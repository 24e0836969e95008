"""rms_norm: definition, shape rule, XLA reference."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from jaxserve.pallas_kernels._axes import FLOATS, Axes
from jaxserve.pallas_kernels._op import Op, Operand, spec_like

_LANES = 64


def _row_sums(x: Any) -> Any:
    """sum over the last axis, added up in one order however many rows there are.

    XLA:CPU orders a reduction by the shape of its operand, which would make a row depend on its company. So nothing is
    reduced here: slices of the row are added lane by lane, then halves of the lanes. It is faster, too.
    """
    lanes = math.gcd(x.shape[-1], _LANES)
    first, *others = (x[..., at : at + lanes] for at in range(0, x.shape[-1], lanes))
    # The barrier keeps the sums of slices from being computed anew for each of the halves.
    sums = jax.lax.optimization_barrier(sum(others, first))
    while lanes > 1:
        lanes //= 2
        sums = sums[..., :lanes] + sums[..., lanes:]
    return sums


def reference(x: Any, weight: Any, *, eps: float, plus_one: bool, out_dtype: str | None, layer: int | None) -> Any:
    if layer is not None:
        weight = weight[layer]
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(_row_sums(wide * wide) / x.shape[-1] + eps)
    if plus_one:
        scaled = (normal * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
    else:
        scaled = normal.astype(x.dtype) * weight.astype(x.dtype)
    return scaled.astype(out_dtype or x.dtype)


def match_weight(axes: Axes, weight: Any, layer: int | None) -> None:
    """Checks the weight [D], or [L, D] with a layer."""
    axes.match("weight", weight, "D" if layer is None else "L D", FLOATS)
    if layer is not None and not 0 <= layer < axes["L"]:
        raise axes.fail(f"layer {layer} is not one of the {axes['L']} of weight")


def shape_rule(
    x: Any, weight: Any, *, eps: float, plus_one: bool, out_dtype: str | None, layer: int | None
) -> jax.ShapeDtypeStruct:
    axes = Axes("rms_norm")
    axes.match("x", x, "... D", FLOATS)
    match_weight(axes, weight, layer)
    axes.check_float("out_dtype", out_dtype or x.dtype)
    return spec_like(x, dtype=out_dtype)


OP = Op("rms_norm", reference, shape_rule).publish()


def rms_norm(
    x: Float[Operand, "*rows D"],
    weight: Float[Operand, "*L D"],
    *,
    eps: float,
    plus_one: bool = False,
    out_dtype: DTypeLike | None = None,
    layer: int | None = None,
) -> Float[Array, "*rows D"]:
    """Scales each row to unit root mean square: y = x / sqrt(mean(x^2) + eps) * w.

    The statistics are float32. As the reference models do, the normalized row is rounded to x's dtype before it is
    multiplied by `weight`; with `plus_one` (Gemma) it is multiplied by 1 + w in float32 and rounded once. y is that,
    rounded to `out_dtype` if there is one. With a `layer`, `weight` holds several layers' [L, D], and that one's is w.

    Returns x's shape, in its dtype or `out_dtype`. Raises TypeError when `weight` is not [D], the layer is none of its
    L, or a dtype is not floating.
    """
    dtype = None if out_dtype is None else jnp.dtype(out_dtype).name
    return OP(x, weight, eps=float(eps), plus_one=bool(plus_one), out_dtype=dtype, layer=layer)
