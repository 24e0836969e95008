"""quantized_take: definition, shape rule, XLA reference."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int32

from jaxserve.pallas_kernels._axes import INT32, Axes
from jaxserve.pallas_kernels._op import Op, Operand
from jaxserve.pallas_kernels.quantized_matmul.format import QuantFormat
from jaxserve.pallas_kernels.quantized_matmul.layout import take
from jaxserve.pallas_kernels.quantized_matmul.op import dequantize, match_fields


def reference(
    ids: Any, *arrays: Any, format: QuantFormat, shape: tuple[int, int], dtype: str, layout: str | None
) -> Any:
    rows = [
        array if field == "order" else take(field, array, ids, layout)
        for field, array in zip(format.fields, arrays, strict=True)
    ]
    return dequantize(tuple(rows), format, shape[1], dtype)


def shape_rule(
    ids: Any, *arrays: Any, format: QuantFormat, shape: tuple[int, int], dtype: str, layout: str | None
) -> jax.ShapeDtypeStruct:
    axes = Axes("quantized_take")
    axes.match("ids", ids, "T", INT32)
    match_fields(axes, arrays, format, shape, layout=layout)
    axes.check_float("dtype", dtype)
    return jax.ShapeDtypeStruct((axes["T"], shape[1]), jnp.dtype(dtype))


OP = Op("quantized_take", reference, shape_rule).publish()


def quantized_take(
    ids: Int32[Operand, " T"],
    *arrays: Operand,
    format: QuantFormat,
    shape: tuple[int, int],
    dtype: DTypeLike,
    layout: str | None = None,
) -> Float[Array, "T I"]:
    """Rows `ids` of a quantized table [O, I], as `dtype`: y[t] = w[ids[t]], computed in float32 and rounded once.

    Ids outside the table are clipped to its first or last row. `arrays` are the fields of `format` in their order and
    `shape` is (O, I); `layout` is as for `quantized_matmul`. Raises TypeError when an array does not fit.
    """
    size = int(shape[0]), int(shape[1])
    return OP(ids, *arrays, format=format, shape=size, dtype=jnp.dtype(dtype).name, layout=layout)
