"""Named real-model shapes of quantized_matmul."""

from typing import Any

import jax
import numpy as np

from jaxserve.pallas_kernels._shapes import STEPS, Case, normal, size, spec
from jaxserve.pallas_kernels.quantized_matmul import layout as layouts
from jaxserve.pallas_kernels.quantized_matmul.format import E4M3, QuantFormat

FORMATS = (QuantFormat(8, None, "none", "float16"), QuantFormat(4, 64, "minimum", "float16"))
CALLS: tuple[tuple[QuantFormat, str | None], ...] = (
    *((format, None) for format in FORMATS),
    (QuantFormat(8, None, "none", "float32"), "int8"),
    (QuantFormat(4, 64, "zero", "float32", level2="channel"), "int8"),
    (QuantFormat(8, None, "none", "float32", element="e4m3"), "e4m3"),
)
"""Formats of weights, and what activations are quantized to."""


def field_specs(
    format: QuantFormat, outputs: int, inputs: int, layout: str | None = None
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arrays of a weight, as the ops take them."""
    return tuple(spec(dtype, *shape) for shape, dtype in layouts.specs(format, outputs, inputs, layout).values())


def random_fields(rng: np.random.Generator, fields: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[np.ndarray, ...]:
    """Random codes, small positive scales, whole ones up to 8: fast to make, for measuring time only."""
    codes, *rest = fields
    kinds = 0x7F if codes.dtype == E4M3 else 256  # the first so many bytes are numbers
    made = [rng.integers(0, kinds, codes.shape, np.uint8).view(codes.dtype)]
    for field in rest:
        whole = field.dtype == np.uint8
        made.append(
            rng.integers(1, 9, field.shape, np.uint8)
            if whole
            else (rng.random(field.shape, np.float32) * 0.01).astype(field.dtype)
        )
    return tuple(made)


def cases(dtype: Any, packed: bool = True) -> list[Case]:
    """Every kind of linear layer of a model under every workload, in every one of CALLS, laid out as for a CPU."""
    found = []
    for step, model, work in STEPS:
        for kind, (outputs, inputs) in model.linears().items():
            x = spec(dtype, work.step_tokens, inputs)
            for format, activation in CALLS:
                layout = "panels" if packed and not layouts.refusal(format, outputs, inputs) else None
                fields = field_specs(format, outputs, inputs, layout)
                found.append(
                    Case(
                        f"{step} {kind} {format}{f' x {activation}' if activation else ''}",
                        specs=(x, *fields),
                        params={
                            "format": format,
                            "shape": (outputs, inputs),
                            "out_dtype": np.dtype(dtype).name,
                            "activation": activation,
                            "layer": None,
                            "layout": layout,
                        },
                        bytes=size(x, *fields, spec(dtype, work.step_tokens, outputs)),
                        flops=2 * work.step_tokens * outputs * inputs,
                        fill=lambda rng, x=x, fields=fields: (normal(rng, x), *random_fields(rng, fields)),
                    )
                )
    return found
