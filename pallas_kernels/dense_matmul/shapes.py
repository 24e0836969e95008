"""Named real-model shapes of dense_matmul."""

from typing import Any

import numpy as np

from jaxserve.pallas_kernels._shapes import STEPS, Case, normal, size, spec


def cases(dtype: Any) -> list[Case]:
    """Every kind of linear layer of a model under every workload."""
    found = []
    for step, model, work in STEPS:
        for kind, (outputs, inputs) in model.linears().items():
            x, w = spec(dtype, work.step_tokens, inputs), spec(dtype, outputs, inputs)
            found.append(
                Case(
                    f"{step} {kind}",
                    specs=(x, w),
                    params={"out_dtype": np.dtype(dtype).name},
                    bytes=size(x, w, spec(dtype, work.step_tokens, outputs)),
                    flops=2 * work.step_tokens * outputs * inputs,
                    fill=lambda rng, specs=(x, w): tuple(normal(rng, each) for each in specs),
                )
            )
    return found
