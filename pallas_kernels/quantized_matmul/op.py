"""quantized_matmul: definition, shape rule, XLA reference."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from jaxserve.pallas_kernels._axes import FLOATS, Axes
from jaxserve.pallas_kernels._op import Op, Operand, spec_like
from jaxserve.pallas_kernels.dense_matmul.op import reference as dense_reference
from jaxserve.pallas_kernels.quantized_matmul.format import QuantFormat


def dequantize(arrays: tuple[Any, ...], format: QuantFormat, inputs: int, dtype: DTypeLike) -> Any:
    """Rows of a quantized weight as `dtype` [..., I]; arrays in the order of `format.fields`, codes [..., I or I/2]."""
    fields = dict(zip(format.fields, arrays, strict=True))
    weight = _stored_rows(fields, format, inputs).astype(dtype)
    return weight[..., jnp.argsort(fields["order"])] if format.ordered else weight


def _codes(fields: dict[str, Any], format: QuantFormat, inputs: int) -> Any:
    """Codes, one an element: int8, uint8 or float8_e4m3fn [..., I]."""
    codes = fields["codes"]
    if not format.packed:
        return codes
    codes = jnp.stack([codes & 0x0F, codes >> 4], axis=-1).reshape(*codes.shape[:-1], inputs).astype(jnp.int8)
    return (codes ^ 8) - 8 if format.signed else codes


def _stored_rows(fields: dict[str, Any], format: QuantFormat, inputs: int) -> Any:
    """Rows of the weight in float32, their inputs in the order in which they are stored."""
    size = format.group_size(inputs)

    def spread(name: str) -> Any:
        return jnp.repeat(fields[name].astype(jnp.float32), size, axis=-1)[..., :inputs]

    weight = _codes(fields, format, inputs).astype(jnp.float32)
    if format.offset == "zero":
        weight = weight - spread("zero")
    weight = weight * spread("scale")
    if format.offset == "minimum":
        weight = weight + spread("minimum")
    return weight * fields[format.level2].astype(jnp.float32) if format.level2 else weight


def match_fields(axes: Axes, arrays: tuple[Any, ...], format: QuantFormat, shape: tuple[int, int]) -> None:
    """Checks the arrays of a quantized weight against its format; TypeError names the field that does not fit."""
    if len(arrays) != len(format.fields):
        raise axes.fail(f"{format} takes the arrays {', '.join(format.fields)}, got {len(arrays)} arrays")
    try:
        specs = format.specs(*shape)
    except ValueError as error:
        raise axes.fail(str(error)) from error
    for (name, (expected, dtype)), array in zip(specs.items(), arrays, strict=True):
        if tuple(array.shape) != expected or array.dtype != dtype:
            raise axes.fail(
                f"{name} is {array.dtype.name} {list(array.shape)}, expected {dtype.name} {list(expected)} "
                f"for a [{shape[0]}, {shape[1]}] weight in {format}"
            )


# Rows of the weight that the reference dequantizes at a time: about this many floats, which stay in a core's cache.
_BLOCK = 1 << 17


def reference(x: Any, *arrays: Any, format: QuantFormat, shape: tuple[int, int], out_dtype: str) -> Any:
    """Block after block of outputs, in a loop: written at once, XLA would dequantize every layer's weight ahead of its
    use and hold all of them."""
    outputs, inputs = shape
    rows = min(outputs, max(1, _BLOCK // inputs))
    fields = dict(zip(format.fields, arrays, strict=True))
    wide = x.astype(jnp.float32)
    if format.ordered:
        wide = wide[..., fields.pop("order")]

    def block(index: Any, y: Any) -> Any:
        start = jnp.minimum(index * rows, outputs - rows)  # the last block may compute rows again, to the same numbers
        part = {name: jax.lax.dynamic_slice_in_dim(array, start, rows) for name, array in fields.items()}
        product = dense_reference(wide, _stored_rows(part, format, inputs), out_dtype=out_dtype)
        return jax.lax.dynamic_update_slice_in_dim(y, product, start, axis=y.ndim - 1)

    y = jnp.zeros((*x.shape[:-1], outputs), out_dtype)
    return jax.lax.fori_loop(0, -(-outputs // rows), block, y)


def shape_rule(
    x: Any, *arrays: Any, format: QuantFormat, shape: tuple[int, int], out_dtype: str
) -> jax.ShapeDtypeStruct:
    axes = Axes("quantized_matmul")
    axes.match("x", x, f"... {shape[1]}", FLOATS)
    match_fields(axes, arrays, format, shape)
    axes.check_float("out_dtype", out_dtype)
    return spec_like(x, shape=(*x.shape[:-1], shape[0]), dtype=jnp.dtype(out_dtype))


OP = Op("quantized_matmul", reference, shape_rule).publish()


def quantized_matmul(
    x: Float[Operand, "*rows I"],
    *arrays: Operand,
    format: QuantFormat,
    shape: tuple[int, int],
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "*rows O"]:
    """y[..., o] = sum_i x[..., i] w[o, i] with w given by `arrays`, the fields of `format` in their order.

    w is computed in float32 (see `QuantFormat`) and not rounded; the product is accumulated in float32 and rounded once
    to `out_dtype` (x's dtype if None). `shape` is (O, I). Raises TypeError when an array does not fit.
    """
    out = jnp.dtype(out_dtype or x.dtype).name
    return OP(x, *arrays, format=format, shape=(int(shape[0]), int(shape[1])), out_dtype=out)
