"""Named real-model shapes of gated_activation."""

from typing import Any

from jaxserve.pallas_kernels._shapes import STEPS, Case, normal, size, spec


def cases(dtype: Any) -> list[Case]:
    """SwiGLU of one layer, a model and workload each; an exponential and a division count as one operation each."""
    found = []
    for name, model, work in STEPS:
        x, y = spec(dtype, work.step_tokens, 2 * model.mlp), spec(dtype, work.step_tokens, model.mlp)
        found.append(
            Case(
                name,
                specs=(x,),
                params={"activation": "silu", "out_dtype": None},
                bytes=size(x, y),
                flops=5 * work.step_tokens * model.mlp,
                fill=lambda rng, x=x: (normal(rng, x),),
            )
        )
    return found
