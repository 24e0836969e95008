"""Named real-model shapes of quantized_matmul."""

from typing import Any

import jax
import numpy as np

from jaxserve.pallas_kernels._shapes import STEPS, Case, normal, size, spec
from jaxserve.pallas_kernels.quantized_matmul.format import QuantFormat

FORMATS = (QuantFormat(8, None, "none", "float16"), QuantFormat(4, 64, "minimum", "float16"))


def field_specs(format: QuantFormat, outputs: int, inputs: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arrays of a weight, as the ops take them."""
    return tuple(spec(dtype, *shape) for shape, dtype in format.specs(outputs, inputs).values())


def random_fields(rng: np.random.Generator, fields: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[np.ndarray, ...]:
    """Random codes of any bits, small positive scales: fast to make, for measuring time only."""
    codes, *rest = fields
    made = [rng.integers(0, 256, codes.shape, np.uint8).view(codes.dtype)]
    made += [(rng.random(field.shape, np.float32) * 0.01).astype(field.dtype) for field in rest]
    return tuple(made)


def cases(dtype: Any) -> list[Case]:
    """Every kind of linear layer of a model under every workload, 8 bits per channel and 4 bits in groups of 64."""
    found = []
    for step, model, work in STEPS:
        for kind, (outputs, inputs) in model.linears().items():
            x = spec(dtype, work.step_tokens, inputs)
            for format in FORMATS:
                fields = field_specs(format, outputs, inputs)
                found.append(
                    Case(
                        f"{step} {kind} {format}",
                        specs=(x, *fields),
                        params={"format": format, "shape": (outputs, inputs), "out_dtype": np.dtype(dtype).name},
                        bytes=size(x, *fields, spec(dtype, work.step_tokens, outputs)),
                        flops=2 * work.step_tokens * outputs * inputs,
                        fill=lambda rng, x=x, fields=fields: (normal(rng, x), *random_fields(rng, fields)),
                    )
                )
    return found
