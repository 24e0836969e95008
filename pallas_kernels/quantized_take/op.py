"""quantized_take: definition, shape rule, XLA reference."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int32

from jaxserve.pallas_kernels._axes import INT32, Axes
from jaxserve.pallas_kernels._op import Op, Operand
from jaxserve.pallas_kernels.quantized_matmul.format import QuantFormat
from jaxserve.pallas_kernels.quantized_matmul.op import dequantize, match_fields


def reference(ids: Any, *arrays: Any, format: QuantFormat, shape: tuple[int, int], dtype: str) -> Any:
    rows = [
        array if field == "order" else jnp.take(array, ids, axis=0, mode="clip")
        for field, array in zip(format.fields, arrays, strict=True)
    ]
    return dequantize(tuple(rows), format, shape[1], dtype)


def shape_rule(ids: Any, *arrays: Any, format: QuantFormat, shape: tuple[int, int], dtype: str) -> jax.ShapeDtypeStruct:
    axes = Axes("quantized_take")
    axes.match("ids", ids, "T", INT32)
    match_fields(axes, arrays, format, shape)
    axes.check_float("dtype", dtype)
    return jax.ShapeDtypeStruct((axes["T"], shape[1]), jnp.dtype(dtype))


OP = Op("quantized_take", reference, shape_rule).publish()


def quantized_take(
    ids: Int32[Operand, " T"], *arrays: Operand, format: QuantFormat, shape: tuple[int, int], dtype: DTypeLike
) -> Float[Array, "T I"]:
    """Rows `ids` of a quantized table [O, I], as `dtype`: y[t] = w[ids[t]], computed in float32 and rounded once.

    Ids outside the table are clipped to its first or last row. `arrays` are the fields of `format` in their order and
    `shape` is (O, I). Raises TypeError when an array does not fit the format.
    """
    return OP(ids, *arrays, format=format, shape=(int(shape[0]), int(shape[1])), dtype=jnp.dtype(dtype).name)
