"""Named real-model shapes of quantized_norm."""

from typing import Any

from jaxserve.pallas_kernels._shapes import NORM_STEPS, Case, normal, size, spec
from jaxserve.pallas_kernels.quantized_matmul.op import CODES


def cases(dtype: Any) -> list[Case]:
    """One call a model, workload and kind of codes."""
    found = []
    for name, model, work in NORM_STEPS:
        rows, width = work.step_tokens, model.width
        x, weight = spec(dtype, rows, width), spec(dtype, width)
        for activation, codes in CODES.items():
            found.append(
                Case(
                    f"{name} {activation}",
                    specs=(x, weight),
                    params={
                        "activation": activation,
                        "eps": 1e-5,
                        "plus_one": False,
                        "out_dtype": None,
                        "layer": None,
                    },
                    bytes=size(x, weight, spec(codes, rows, width), spec("float32", rows)),
                    flops=7 * rows * width,
                    fill=lambda rng, specs=(x, weight): tuple(normal(rng, each) for each in specs),
                )
            )
    return found
