"""attention: definition, shape rule, XLA reference."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxserve.pallas_kernels._axes import FLOATS, INT32, Axes
from jaxserve.pallas_kernels._op import Op, Operand, spec_like


def cap(scores: Any, softcap: float | None) -> Any:
    """softcap * tanh(scores / softcap), or the scores themselves."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def check_options(axes: Axes, scale: float, window: int | None, softcap: float | None) -> None:
    """What both attention ops demand of their static options and of grouped heads."""
    if axes["N"] % axes["K"]:
        raise axes.fail(f"the {axes['N']} query heads must be a multiple of the {axes['K']} KV heads")
    if window is not None and window < 1:
        raise axes.fail(f"window must be at least 1 (a token sees itself), got {window}")
    if softcap is not None and not softcap > 0:
        raise axes.fail(f"softcap must be positive, got {softcap}")


def reference(
    q: Any, k: Any, v: Any, positions: Any, segments: Any, *, scale: float, window: int | None, softcap: float | None
) -> Any:
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32)
    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("ikgh,jkh->kgij", grouped, k.astype(jnp.float32), precision=exact) * scale
    distance = positions[:, None] - positions[None, :]
    visible = (segments[:, None] == segments[None, :]) & (distance >= 0)
    if window is not None:
        visible &= distance < window
    weights = jax.nn.softmax(jnp.where(visible, cap(scores, softcap), -jnp.inf), axis=-1)
    mixed = jnp.einsum("kgij,jkh->ikgh", weights, v.astype(jnp.float32), precision=exact)
    return mixed.reshape(tokens, heads, head_dim).astype(q.dtype)


def shape_rule(
    q: Any, k: Any, v: Any, positions: Any, segments: Any, *, scale: float, window: int | None, softcap: float | None
) -> jax.ShapeDtypeStruct:
    axes = Axes("attention")
    axes.match("q", q, "T N H", FLOATS)
    axes.match("k", k, "T K H", (q.dtype,))
    axes.match("v", v, "T K H", (q.dtype,))
    axes.match("positions", positions, "T", INT32)
    axes.match("segments", segments, "T", INT32)
    check_options(axes, scale, window, softcap)
    return spec_like(q)


OP = Op("attention", reference, shape_rule).publish()


def attention(
    q: Float[Operand, "T N H"],
    k: Float[Operand, "T K H"],
    v: Float[Operand, "T K H"],
    positions: Int32[Operand, " T"],
    segments: Int32[Operand, " T"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Array, "T N H"]:
    """Causal softmax attention among the tokens of each segment, grouped heads.

    o[i,n] = sum_j softmax_j(cap(scale * q[i,n] . k[j, n // (N/K)])) v[j, n // (N/K)] over the j with
    segments[j] == segments[i] and 0 <= positions[i] - positions[j] (< `window` if given); cap(s) is
    softcap * tanh(s / softcap), or s. Everything is computed in float32 and rounded once to q's dtype.

    The reference holds all T x T scores: it is for tracing, calibration and tests; serving uses `paged_attention`.
    Raises TypeError when shapes or dtypes do not fit, N is no multiple of K, or an option is out of range.
    """
    return OP(
        q,
        k,
        v,
        positions,
        segments,
        scale=float(scale),
        window=None if window is None else int(window),
        softcap=None if softcap is None else float(softcap),
    )
