"""quantized_matmul on CPUs: binds the native kernel of cpu.cc."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels._native import is_available, native_call
from jaxserve.pallas_kernels._op import TRACED, Refusal
from jaxserve.pallas_kernels.quantized_matmul.format import QuantFormat
from jaxserve.pallas_kernels.quantized_matmul.op import OP

ACTIVATIONS = ("float32", "bfloat16")
MOST_INPUTS = 65536


def kernel(
    x: Any,
    *arrays: Any,
    format: QuantFormat,
    shape: tuple[int, int],
    out_dtype: str,
    activation: str | None,
    layer: int | str | None,
    layout: str | None,
) -> Callable[..., jax.Array] | Refusal:
    """The native kernel for this call, which adds up every row in one order, whatever it is batched with."""
    del layout  # the handler knows it by the shape of the codes
    if x.dtype.name not in ACTIVATIONS or out_dtype not in ACTIVATIONS:
        return Refusal(f"activations are {x.dtype.name} and results {out_dtype}; it knows {', '.join(ACTIVATIONS)}")
    exact = format.whole and activation in ("int8", "int8-static")
    known = (None, "e4m3") if format.element == "e4m3" else (None,)
    if not exact and (activation not in known or format.level2):
        return Refusal(
            f"it knows weights with one level of scales and float activations, weights of whole numbers and int8 ones, "
            f"and e4m3 for both, not {format} and {activation or x.dtype.name}"
        )
    outputs, inputs = shape
    if exact and inputs > MOST_INPUTS:
        return Refusal(f"sums of {inputs} whole numbers need not fit int32; it adds up to {MOST_INPUTS}")
    rows = math.prod(x.shape[:-1])
    call = native_call(
        "jaxserve_quantized_matmul",
        jax.ShapeDtypeStruct((rows, outputs), jnp.dtype(out_dtype)),
        bits=np.int64(4 if format.packed else 8),
        group=np.int64(format.group_size(inputs)),
        offset=format.offset,
        activation=activation or "",
        level2=format.level2 is not None,
        layer=layer,
    )

    def native(x: jax.Array, *arrays: jax.Array) -> jax.Array:
        if format.ordered:
            place = format.fields.index("order")
            order = arrays[place] if layer is None else arrays[place][arrays[-1] if layer == TRACED else layer]
            arrays, x = (*arrays[:place], *arrays[place + 1 :]), x[..., order]
        return call(x.reshape(rows, inputs), *arrays).reshape(*x.shape[:-1], outputs)

    return native


if is_available():
    OP.register("cpu", kernel, name="native", traced=True)
