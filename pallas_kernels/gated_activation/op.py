"""gated_activation: definition, shape rule, XLA reference."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from jaxserve.pallas_kernels._axes import FLOATS, Axes
from jaxserve.pallas_kernels._op import Op, Operand, spec_like

ACTIVATIONS: dict[str, Callable[..., Any]] = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}


def reference(x: Any, *, activation: str, out_dtype: str | None) -> Any:
    width, last = x.shape[-1] // 2, x.ndim - 1
    gate = jax.lax.slice_in_dim(x, 0, width, axis=last)
    factor = jax.lax.slice_in_dim(x, width, 2 * width, axis=last)
    y = ACTIVATIONS[activation](gate) * factor
    return y if out_dtype is None else y.astype(out_dtype)


def shape_rule(x: Any, *, activation: str, out_dtype: str | None) -> jax.ShapeDtypeStruct:
    axes = Axes("gated_activation")
    axes.match("x", x, "... 2F", FLOATS)
    if x.shape[-1] % 2:
        raise axes.fail(f"x has shape {tuple(x.shape)}, whose last axis has no two halves")
    if activation not in ACTIVATIONS:
        raise axes.fail(f"activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}")
    axes.check_float("out_dtype", out_dtype or x.dtype)
    return spec_like(x, (*x.shape[:-1], x.shape[-1] // 2), out_dtype)


OP = Op("gated_activation", reference, shape_rule).publish()


def gated_activation(
    x: Float[Operand, "*rows 2F"], *, activation: str = "silu", out_dtype: DTypeLike | None = None
) -> Float[Array, "*rows F"]:
    """The activation of the first half of each row times its second half: y = act(x[:F]) * x[F:] (Shazeer,
    arXiv:2002.05202: SwiGLU with `silu`, GEGLU with `gelu_tanh`).

    `silu` is x / (1 + e^-x), `gelu_tanh` x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2. y is computed in x's dtype
    and rounded to `out_dtype` if there is one. Raises TypeError when x has an odd width or no floating dtype, or the
    activation is another one.
    """
    dtype = None if out_dtype is None else jnp.dtype(out_dtype).name
    return OP(x, activation=activation, out_dtype=dtype)
