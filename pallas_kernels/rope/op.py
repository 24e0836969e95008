"""rope: definition, shape rule, XLA reference."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxserve.pallas_kernels._axes import FLOATS, INT32, Axes
from jaxserve.pallas_kernels._op import Op, Operand, spec_like
from jaxserve.pallas_kernels.rope.spec import RopeSpec


def reference(x: Any, positions: Any, *, spec: RopeSpec) -> Any:
    angles = positions.astype(jnp.float32)[:, None, None] * spec.inv_freq()
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    rotated = x[..., : spec.dim].astype(jnp.float32)
    pair = -1 if spec.interleaved else -2
    pairs = (spec.dim // 2, 2) if spec.interleaved else (2, spec.dim // 2)
    first, second = jnp.unstack(rotated.reshape(*x.shape[:-1], *pairs), axis=pair)
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=pair).reshape(rotated.shape)
    return jnp.concatenate([turned.astype(x.dtype), x[..., spec.dim :]], axis=-1)


def shape_rule(x: Any, positions: Any, *, spec: RopeSpec) -> jax.ShapeDtypeStruct:
    axes = Axes("rope")
    axes.match("x", x, "T n H", FLOATS)
    axes.match("positions", positions, "T", INT32)
    if spec.dim > axes["H"]:
        raise axes.fail(f"spec rotates {spec.dim} channels but x has only H = {axes['H']}")
    return spec_like(x)


OP = Op("rope", reference, shape_rule).publish()


def rope(x: Float[Operand, "T n H"], positions: Int32[Operand, " T"], *, spec: RopeSpec) -> Float[Array, "T n H"]:
    """Rotates pairs of channels by an angle that grows with the position.

    For pair i of a token at position p, a = p * inv_freq[i]: (x1, x2) -> (x1 cos a - x2 sin a, x2 cos a + x1 sin a).
    Pairs are channels (i, i + dim/2), or (2i, 2i + 1) when `spec.interleaved`; channels from `spec.dim` on are kept.
    Angles and products are float32, rounded once to x's dtype.

    Returns x's shape and dtype. Raises TypeError when shapes do not fit or `spec.dim` exceeds H.
    """
    return OP(x, positions, spec=spec)
