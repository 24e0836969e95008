"""quantized_matmul on CPUs: binds the native kernel of cpu.cc."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels._native import is_available, native_call
from jaxserve.pallas_kernels._op import Refusal
from jaxserve.pallas_kernels.quantized_matmul.format import QuantFormat
from jaxserve.pallas_kernels.quantized_matmul.op import OP

ACTIVATIONS = ("float32", "bfloat16")


def kernel(
    x: Any,
    *arrays: Any,
    format: QuantFormat,
    shape: tuple[int, int],
    out_dtype: str,
    activation: str | None,
    layer: int | None,
) -> Callable[..., jax.Array] | Refusal:
    """The native kernel for this call, which adds up every row in one order, whatever it is batched with."""
    if x.dtype.name not in ACTIVATIONS or out_dtype not in ACTIVATIONS:
        return Refusal(f"activations are {x.dtype.name} and results {out_dtype}; it knows {', '.join(ACTIVATIONS)}")
    if activation is not None or format.element != "int" or format.level2:
        return Refusal(f"it knows integer weights with one level of scales and float activations, not {format}")
    outputs, inputs = shape
    rows = math.prod(x.shape[:-1])
    call = native_call(
        "jaxserve_quantized_matmul",
        jax.ShapeDtypeStruct((rows, outputs), jnp.dtype(out_dtype)),
        bits=np.int64(4 if format.packed else 8),
        group=np.int64(format.group_size(inputs)),
        offset=format.offset,
        layer=np.int64(layer or 0),
    )

    def native(x: jax.Array, *arrays: jax.Array) -> jax.Array:
        if format.ordered:
            order = arrays[-1]
            arrays, x = arrays[:-1], x[..., order if layer is None else order[layer]]
        return call(x.reshape(rows, inputs), *arrays).reshape(*x.shape[:-1], outputs)

    return native


if is_available():
    OP.register("cpu", kernel, name="native")
