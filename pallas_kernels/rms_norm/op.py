"""rms_norm: definition, shape rule, XLA reference."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.pallas_kernels._axes import FLOATS, Axes
from jaxserve.pallas_kernels._op import Op, Operand, spec_like


def reference(x: Any, weight: Any, *, eps: float, plus_one: bool) -> Any:
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if plus_one:
        return (normal * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
    return normal.astype(x.dtype) * weight.astype(x.dtype)


def shape_rule(x: Any, weight: Any, *, eps: float, plus_one: bool) -> jax.ShapeDtypeStruct:
    axes = Axes("rms_norm")
    axes.match("x", x, "... D", FLOATS)
    axes.match("weight", weight, "D", FLOATS)
    return spec_like(x)


OP = Op("rms_norm", reference, shape_rule).publish()


def rms_norm(
    x: Float[Operand, "*rows D"], weight: Float[Operand, " D"], *, eps: float, plus_one: bool = False
) -> Float[Array, "*rows D"]:
    """Scales each row to unit root mean square: y = x / sqrt(mean(x^2) + eps) * w.

    The statistics are float32. As the reference models do, the normalized row is rounded to x's dtype before it is
    multiplied by `weight`; with `plus_one` (Gemma) it is multiplied by 1 + w in float32 and rounded once.

    Returns x's shape and dtype. Raises TypeError when `weight` is not [D] or a dtype is not floating.
    """
    return OP(x, weight, eps=float(eps), plus_one=bool(plus_one))
