"""quantized_matmul: definition, shape rule, XLA reference."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Shaped

from jaxserve.pallas_kernels._axes import FLOATS, Axes
from jaxserve.pallas_kernels._op import Op, Operand, spec_like
from jaxserve.pallas_kernels.dense_matmul.op import reference as dense_reference
from jaxserve.pallas_kernels.quantized_matmul import layout as layouts
from jaxserve.pallas_kernels.quantized_matmul.format import E4M3, QuantFormat

ACTIVATIONS = (None, "int8", "int8-static", "e4m3")
LARGEST = {"int8": 127, "int8-static": 127, "e4m3": 448}
"""The largest code of an activation."""

CODES = {"int8": jnp.dtype(jnp.int8), "e4m3": E4M3}
"""What the codes of an activation with a scale a token are kept in."""


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


def _whole_rows(fields: dict[str, Any], format: QuantFormat, inputs: int) -> tuple[Any, Any, Any]:
    """Rows of a weight in a whole format: int8 [..., I], what their codes stand above their zero point (int32 [..., 1],
    or 0), and the scale [..., 1] in float32."""
    codes = _codes(fields, format, inputs)
    if format.level2:
        size = format.group_size(inputs)
        scale, zero = (
            jnp.repeat(fields[name], size, axis=-1)[..., :inputs].astype(jnp.int8) for name in ("scale", "zero")
        )
        return (codes - zero) * scale, 0, fields[format.level2].astype(jnp.float32)
    scale = fields["scale"].astype(jnp.float32)
    if format.signed:
        return codes, 0, scale
    middle = 2 ** (format.bits - 1)
    return (codes.astype(jnp.int32) - middle).astype(jnp.int8), fields["zero"].astype(jnp.int32) - middle, scale


def is_coded(x: Any, activation: str | None) -> bool:
    """Whether x is given as codes of that activation."""
    return activation in CODES and x.dtype == CODES[activation]


def quantize_activation(x: Any, activation: str, scale: Any = None) -> tuple[Any, Any]:
    """Codes [..., I] (int8 or float8_e4m3fn) of an activation, and their scale: [..., 1] a token, or the static one.

    What is given as codes already stays as it is, with its scale.
    """
    if is_coded(x, activation):
        return x, scale
    wide, largest = x.astype(jnp.float32), LARGEST[activation]
    if scale is None:
        scale = jnp.abs(wide).max(axis=-1, keepdims=True) / largest
    smallest = -448 if activation == "e4m3" else -128  # checkpoints' static scales make use of the whole range
    codes = jnp.clip(jnp.where(scale > 0, wide / jnp.where(scale > 0, scale, 1), 0), smallest, largest)
    return (codes.astype(jnp.float8_e4m3fn) if activation == "e4m3" else jnp.rint(codes).astype(jnp.int8)), scale


def match_fields(
    axes: Axes,
    arrays: tuple[Any, ...],
    format: QuantFormat,
    shape: tuple[int, int],
    layer: int | None = None,
    layout: str | None = None,
) -> None:
    """Checks the arrays of a quantized weight, or with a `layer` of several layers', against format and layout;
    TypeError names the field that does not fit."""
    if layout not in layouts.LAYOUTS:
        raise axes.fail(f"layout must be one of {', '.join(map(str, layouts.LAYOUTS))}, got {layout!r}")
    if len(arrays) != len(format.fields):
        raise axes.fail(f"{format} takes the arrays {', '.join(format.fields)}, got {len(arrays)} arrays")
    try:
        specs = layouts.specs(format, *shape, layout)
    except ValueError as error:
        raise axes.fail(str(error)) from error
    stack: tuple[int, ...] = ()
    if layer is not None:
        stack = arrays[0].shape[:1]
        if not 0 <= layer < math.prod(stack):
            raise axes.fail(f"layer must be from 0 to {math.prod(stack) - 1}, got {layer}")
    for (name, (expected, dtype)), array in zip(specs.items(), arrays, strict=True):
        if tuple(array.shape) != (*stack, *expected) or array.dtype != dtype:
            raise axes.fail(
                f"{name} is {array.dtype.name} {list(array.shape)}, expected {dtype.name} {[*stack, *expected]} "
                f"for a [{shape[0]}, {shape[1]}] weight in {format}{f' and {layout}' if layout else ''}"
            )


# Rows of the weight that the reference dequantizes at a time: about this many floats, which stay in a core's cache.
_BLOCK = 1 << 17


def reference(
    x: Any,
    *arrays: Any,
    format: QuantFormat,
    shape: tuple[int, int],
    out_dtype: str,
    activation: str | None,
    layer: int | None,
    layout: str | None,
) -> Any:
    """Block after block of outputs, in a loop: written at once, XLA would dequantize every layer's weight ahead of its
    use and hold all of them."""
    outputs, inputs = shape
    unit = layouts.OUTPUTS if layout else 1  # outputs that lie together
    rows = min(outputs, max(unit, _BLOCK // inputs // unit * unit))
    fields = dict(zip(format.fields, arrays, strict=False))
    if format.ordered:
        order = fields.pop("order")
        x = x[..., order if layer is None else order[layer]]
    first = 0
    if layer is not None:  # a block is cut out of the stack: taking the layer first would copy it
        first, fields = layer * outputs, {name: array.reshape(-1, *array.shape[2:]) for name, array in fields.items()}
    if activation is None:
        product, scale = partial(_product, x.astype(jnp.float32)), jnp.float32(1)
    else:
        codes, scale = quantize_activation(x, activation, *arrays[len(format.fields) :])
        whole = format.whole and activation != "e4m3"
        product = partial(_whole_product, codes) if whole else partial(_product, codes.astype(jnp.float32))

    def block(index: Any, y: Any) -> Any:
        start = jnp.minimum(index * rows, outputs - rows)  # the last block may compute rows again, to the same numbers
        part = {name: layouts.rows(name, array, first + start, rows, layout) for name, array in fields.items()}
        found = product(part, format, inputs) * scale
        return jax.lax.dynamic_update_slice_in_dim(y, found.astype(out_dtype), start, axis=y.ndim - 1)

    y = jnp.zeros((*x.shape[:-1], outputs), out_dtype)
    return jax.lax.fori_loop(0, -(-outputs // rows), block, y)


def _product(x: Any, fields: dict[str, Any], format: QuantFormat, inputs: int) -> Any:
    """x [..., I] float32 with rows of the weight, in float32."""
    return dense_reference(x, _stored_rows(fields, format, inputs), out_dtype="float32")


def _whole_product(x: Any, fields: dict[str, Any], format: QuantFormat, inputs: int) -> Any:
    """x [..., I] int8 with rows of the weight: summed in int32, exactly, then scaled."""
    weight, above, scale = _whole_rows(fields, format, inputs)
    contract_last = (((x.ndim - 1,), (1,)), ((), ()))
    total = jax.lax.dot_general(x, weight, contract_last, preferred_element_type=jnp.int32)
    if not isinstance(above, int):
        total -= x.astype(jnp.int32).sum(axis=-1, keepdims=True) * above[:, 0]
    return total.astype(jnp.float32) * scale[:, 0]


def shape_rule(
    x: Any,
    *arrays: Any,
    format: QuantFormat,
    shape: tuple[int, int],
    out_dtype: str,
    activation: str | None,
    layer: int | None,
    layout: str | None,
) -> jax.ShapeDtypeStruct:
    axes = Axes("quantized_matmul")
    if activation not in ACTIVATIONS:
        raise axes.fail(f"activation must be one of {', '.join(map(str, ACTIVATIONS))}, got {activation!r}")
    coded = is_coded(x, activation)
    axes.match("x", x, f"... {shape[1]}", (x.dtype,) if coded else FLOATS)
    if coded or activation == "int8-static":
        kind = "codes of x take" if coded else "activation int8-static takes"
        if len(arrays) != len(format.fields) + 1:
            raise axes.fail(f"{kind} a scale after the {len(format.fields)} arrays of the weight")
        scale, expected = arrays[-1], (*x.shape[:-1], 1) if coded else ()
        if tuple(scale.shape) != expected or scale.dtype != jnp.float32:
            found = f"{scale.dtype.name} {list(scale.shape)}"
            raise axes.fail(f"the scale of x is {found}, expected float32 {list(expected)}")
        arrays = arrays[:-1]
    match_fields(axes, arrays, format, shape, layer, layout)
    axes.check_float("out_dtype", out_dtype)
    return spec_like(x, shape=(*x.shape[:-1], shape[0]), dtype=jnp.dtype(out_dtype))


OP = Op("quantized_matmul", reference, shape_rule).publish()


def quantized_matmul(
    x: Shaped[Operand, "*rows I"],
    *arrays: Operand,
    format: QuantFormat,
    shape: tuple[int, int],
    out_dtype: DTypeLike | None = None,
    activation: str | None = None,
    layer: int | None = None,
    layout: str | None = None,
) -> Float[Array, "*rows O"]:
    """y[..., o] = sum_i x[..., i] w[o, i] with w given by `arrays`, the fields of `format` in their order.

    w is computed in float32 (see `QuantFormat`) and not rounded; the product is accumulated in float32 and rounded once
    to `out_dtype` (x's dtype if None). `shape` is (O, I). With a `layer`, every array holds that of several layers,
    [L, ...], and w is that one's. `layout` says in which order the arrays have their numbers (see `layout.py`).

    With an `activation`, y = s sum_i q[..., i] w[o, i] where q stands for x / s, in float32:

    - int8: s = max_i |x[..., i]| / 127 for every row of x, and q is rounded to whole numbers;
    - int8-static: s is one more operand after the weight's, float32 []; q is also clipped to -128 to 127;
    - e4m3: s = max_i |x[..., i]| / 448 for every row, and q is rounded to float8_e4m3fn.

    Where x is q already, of int8 or e4m3 codes (`quantized_norm` gives them), s is one more operand after the weight's,
    float32 [..., 1], and `out_dtype` must be given.

    Of int8 activations and a weight in a whole format (`QuantFormat.whole`), the sum is exact, in int32: integers are
    multiplied, and then y = total * scale * s (LLM.int8, arXiv:2208.07339; QServe, arXiv:2405.04532).

    Raises TypeError when an array or the layer does not fit.
    """
    out, size = jnp.dtype(out_dtype or x.dtype).name, (int(shape[0]), int(shape[1]))
    options = {"out_dtype": out, "activation": activation, "layer": layer, "layout": layout}
    return OP(x, *arrays, format=format, shape=size, **options)
