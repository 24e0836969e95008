"""quantized_norm: definition, shape rule, XLA reference."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Shaped

from jaxserve.pallas_kernels._axes import FLOATS, Axes
from jaxserve.pallas_kernels._op import Op, Operand, spec_like
from jaxserve.pallas_kernels.quantized_matmul.op import CODES, quantize_activation
from jaxserve.pallas_kernels.rms_norm import op as rms_norm


def reference(x: Any, weight: Any, *, activation: str, **params: Any) -> tuple[Any, Any]:
    return quantize_activation(rms_norm.reference(x, weight, **params), activation)


def shape_rule(
    x: Any, weight: Any, *, activation: str, eps: float, plus_one: bool, out_dtype: str | None, layer: int | None
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    axes = Axes("quantized_norm")
    axes.match("x", x, "... D", FLOATS)
    rms_norm.match_weight(axes, weight, layer)
    axes.check_float("out_dtype", out_dtype or x.dtype)
    if activation not in CODES:
        raise axes.fail(f"activation must be one of {', '.join(CODES)}, got {activation!r}")
    return spec_like(x, dtype=CODES[activation]), spec_like(x, (*x.shape[:-1], 1), jnp.float32)


OP = Op("quantized_norm", reference, shape_rule, multiple_results=True).publish()


def quantized_norm(
    x: Float[Operand, "*rows D"],
    weight: Float[Operand, "*L D"],
    *,
    activation: str,
    eps: float,
    plus_one: bool = False,
    out_dtype: DTypeLike | None = None,
    layer: int | None = None,
) -> tuple[Shaped[Array, "*rows D"], Float[Array, "*rows 1"]]:
    """What `quantized_matmul` makes of an RMS norm before it multiplies: (q, s) with s[...] = max_d |y[..., d]| / 127
    and q = y / s rounded to int8, or by 448 and to float8_e4m3fn for the activation e4m3, y = rms_norm(x).

    `weight` and the other options are those of `rms_norm`. A row of zeros has the scale 0 and codes 0. Returns codes in
    x's shape and float32 scales. Raises TypeError for another activation, and where `rms_norm` does.
    """
    dtype = None if out_dtype is None else jnp.dtype(out_dtype).name
    options = {"eps": float(eps), "plus_one": bool(plus_one), "out_dtype": dtype, "layer": layer}
    return OP(x, weight, activation=activation, **options)
