"""Paged attention's kernels for Hopper in Mosaic's interpreter, which looks for races, against the reference."""

from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels import KV_FORMATS, Refusal
from jaxserve.pallas_kernels._target import compiling_for
from jaxserve.pallas_kernels.kv_write.format import encode
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu import kernel
from jaxserve.pallas_kernels.paged_attention.op import OP
from jaxserve.targets import H100_SXM
from tests.pallas_kernels.harness import BF16, F32, normal

# Slots past a context are multiplied, too, before they are masked.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

F16 = np.dtype(np.float16)
PLAIN: dict[str, Any] = {"scale": 0.125, "window": None, "softcap": None, "format": None, "layer": None}


class Heads(NamedTuple):
    """Query heads, KV heads, their width, and the slots of a page."""

    q: int = 4
    kv: int = 2
    dim: int = 64
    page: int = 16


def operands(
    rows: list[tuple[int, int]],
    pages_per_seq: int,
    dtype: np.dtype,
    options: dict[str, Any],
    heads: Heads | None = None,
    padding: int = 0,
) -> tuple[Any, ...]:
    """Rows of so many new tokens in contexts of such a length, pages in random order, then tokens of padding. What no
    context reaches is NaN, and table entries past a context point nowhere."""
    format, layer, heads = options["format"], options["layer"], heads or Heads()
    pages = len(rows) * pages_per_seq
    tables = np.random.default_rng(0).permutation(pages).astype(np.int32).reshape(-1, pages_per_seq)
    free = np.ones((pages, heads.page), bool)
    for row, (_, length) in zip(tables, rows, strict=True):
        slots = np.arange(length)
        free[row[slots // heads.page], slots % heads.page] = False
        row[-(-length // heads.page) :] = 10**6
    caches = []
    for seed in (1, 2):
        for array in encode(normal(seed, pages, heads.page, heads.kv, heads.dim), format, dtype):
            array = np.array(array)
            array[free] = 0x7F if array.dtype == np.uint8 else np.nan  # 0x7F is fp8's NaN
            caches.append(array if layer is None else np.stack([array[::-1], array]))
    starts = np.cumsum([0, *(tokens for tokens, _ in rows)]).astype(np.int32)
    q = normal(3, int(starts[-1]) + padding, heads.q, heads.dim)
    return q, *caches, tables, starts, np.array([length for _, length in rows], np.int32)


def run(given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The kernel's result; a race is an error."""
    with (
        compiling_for(H100_SXM),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
    ):
        chosen = kernel(*given, **options, stage_lhs_in_smem=True)
        assert not isinstance(chosen, Refusal), chosen
        return chosen(*given)


def check(options: dict[str, Any], given: tuple[Any, ...], rtol: float) -> None:
    """Compares with the reference, relative to the largest number."""
    expected = jax.jit(lambda *given: OP.reference(*given, **options))(*given)
    found = run(given, options)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, expected, rtol=0, atol=rtol * np.abs(expected).max())


# Queries and weights are rounded to the cache's dtype, half a unit of 2^-8 each for bf16.
ERROR = 2.0**-8


@pytest.mark.parametrize(
    ("lengths", "pages_per_seq", "dtype", "options"),
    [
        ([600, 1, 130], 40, BF16, {}),  # a context in two parts, one of a single token, one past a block's border
        ([150, 0, 64], 12, F16, {"layer": 1, "window": 70, "softcap": 5.0}),
    ],
    ids=["plain", "layer-window-softcap"],
)
def test_decode(lengths, pages_per_seq, dtype, options):
    """A sequence of length 0 has no token; tokens behind the last one are padding."""
    options, rows = PLAIN | options, [(int(length > 0), length) for length in lengths]
    padding = sum(length == 0 for length in lengths)
    check(options, operands(rows, pages_per_seq, dtype, options, padding=padding), ERROR)


@pytest.mark.parametrize(
    ("rows", "pages_per_seq", "dtype", "options", "heads"),
    [
        # A prompt, one that goes on, and a sequence that decodes beside them.
        ([(40, 40), (1, 70), (3, 150)], 10, BF16, {}, Heads(q=2, kv=1)),
        # Two warpgroups a tile; nothing to hide in the middle of the context.
        pytest.param([(140, 400)], 25, BF16, {"window": 150}, Heads(q=2, kv=1), marks=pytest.mark.slow),
        ([(5, 300), (0, 0), (4, 4)], 20, F16, {"layer": 1, "window": 70, "softcap": 5.0}, Heads(q=3, kv=1, page=128)),
        ([(6, 90)], 6, BF16, {}, Heads(q=1, kv=1, dim=96)),
        # Two warpgroups share the values of a tile; one sequence decodes, one goes on.
        ([(1, 70), (3, 40)], 5, BF16, {"window": 50}, Heads(q=2, kv=1, dim=256)),
        pytest.param([(1, 70), (3, 40)], 5, F16, {}, Heads(q=2, kv=1, dim=256), marks=pytest.mark.slow),
    ],
    ids=[
        "mixed",
        "two-warpgroups-window",
        "verify-layer-window-softcap",
        "heads-of-96",
        "heads-of-256",
        "heads-of-256-f16",
    ],
)
def test_several_tokens(rows, pages_per_seq, dtype, options, heads):
    options = PLAIN | options
    check(options, operands(rows, pages_per_seq, dtype, options, heads, padding=2), ERROR)


@pytest.mark.parametrize(
    "name", ["int4", pytest.param("int8", marks=pytest.mark.slow), pytest.param("fp8", marks=pytest.mark.slow)]
)
def test_caches_of_few_bits(name):
    """Rows that decode and one of several tokens, over codes. A rounded weight is multiplied with a code, which can be
    as far from 0 as the numbers of a row are from each other: twice the error."""
    options = PLAIN | {"format": KV_FORMATS[name], "layer": 1}
    check(options, operands([(1, 70), (3, 20)], 5, BF16, options, Heads(q=8, kv=8), padding=1), 2 * ERROR)


def test_what_a_sequence_decodes_does_not_depend_on_its_company():
    given = operands([(1, 150)], 10, BF16, PLAIN)
    beside = operands([(1, 150), (9, 80)], 10, BF16, PLAIN)
    q, k, v = given[0], given[1], given[2]
    mixed_q = np.concatenate([q, beside[0][1:]])
    tables = np.concatenate([given[3], given[3]])
    mixed = (mixed_q, k, v, tables, *beside[4:])
    alone, found = run(given, PLAIN), run(mixed, PLAIN)
    np.testing.assert_array_equal(found[0], alone[0])


def test_refusals_say_why():
    def reason(q: tuple[int, ...], cache: tuple[int, ...], sequences: int, **options: Any) -> str:
        tables = jax.ShapeDtypeStruct((sequences, 4), np.int32)
        kv = jax.ShapeDtypeStruct(cache, options.pop("dtype", BF16))
        with compiling_for(H100_SXM):
            answer = kernel(jax.ShapeDtypeStruct(q, F32), kv, kv, tables, None, None, **PLAIN | options)
        assert isinstance(answer, Refusal)
        return answer.reason

    assert "query heads of 512" in reason((4, 4, 512), (8, 16, 2, 512), 4)
    assert "heads of 256 in int8" in reason((4, 8, 256), (8, 16, 8, 256), 4, format=KV_FORMATS["int8"])
    assert "query heads of 80" in reason((4, 4, 80), (8, 16, 2, 80), 4)
    assert "pages of 12" in reason((4, 4, 64), (8, 12, 2, 64), 4)
    assert "the cache is float32" in reason((4, 4, 64), (8, 16, 2, 64), 4, dtype=F32)
    assert "scales of 2 KV heads" in reason((4, 4, 64), (8, 16, 2, 64), 4, format=KV_FORMATS["int8"])
