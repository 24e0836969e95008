"""Named real-model shapes of kv_write."""

import functools
from typing import Any

import jax
import numpy as np

from jaxserve.pallas_kernels._shapes import PAGE_SIZE, STEPS, Case, Workload, normal, size, spec
from jaxserve.pallas_kernels.kv_write.format import KV_FORMATS, cache_layout


def cases(dtype: Any) -> list[Case]:
    """One layer, a model and workload each, into a pool of 4096 tokens; plain, and in every format."""
    pages = 4096 // PAGE_SIZE
    found = []
    for format in (None, *KV_FORMATS.values()):
        for name, model, work in STEPS:
            layout = cache_layout(format, np.dtype(dtype), pages, PAGE_SIZE, model.kv_heads, model.head_dim)
            cache = [array for _, array in layout.values()]
            rows = spec(dtype, work.step_tokens, model.kv_heads, model.head_dim)
            slots = spec(np.int32, work.step_tokens)
            written = 2 * size(*cache) * work.step_tokens // (pages * PAGE_SIZE)
            found.append(
                Case(
                    f"{name} {format}" if format else name,
                    specs=(*cache, *cache, rows, rows, slots),
                    params={"format": format, "layer": None},
                    bytes=size(rows, rows, slots) + written,
                    flops=0,
                    fill=functools.partial(_fill, caches=cache * 2, rows=rows, work=work, slots=pages * PAGE_SIZE),
                    updated=2 * len(cache),
                )
            )
    return found


def _fill(
    rng: np.random.Generator, caches: list[jax.ShapeDtypeStruct], rows: jax.ShapeDtypeStruct, work: Workload, slots: int
) -> tuple[np.ndarray, ...]:
    """Tokens in slots of random order."""
    return (
        *(np.zeros(cache.shape, cache.dtype) for cache in caches),
        normal(rng, rows),
        normal(rng, rows),
        rng.permutation(slots)[: work.step_tokens].astype(np.int32),
    )
