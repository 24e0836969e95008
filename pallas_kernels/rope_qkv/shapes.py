"""Named real-model shapes of rope_qkv."""

from typing import Any

import numpy as np

from jaxserve.pallas_kernels._shapes import STEPS, Case, normal, size, spec
from jaxserve.pallas_kernels.rope.spec import RopeSpec


def cases(dtype: Any) -> list[Case]:
    """The fused product of one layer, a model and workload each."""
    found = []
    for name, model, work in STEPS:
        x = spec(dtype, work.step_tokens, model.linears()["qkv"][0])
        positions = spec(np.int32, work.step_tokens)
        last = np.arange(work.context - work.tokens, work.context, dtype=np.int32)
        found.append(
            Case(
                name,
                specs=(x, positions),
                params={
                    "spec": RopeSpec(model.head_dim, 500_000.0),
                    "heads": model.heads,
                    "kv_heads": model.kv_heads,
                    "layer": None,
                },
                bytes=size(x, positions, x),
                flops=3 * work.step_tokens * (model.heads + model.kv_heads) * model.head_dim,
                fill=lambda rng, x=x, last=last, work=work: (normal(rng, x), np.tile(last, work.sequences)),
            )
        )
    return found
