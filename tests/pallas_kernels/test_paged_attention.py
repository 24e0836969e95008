import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.pallas_kernels import KV_FORMATS, KvFormat, kv_write, paged_attention
from jaxserve.pallas_kernels.kv_write.format import cache_layout
from tests.pallas_kernels import oracles
from tests.pallas_kernels.harness import BF16, F32, assert_close, compute, dtypes, native_implementations, normal, wide

K, H = 2, 16


@dataclasses.dataclass(frozen=True)
class Batch:
    """A ragged batch: operands of the op, and each row's context as plain arrays."""

    operands: tuple[Any, ...]
    keys: list[np.ndarray]
    values: list[np.ndarray]
    format: KvFormat | None

    def check(self, implementation, *, f32=2e-6, **options):
        """Runs the op and compares with the oracle; padding must be exactly 0."""
        q, starts = self.operands[0], self.operands[4]
        found = compute(implementation, paged_attention, *self.operands, format=self.format, **options)
        expected = oracles.ragged_attention(wide(q), self.keys, self.values, starts, **options)
        assert_close(found, expected, q.dtype, f32=f32)
        np.testing.assert_array_equal(found[starts[-1] :], 0)


def batch(
    counts,
    contexts,
    *,
    tokens,
    page_size=16,
    heads=4,
    head_dim=H,
    dtype=F32,
    cache_dtype=None,
    form=None,
    width=None,
    spare=3,
    order=None,
):
    """Rows in pages of random order, or in that of `order`; whatever no row owns is NaN (or any code), and unused table
    entries are nonsense.

    `form` names a format in which keys and values are kept; the contexts are then what its codes stand for.
    """
    rng = np.random.default_rng(len(counts) * 1000 + sum(contexts))
    cache_dtype = cache_dtype or dtype
    used = [-(-context // page_size) for context in contexts]
    width = width or max(1, *used) + 2
    free = rng.permutation(sum(used) + spare) if order is None else np.array(order)
    caches = [unwritten(KV_FORMATS.get(form or ""), cache_dtype, len(free), page_size, head_dim) for _ in range(2)]
    tables = rng.choice(np.array([-7, -1, 0, 10**6, free[-1]], np.int32), (len(counts), width))
    contents = [], []
    for s, context in enumerate(contexts):
        tables[s, : used[s]], free = free[: used[s]], free[used[s] :]
        slots = tables[s, np.arange(context) // page_size] * page_size + np.arange(context) % page_size
        for side, cache in enumerate(caches):
            rows = rng.standard_normal((context, K, head_dim), np.float32)
            rows[:, :, 3] *= 8  # an outlier, as some channels of keys are
            arrays = oracles.quantize_kv(wide(rows), form) if form else (rows.astype(cache_dtype),)
            for array, each in zip(cache, arrays, strict=True):
                array.reshape(-1, *array.shape[2:])[slots] = each
            contents[side].append(oracles.dequantize_kv(arrays, form) if form else wide(arrays[0]))
    q = rng.standard_normal((tokens, heads, head_dim), np.float32).astype(dtype)
    q[sum(counts) :] = np.nan
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    operands = (q, *caches, tables, starts, np.array(contexts, np.int32))
    return Batch(operands, *contents, KV_FORMATS.get(form or ""))


def unwritten(format, dtype, pages, page_size, head_dim):
    """The arrays of a cache that nobody has written."""
    layout = cache_layout(format, dtype, pages, page_size, K, head_dim)
    return tuple(
        np.full(spec.shape, 0xB7 if spec.dtype == np.uint8 else np.nan, spec.dtype) for _, spec in layout.values()
    )


@native_implementations
class TestPagedAttention:
    @pytest.mark.parametrize("form", [None, *KV_FORMATS])
    @pytest.mark.parametrize("counts", [[1, 1, 1], [5, 1, 20]], ids=str)
    def test_one_layer_of_several(self, implementation, form, counts):
        """The same bytes as from that layer's caches alone; the others hold NaN or other codes."""
        made = batch(counts, [20, 33, 40], tokens=30, form=form)
        q, keys, values, *ragged = made.operands
        others = jax.tree.map(
            lambda array: np.full_like(array, np.nan if array.dtype != np.uint8 else 3), (keys, values)
        )
        stacked = jax.tree.map(lambda other, array: np.stack([other, array, other]), others, (keys, values))
        options = {"scale": 0.25, "format": made.format}
        found = compute(implementation, paged_attention, q, *stacked, *ragged, layer=1, **options)
        np.testing.assert_array_equal(found, compute(implementation, paged_attention, *made.operands, **options))

    @dtypes
    @pytest.mark.parametrize("heads", [2, 4, 6])
    def test_decode(self, implementation, dtype, heads):
        made = batch([1, 1, 1, 1, 1, 0, 0], [1, 15, 16, 17, 300, 0, 40], tokens=7, heads=heads, dtype=dtype)
        made.check(implementation, scale=0.25)

    def test_decode_alone_with_one_key(self, implementation):
        made = batch([1], [1], tokens=1)
        found = compute(implementation, paged_attention, *made.operands, scale=0.25)
        np.testing.assert_allclose(found[0], np.repeat(made.values[0][0], 2, axis=0), rtol=1e-6)

    def test_nothing_but_padding(self, implementation):
        batch([0, 0], [0, 0], tokens=2).check(implementation, scale=0.25)
        batch([0, 0], [0, 50], tokens=9).check(implementation, scale=0.25)

    @dtypes
    def test_prefill_chunks_beside_decoding_rows(self, implementation, dtype):
        made = batch([5, 1, 40, 1, 0, 2], [5, 33, 140, 1, 0, 200], tokens=64, dtype=dtype)
        made.check(implementation, scale=0.25)

    @pytest.mark.parametrize("counts", [[32], [33, 31], [64, 32, 1], [1, 96], [97], [2, 2, 2]], ids=str)
    @pytest.mark.parametrize("before", [0, 1, 127])
    def test_edges_of_tiles_and_blocks(self, implementation, counts, before):
        contexts = [count + before for count in counts]
        batch(counts, contexts, tokens=97).check(implementation, scale=0.25)

    @pytest.mark.parametrize("page_size", [1, 8, 64, 256])
    def test_page_sizes(self, implementation, page_size):
        batch([1, 1, 1], [page_size, page_size + 1, 200], tokens=3, page_size=page_size).check(
            implementation, scale=0.2
        )
        batch([3, 40], [page_size + 3, 140], tokens=43, page_size=page_size).check(implementation, scale=0.2)

    @pytest.mark.parametrize(
        "window, softcap", [(1, None), (2, 1.5), (16, None), (17, None), (130, 1.5), (1000, None), (None, 1.5)]
    )
    def test_windows_and_softcap(self, implementation, window, softcap):
        options = {"scale": 0.5, "window": window, "softcap": softcap}
        batch([1, 1, 1, 1], [1, 16, 170, 300], tokens=4).check(implementation, **options)
        batch([1, 35, 70, 2], [9, 150, 70, 300], tokens=120).check(implementation, **options)

    def test_pages_out_of_the_window_are_not_read(self, implementation):
        made = batch([1, 40], [300, 340], tokens=50)
        _, k_cache, v_cache, tables = made.operands[:4]
        for row, first_seen in ((0, 299 - 19), (1, 300 - 19)):
            for page in range(first_seen // 16):
                k_cache[0][tables[row, page]] = v_cache[0][tables[row, page]] = np.nan
                tables[row, page] = 10**6 if page % 2 else tables[row, page]
        made.check(implementation, scale=0.25, window=20)

    def test_rows_of_several_tokens_in_a_step_as_small_as_the_batch(self, implementation):
        batch([3, 1, 2, 0, 0, 0, 0], [3, 20, 150, 0, 0, 0, 0], tokens=7).check(implementation, scale=0.25)
        batch([2, 0, 0, 0], [130, 0, 0, 0], tokens=2).check(implementation, scale=0.25)

    def test_large_scores_do_not_overflow(self, implementation):
        made = batch([1, 1, 20], [150, 3, 200], tokens=22)
        made.check(implementation, scale=100.0, f32=2e-5)  # exp magnifies the rounding of scores near 500

    def test_activations_wider_than_the_cache(self, implementation):
        batch([1, 1], [40, 200], tokens=2, cache_dtype=BF16).check(implementation, scale=0.25)
        batch([1, 30], [40, 200], tokens=31, cache_dtype=BF16).check(implementation, scale=0.25)

    @dtypes
    @pytest.mark.parametrize("head_dim, heads", [(64, 6), (32, 10), (128, 2), (24, 8)])
    @pytest.mark.parametrize("page_size", [16, 5])
    def test_bfloat16_caches_of_real_heads(self, implementation, dtype, head_dim, heads, page_size):
        """Some are read in pairs of numbers, whole pages at a time; others are not."""
        options = {"head_dim": head_dim, "heads": heads, "dtype": dtype, "cache_dtype": BF16, "page_size": page_size}
        batch([1, 1, 1, 0], [1, 79, 200, 0], tokens=5, **options).check(implementation, scale=0.1)
        made = batch([5, 1, 40, 1, 0, 2], [5, 33, 140, 1, 0, 200], tokens=64, **options)
        made.check(implementation, scale=0.1)
        made.check(implementation, scale=-0.1, window=45, softcap=1.5)

    def test_small_pages_between_two_that_stand_apart_as_if_they_were_one(self, implementation):
        """Positions 0 and 15 are 15 slots apart, and those between them are elsewhere."""
        options = {"head_dim": 64, "cache_dtype": BF16, "page_size": 4, "order": [0, 5, 6, 3, 1, 2, 4]}
        batch([1], [16], tokens=1, **options).check(implementation, scale=0.2)

    def test_pages_may_be_shared(self, implementation):
        made = batch([1, 1], [40, 40], tokens=2)
        made.operands[3][1] = made.operands[3][0]
        made.keys[1], made.values[1] = made.keys[0], made.values[0]
        made.check(implementation, scale=0.25)


@native_implementations
@pytest.mark.parametrize("form", KV_FORMATS)
class TestQuantizedCaches:
    @dtypes
    @pytest.mark.parametrize("heads", [2, 6])
    def test_decode(self, implementation, form, dtype, heads):
        lengths = [1, 15, 16, 17, 300, 0, 40]
        made = batch([1, 1, 1, 1, 1, 0, 0], lengths, tokens=7, heads=heads, dtype=dtype, form=form)
        made.check(implementation, scale=0.25)

    def test_decode_alone_with_one_key(self, implementation, form):
        made = batch([1], [1], tokens=1, form=form)
        found = compute(implementation, paged_attention, *made.operands, scale=0.25, format=made.format)
        np.testing.assert_allclose(found[0], np.repeat(made.values[0][0], 2, axis=0), rtol=1e-6, atol=1e-6)

    def test_nothing_but_padding(self, implementation, form):
        batch([0, 0], [0, 50], tokens=2, form=form).check(implementation, scale=0.25)

    @dtypes
    def test_prefill_chunks_beside_decoding_rows(self, implementation, form, dtype):
        made = batch([5, 1, 40, 1, 0, 2], [5, 33, 140, 1, 0, 200], tokens=64, dtype=dtype, form=form)
        made.check(implementation, scale=0.25)

    @pytest.mark.parametrize("page_size", [1, 16, 256])
    def test_edges_of_pages(self, implementation, form, page_size):
        contexts = [page_size, page_size + 1, 129]
        batch([1, 1, 1], contexts, tokens=3, page_size=page_size, form=form).check(implementation, scale=0.2)
        batch([3, 1, 33], [page_size + 3, page_size, 140], tokens=43, page_size=page_size, form=form).check(
            implementation, scale=0.2
        )

    @pytest.mark.parametrize("window, softcap", [(1, None), (17, 1.5), (None, 1.5)])
    def test_windows_and_softcap(self, implementation, form, window, softcap):
        options = {"scale": 0.5, "window": window, "softcap": softcap}
        batch([1, 1, 1, 1], [1, 16, 170, 300], tokens=4, form=form).check(implementation, **options)
        batch([1, 35, 70, 2], [9, 150, 70, 300], tokens=120, form=form).check(implementation, **options)


def step_memory(dtype, format, tokens, rows, pages, width):
    """Temporaries of a write and an attention with donated caches, all of which must be taken over."""

    def step(keys, values, q, k, v, slots, tables, starts, lengths):
        keys, values = kv_write(keys, values, k, v, slots, format=format)
        return keys, values, paged_attention(q, keys, values, tables, starts, lengths, scale=0.125, format=format)

    def spec(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    cache = tuple(array for _, array in cache_layout(format, dtype, pages, 16, 3, 64).values())
    new = spec(dtype, tokens, 3, 64)
    index = [spec(np.int32, *shape) for shape in [(tokens,), (rows, width), (rows + 1,), (rows,)]]
    jitted = jax.jit(step, donate_argnums=(0, 1))
    memory = jitted.lower(cache, cache, spec(dtype, tokens, 9, 64), new, new, *index).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == 2 * sum(array.size * array.dtype.itemsize for array in cache)
    return memory.temp_size_in_bytes


@pytest.mark.parametrize("tokens", [8, 64])
@pytest.mark.parametrize("form, dtype", [("", F32), ("", BF16), ("int8", BF16), ("int4", F32), ("fp8", F32)], ids=str)
def test_temporaries_follow_neither_the_pool_nor_the_longest_context(form, dtype, tokens):
    format = KV_FORMATS.get(form)
    small = step_memory(dtype, format, tokens, 8, pages=256, width=32)
    assert step_memory(dtype, format, tokens, 8, pages=512, width=32) == small
    # 8 rows of 512 more tokens would gather 3 MiB of keys; only the table itself may be copied.
    assert step_memory(dtype, format, tokens, 8, pages=256, width=64) <= small + 4 * 8 * 32 * 4


def test_wrong_calls_are_refused():
    q, (k_cache,), (v_cache,), tables, starts, lengths = batch([1, 1], [3, 4], tokens=2).operands
    with pytest.raises(TypeError, match=r"query_starts has shape \(2,\), expected axes \[S\+1\] with S = 2"):
        paged_attention(q, k_cache, v_cache, tables, starts[:2], lengths, scale=1.0)
    with pytest.raises(TypeError, match="block_tables has dtype float32, expected int32"):
        paged_attention(q, k_cache, v_cache, tables.astype(F32), starts, lengths, scale=1.0)
    with pytest.raises(TypeError, match="v_cache has dtype bfloat16, expected float32"):
        paged_attention(q, k_cache, v_cache.astype(BF16), tables, starts, lengths, scale=1.0)
    with pytest.raises(TypeError, match="5 query heads must be a multiple of the 2 KV heads"):
        paged_attention(normal(0, 2, 5, H), k_cache, v_cache, tables, starts, lengths, scale=1.0)
    with pytest.raises(TypeError, match="window must be at least 1"):
        paged_attention(q, k_cache, v_cache, tables, starts, lengths, scale=1.0, window=-3)
    with pytest.raises(TypeError, match="paged_attention: k_cache has 1 arrays, expected 2 in fp8"):
        paged_attention(q, k_cache, v_cache, tables, starts, lengths, scale=1.0, format=KV_FORMATS["fp8"])
    quantized = batch([1, 1], [3, 4], tokens=2, form="int4").operands
    with pytest.raises(
        TypeError, match=r"k_cache has shape .*, expected axes \[pages B K H/2\] with H = 18 \(from q\)"
    ):
        paged_attention(normal(0, 2, 4, H + 2), *quantized[1:], scale=1.0, format=KV_FORMATS["int4"])
