"""Named real-model shapes of add_rms_norm."""

from typing import Any

from jaxserve.pallas_kernels._shapes import NORM_STEPS, Case, normal, size, spec


def cases(dtype: Any) -> list[Case]:
    """One call a model and workload."""
    found = []
    for name, model, work in NORM_STEPS:
        x, weight = spec(dtype, work.step_tokens, model.width), spec(dtype, model.width)
        found.append(
            Case(
                name,
                specs=(x, x, weight),
                params={"eps": 1e-5, "plus_one": False, "out_dtype": None, "layer": None},
                bytes=size(x, x, weight, x, x),
                flops=5 * work.step_tokens * model.width,
                fill=lambda rng, specs=(x, x, weight): tuple(normal(rng, each) for each in specs),
            )
        )
    return found
