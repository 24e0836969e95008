"""Named real-model shapes of paged_attention."""

import functools
import itertools
from typing import Any

import jax
import numpy as np

from jaxserve.pallas_kernels._shapes import (
    PAGE_SIZE,
    STEPS,
    WIDE_HEADS,
    WORKLOADS,
    Case,
    Model,
    Workload,
    normal,
    size,
    spec,
)
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


MASKS = {"gemma-2-9b": {"window": 4096, "softcap": 50.0}, "gemma-3-4b": {"window": 1024}}
"""What the sliding layers of some models do beside attention."""


def cases(dtype: Any) -> list[Case]:
    """One layer, a model and workload each; over a plain cache, and one in every format. Of models with wide heads a
    plain cache, and a layer with a window and one without."""
    formats: tuple[Any, ...] = (None, *KV_FORMATS.values())
    found = [
        _case(f"{name} {format}" if format else name, dtype, model, work, format)
        for format in formats
        for name, model, work in STEPS
    ]
    for model, work in itertools.product(WIDE_HEADS, WORKLOADS):
        masks, name = MASKS[model.name], f"{model.name} {work.name}"
        found.append(_case(name, dtype, model, work, None, **masks | {"window": None}))
        found.append(_case(f"{name} window", dtype, model, work, None, **masks))
    return found


def _case(name: str, dtype: Any, model: Model, work: Workload, format: Any, **masks: Any) -> Case:
    pages = work.context // PAGE_SIZE
    q = spec(dtype, work.step_tokens, model.heads, model.head_dim)
    shape = (work.sequences * pages, PAGE_SIZE, model.kv_heads, model.head_dim)
    cache = [array for _, array in cache_layout(format, np.dtype(dtype), *shape).values()]
    tables = spec(np.int32, work.sequences, pages)
    starts, lengths = spec(np.int32, work.sequences + 1), spec(np.int32, work.sequences)
    # No context here is longer than a window: tokens see all that is before them.
    seen = sum(range(work.context - work.tokens + 1, work.context + 1))
    plain = {"scale": model.head_dim**-0.5, "window": None, "softcap": None, "format": format, "layer": None}
    return Case(
        name,
        specs=(q, *cache, *cache, tables, starts, lengths),
        params=plain | masks,
        bytes=size(q, *cache, *cache, tables, starts, lengths, q),
        flops=4 * model.heads * model.head_dim * work.sequences * seen,
        fill=functools.partial(_fill, q=q, shape=shape, format=format, work=work),
    )
