"""add_rms_norm: definition, shape rule, XLA reference."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from jaxserve.pallas_kernels._axes import FLOATS, Axes
from jaxserve.pallas_kernels._op import Op, Operand, spec_like
from jaxserve.pallas_kernels.rms_norm import op as rms_norm


def reference(x: Any, y: Any, weight: Any, **params: Any) -> Any:
    h = x + y
    return h, rms_norm.reference(h, weight, **params)


def shape_rule(
    x: Any, y: Any, weight: Any, *, eps: float, plus_one: bool, out_dtype: str | None, layer: int | None
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    axes = Axes("add_rms_norm")
    axes.match("x", x, "... D", FLOATS)
    axes.match("y", y, "... D", (x.dtype,))
    if y.shape != x.shape:
        raise axes.fail(f"y has shape {y.shape}, expected that of x, {x.shape}")
    rms_norm.match_weight(axes, weight, layer)
    axes.check_float("out_dtype", out_dtype or x.dtype)
    return spec_like(x), spec_like(x, dtype=out_dtype)


OP = Op("add_rms_norm", reference, shape_rule, multiple_results=True).publish()


def add_rms_norm(
    x: Float[Operand, "*rows D"],
    y: Float[Operand, "*rows D"],
    weight: Float[Operand, "*L D"],
    *,
    eps: float,
    plus_one: bool = False,
    out_dtype: DTypeLike | None = None,
    layer: int | None = None,
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    """The residual stream with what a half of a layer adds to it, and the normalization that the next half reads:
    h = x + y, n = rms_norm(h).

    `weight` and the options are those of `rms_norm`. Returns (h, n): h in x's dtype, n in it or in `out_dtype`. Raises
    TypeError when x and y differ in shape or dtype, and where `rms_norm` does.
    """
    dtype = None if out_dtype is None else jnp.dtype(out_dtype).name
    return OP(x, y, weight, eps=float(eps), plus_one=bool(plus_one), out_dtype=dtype, layer=layer)
