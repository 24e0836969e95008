"""Paged attention's kernel for Hopper in Mosaic's interpreter, which looks for races, against the reference."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels import KV_FORMATS, Refusal
from jaxserve.pallas_kernels._target import compiling_for
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu import kernel
from jaxserve.pallas_kernels.paged_attention.op import OP
from jaxserve.targets import H100_SXM
from tests.pallas_kernels.harness import BF16, F32, normal

PLAIN: dict[str, Any] = {"scale": 0.125, "window": None, "softcap": None, "format": None, "layer": None}


def operands(lengths: list[int], pages_per_seq: int, dtype: np.dtype, layer: int | None) -> tuple[Any, ...]:
    """Four query heads of two KV heads, pages of 16 in random order. What no context reaches is NaN, and table entries
    past a context point nowhere. A sequence of length 0 has no token; tokens behind the last one are padding."""
    pages = len(lengths) * pages_per_seq
    tables = np.random.default_rng(0).permutation(pages).astype(np.int32).reshape(-1, pages_per_seq)
    free = np.ones((pages, 16), bool)
    for row, length in zip(tables, lengths, strict=True):
        slots = np.arange(length)
        free[row[slots // 16], slots % 16] = False
        row[-(-length // 16) :] = 10**6
    shape = (pages, 16, 2, 64) if layer is None else (2, pages, 16, 2, 64)
    caches = [normal(seed, *shape).astype(dtype) for seed in (1, 2)]
    for cache in caches:
        (cache if layer is None else cache[layer])[free] = np.nan
    starts = np.cumsum([0, *(length > 0 for length in lengths)]).astype(np.int32)
    return normal(3, len(lengths), 4, 64), *caches, tables, starts, np.array(lengths, np.int32)


@pytest.mark.parametrize(
    ("lengths", "pages_per_seq", "dtype", "options"),
    [
        ([600, 1, 130], 40, BF16, {}),  # a context in two parts, one of a single token, one past a block's border
        ([150, 0, 64], 12, np.dtype(np.float16), {"layer": 1, "window": 70, "softcap": 5.0}),
    ],
    ids=["plain", "layer-window-softcap"],
)
def test_decode(lengths, pages_per_seq, dtype, options):
    options = PLAIN | options
    given = operands(lengths, pages_per_seq, dtype, options["layer"])
    expected = OP.reference(*given, **options)
    with (
        compiling_for(H100_SXM),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
    ):
        run = kernel(*given, **options, stage_lhs_in_smem=True)
        assert not isinstance(run, Refusal), run
        found = run(*given)
    # Queries and weights are rounded to the cache's dtype, half a unit of 2^-8 each for bf16.
    np.testing.assert_allclose(found, expected, rtol=0, atol=2.0**-8 * np.abs(expected).max())
    assert np.isfinite(found).all()


def test_refusals_say_why():
    def reason(q: tuple[int, ...], cache: tuple[int, ...], sequences: int, **options: Any) -> str:
        tables = jax.ShapeDtypeStruct((sequences, 4), np.int32)
        kv = jax.ShapeDtypeStruct(cache, BF16)
        with compiling_for(H100_SXM):
            answer = kernel(jax.ShapeDtypeStruct(q, F32), kv, kv, tables, None, None, **PLAIN | options)
        assert isinstance(answer, Refusal)
        return answer.reason

    assert "32 tokens of 4 sequences" in reason((32, 4, 64), (8, 16, 2, 64), 4)
    assert "query heads of 80" in reason((4, 4, 80), (8, 16, 2, 80), 4)
    assert "pages of 128" in reason((4, 4, 64), (8, 128, 2, 64), 4)
    assert "kept in int8" in reason((4, 4, 64), (8, 16, 2, 64), 4, format=KV_FORMATS["int8"])
