"""Named real-model shapes of kv_write."""

from typing import Any

import numpy as np

from jaxserve.pallas_kernels._shapes import PAGE_SIZE, STEPS, Case, normal, size, spec


def cases(dtype: Any) -> list[Case]:
    """One layer, a model and workload each, into a pool of 4096 tokens."""
    pages = 4096 // PAGE_SIZE
    found = []
    for name, model, work in STEPS:
        cache = spec(dtype, pages, PAGE_SIZE, model.kv_heads, model.head_dim)
        rows = spec(dtype, work.step_tokens, model.kv_heads, model.head_dim)
        slots = spec(np.int32, work.step_tokens)
        found.append(
            Case(
                name,
                specs=(cache, cache, rows, rows, slots),
                params={},
                bytes=size(rows, rows, slots, rows, rows),
                flops=0,
                fill=lambda rng, cache=cache, rows=rows, work=work: (
                    normal(rng, cache),
                    normal(rng, cache),
                    normal(rng, rows),
                    normal(rng, rows),
                    rng.permutation(pages * PAGE_SIZE)[: work.step_tokens].astype(np.int32),
                ),
            )
        )
    return found
