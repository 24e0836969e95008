import jax
import numpy as np
import pytest

from jaxserve.pallas_kernels import KV_FORMATS, kv_write
from jaxserve.pallas_kernels.kv_write.format import cache_layout, decode, encode
from tests.pallas_kernels import oracles
from tests.pallas_kernels.harness import BF16, F32, compute, dtypes, native_implementations, normal, wide

PAGES, B, K, H = 6, 4, 2, 8

formats = pytest.mark.parametrize("form", KV_FORMATS)
SLOTS = [
    [0],
    [PAGES * B - 1],
    [3, 4],
    [7, 8, 9, 10, 11, 12],
    [23, 0, 13, 5],
    [-1, 6, -1],
    [-1],
    [-5, PAGES * B + 3, 2],
]


def caches(dtype):
    return tuple(normal(seed, PAGES, B, K, H, dtype=dtype) for seed in (0, 1))


def noise(form, seed):
    """A cache in a format, full of any bytes."""
    rng = np.random.default_rng(seed)
    specs = [spec for _, spec in cache_layout(KV_FORMATS[form], None, PAGES, B, K, H).values()]
    return tuple(
        np.frombuffer(rng.bytes(spec.size * spec.dtype.itemsize), spec.dtype).reshape(spec.shape) for spec in specs
    )


@native_implementations
class TestKvWrite:
    @dtypes
    @pytest.mark.parametrize("slots", SLOTS, ids=str)
    def test_writes_only_the_slots_asked_for(self, implementation, dtype, slots):
        k_cache, v_cache = caches(dtype)
        k, v = (normal(seed, len(slots), K, H, dtype=dtype) for seed in (2, 3))
        expected = [cache.reshape(-1, K, H).astype(F32) for cache in (k_cache, v_cache)]
        for t, slot in enumerate(slots):
            if 0 <= slot < PAGES * B:
                expected[0][slot], expected[1][slot] = k[t], v[t]
        found = compute(implementation, kv_write, k_cache, v_cache, k, v, np.array(slots, np.int32))
        for cache, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(cache.reshape(-1, K, H), wanted)

    def test_rounds_to_the_dtype_of_the_cache(self, implementation):
        k_cache, v_cache = caches(BF16)
        k, v = normal(2, 1, K, H), normal(3, 1, K, H)
        found = compute(implementation, kv_write, k_cache, v_cache, k, v, np.array([5], np.int32))
        np.testing.assert_array_equal(found[0][1, 1], k[0].astype(BF16).astype(F32))

    @pytest.mark.parametrize("form", [None, *KV_FORMATS])
    @pytest.mark.parametrize("layer", [0, 2])
    def test_one_layer_of_several(self, implementation, form, layer):
        """The layer is written as it would be alone, the others stay; a slot past the pool reaches no other layer."""
        slots = np.array([23, -1, 0, PAGES * B, 13], np.int32)
        k, v = (normal(seed, len(slots), K, H) for seed in (2, 3))
        layers = [(noise(form, 2 * n), noise(form, 2 * n + 1)) if form else caches(F32) for n in range(3)]
        stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *layers)
        format = KV_FORMATS.get(form)
        found = compute(implementation, kv_write, *stacked, k, v, slots, format=format, layer=layer)
        alone = compute(implementation, kv_write, *layers[layer], k, v, slots, format=format)
        for array, before, wanted in zip(found, jax.tree.leaves(stacked), alone, strict=True):
            expected = before.astype(F32)
            expected[layer] = wanted
            np.testing.assert_array_equal(array, expected)

    @formats
    @pytest.mark.parametrize("slots", SLOTS, ids=str)
    def test_quantizes_only_the_slots_asked_for(self, implementation, form, slots):
        keys, values = noise(form, 0), noise(form, 1)
        k, v = (normal(seed, len(slots), K, H) for seed in (2, 3))
        written = (*oracles.quantize_kv(wide(k), form), *oracles.quantize_kv(wide(v), form))
        expected = [array.reshape(PAGES * B, *array.shape[2:]).copy() for array in (*keys, *values)]
        for t, slot in enumerate(slots):
            for array, rows in zip(expected, written, strict=True):
                if 0 <= slot < PAGES * B:
                    array[slot] = rows[t]
        found = compute(
            implementation, kv_write, keys, values, k, v, np.array(slots, np.int32), format=KV_FORMATS[form]
        )
        for array, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(array.reshape(wanted.shape), wanted.astype(F32))

    @formats
    @dtypes
    def test_bytes_of_a_token_depend_on_nothing_else(self, implementation, form, dtype):
        """Alone or among others, early or late in the step, in this page or that one."""
        k, v = (normal(seed, 64, K, H, dtype=dtype) for seed in (2, 3))

        def rows(order, slots):
            slots = np.array(slots, np.int32)
            found = compute(
                implementation, kv_write, noise(form, 0), noise(form, 1), k[order], v[order], slots,
                format=KV_FORMATS[form],
            )  # fmt: skip
            return [array.reshape(PAGES * B, -1)[slots] for array in found]

        together = rows(np.arange(20), np.arange(20))
        shuffled = np.random.default_rng(0).permutation(20)
        for array, wanted in zip(rows(shuffled, 23 - np.arange(20)), together, strict=True):
            np.testing.assert_array_equal(array, wanted[shuffled])
        for t in (0, 7, 19):
            for array, wanted in zip(rows([t], [11]), together, strict=True):
                np.testing.assert_array_equal(array[0], wanted[t])


def step_memory(tokens, format, dtype, pages):
    """Temporaries of a write with donated caches, which must all be taken over."""
    cache = tuple(spec for _, spec in cache_layout(format, dtype, pages, 16, 3, 64).values())
    rows, slots = jax.ShapeDtypeStruct((tokens, 3, 64), dtype), jax.ShapeDtypeStruct((tokens,), np.int32)
    call = jax.jit(lambda *operands: kv_write(*operands, format=format), donate_argnums=(0, 1))
    found = call.lower(cache, cache, rows, rows, slots).compile().memory_analysis()
    assert found is not None
    assert found.alias_size_in_bytes == 2 * sum(spec.size * spec.dtype.itemsize for spec in cache)
    return found.temp_size_in_bytes


@dtypes
@pytest.mark.parametrize("tokens", [1, 2, 64])
@pytest.mark.parametrize("format", [None, *KV_FORMATS.values()], ids=str)
def test_donated_caches_are_written_in_place(tokens, format, dtype):
    assert step_memory(tokens, format, dtype, pages=512) == step_memory(tokens, format, dtype, pages=256)


class TestFormats:
    """What becomes of numbers that are stored and read again."""

    @staticmethod
    def there_and_back(x, form):
        """What is read again, and the arrays that were stored."""
        arrays = jax.jit(lambda x: encode(x, KV_FORMATS[form], None))(x)
        return np.asarray(jax.jit(lambda *arrays: decode(arrays, KV_FORMATS[form]))(*arrays)), arrays

    @formats
    @pytest.mark.parametrize("size", [1e-2, 1.0, 300.0])
    def test_errors_are_half_a_step(self, form, size):
        x = size * normal(0, 200, K, 64)
        x[::3, :, 5] *= 20  # outliers, as some channels of keys are
        found, (_, scale, *_) = self.there_and_back(x, form)
        scale = wide(scale)[..., None]
        if form == "fp8":  # 3 bits behind the leading one; below 2^-6 the steps are even
            bound = np.maximum(2.0**-4 * np.abs(x), 2.0**-10 * scale)
        else:  # and scale and minimum are rounded to float16
            bound = (0.5 + KV_FORMATS[form].largest * 2.0**-11) * scale + 2.0**-11 * np.abs(x).max(-1, keepdims=True)
        assert (np.abs(found - x) <= 1.001 * bound).all()
        assert (np.abs(found - x) > 0.5 * bound).any()

    @pytest.mark.parametrize("form, least", [("int8", 0.004), ("int4", 0.07), ("fp8", 0.02)])
    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    def test_relative_error_of_normal_numbers(self, form, least, head_dim):
        x = normal(0, 100, K, head_dim)
        found, _ = self.there_and_back(x, form)
        assert least < np.linalg.norm(found - x) / np.linalg.norm(x) < KV_FORMATS[form].error

    @formats
    def test_rows_without_extent(self, form):
        """Zeros, a constant, and numbers too small for a float16 scale; then ranges so far from 0 that their minimum is
        rounded by more than a step, down in one and up in the other."""
        rows = [np.zeros(8), np.full(8, 3.25), np.full(8, -7.0), np.linspace(0, 1e-7, 8)]
        x = np.stack([*rows, np.linspace(1000.2, 1001.2, 8), np.linspace(1000.3, 1001.3, 8)])
        found, _ = self.there_and_back(x[:, None].astype(F32), form)
        bounds = [0, 0, 0, 1e-6, 0.25, 0.25] if form != "fp8" else [0, 0.002, 0.004, 1e-6, 1001 / 16, 1001 / 16]
        assert (np.abs(found[:, 0] - x).max(axis=-1) <= bounds).all()

    @formats
    def test_worked_example(self, form):
        """The ends of a row are kept, and so are the multiples of its scale."""
        largest = KV_FORMATS[form].largest
        low, scale = (-2.0, 0.25) if form != "fp8" else (0.0, 0.25)
        steps = np.array([0, largest, 1, 2, 3, 4, 5, largest], F32)
        found, (codes, scales, *minimum) = self.there_and_back((low + scale * steps)[None, None], form)
        np.testing.assert_array_equal(found[0, 0], low + scale * steps)
        assert float(scales[0, 0]) == scale and [float(each[0, 0]) for each in minimum] == [low] * len(minimum)
        if form == "int4":
            assert np.asarray(codes)[0, 0].tolist() == [0xF0, 0x21, 0x43, 0xF5]

    @formats
    def test_what_float16_cannot_hold_does_not_pass_for_a_number(self, form):
        x = normal(0, 2, 1, 8) * np.array([1.0, 1e9], F32)[:, None, None]
        found, _ = self.there_and_back(x, form)
        assert np.isfinite(found[0]).all() and not np.isfinite(found[1]).any()


def test_shape_errors_name_the_operand():
    k_cache, v_cache = caches(F32)
    k = np.zeros((3, K, H), F32)
    with pytest.raises(TypeError, match=r"kv_write: v_cache has shape \(5, 4, 2, 8\).*pages = 6 \(from k_cache\)"):
        kv_write(k_cache, v_cache[:5], k, k, np.zeros(3, np.int32))
    with pytest.raises(TypeError, match=r"slots has shape \(2,\), expected axes \[T\] with T = 3 \(from k\)"):
        kv_write(k_cache, v_cache, k, k, np.zeros(2, np.int32))
    with pytest.raises(TypeError, match=r"k has shape \(3, 16\), expected axes \[T K H\]"):
        kv_write(k_cache, v_cache, k.reshape(3, 16), k, np.zeros(3, np.int32))


def test_wrong_caches_are_refused():
    int4 = KV_FORMATS["int4"]
    keys, values, k, slots = noise("int4", 0), noise("int4", 1), np.zeros((3, K, H), F32), np.zeros(3, np.int32)
    with pytest.raises(TypeError, match="kv_write: k_cache has 2 arrays, expected 3 in int4"):
        kv_write(keys[:2], values[:2], k, k, slots, format=int4)
    with pytest.raises(TypeError, match="v_cache has 2 arrays, expected 1 in a plain dtype"):
        kv_write(keys[0].astype(F32), values[:2], k, k, slots)
    with pytest.raises(
        TypeError, match=r"k has shape \(3, 2, 6\), expected axes \[T K H\] with H = 8 \(from k_cache\)"
    ):
        kv_write(keys, values, k[..., :6], k[..., :6], slots, format=int4)
    with pytest.raises(TypeError, match="v_cache scale has dtype float32, expected float16"):
        kv_write(keys, (values[0], values[1].astype(F32), values[2]), k, k, slots, format=int4)
    with pytest.raises(TypeError, match=r"k_cache minimum has shape \(5, 4, 2\), expected axes \[pages B K\]"):
        kv_write((*keys[:2], keys[2][:5]), values, k, k, slots, format=int4)
