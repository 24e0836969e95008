"""Named real-model shapes of paged_attention."""

import functools
from typing import Any

import jax
import numpy as np

from jaxserve.pallas_kernels._shapes import PAGE_SIZE, STEPS, Case, Workload, normal, size, spec
from jaxserve.pallas_kernels.kv_write.format import KV_FORMATS, cache_layout, encode


def _fill(
    rng: np.random.Generator, q: jax.ShapeDtypeStruct, shape: tuple[int, ...], format: Any, work: Workload
) -> tuple[np.ndarray, ...]:
    """Pages in random order; every sequence at the end of its context."""
    pages = work.context // PAGE_SIZE
    caches = [encode(normal(rng, spec(q.dtype, *shape)), format, q.dtype) for _ in range(2)]
    return (
        normal(rng, q),
        *(np.asarray(array) for cache in caches for array in cache),
        rng.permutation(work.sequences * pages).astype(np.int32).reshape(work.sequences, pages),
        np.arange(work.sequences + 1, dtype=np.int32) * np.int32(work.tokens),
        np.full(work.sequences, work.context, np.int32),
    )


def cases(dtype: Any) -> list[Case]:
    """One layer, a model and workload each; over a plain cache, and one in every format."""
    found = []
    for format in (None, *KV_FORMATS.values()):
        for name, model, work in STEPS:
            pages = work.context // PAGE_SIZE
            q = spec(dtype, work.step_tokens, model.heads, model.head_dim)
            shape = (work.sequences * pages, PAGE_SIZE, model.kv_heads, model.head_dim)
            cache = [array for _, array in cache_layout(format, np.dtype(dtype), *shape).values()]
            tables = spec(np.int32, work.sequences, pages)
            starts, lengths = spec(np.int32, work.sequences + 1), spec(np.int32, work.sequences)
            seen = sum(range(work.context - work.tokens + 1, work.context + 1))  # keys that the tokens of a row see
            found.append(
                Case(
                    f"{name} {format}" if format else name,
                    specs=(q, *cache, *cache, tables, starts, lengths),
                    params={
                        "scale": model.head_dim**-0.5,
                        "window": None,
                        "softcap": None,
                        "format": format,
                        "layer": None,
                    },
                    bytes=size(q, *cache, *cache, tables, starts, lengths, q),
                    flops=4 * model.heads * model.head_dim * work.sequences * seen,
                    fill=functools.partial(_fill, q=q, shape=shape, format=format, work=work),
                )
            )
    return found
