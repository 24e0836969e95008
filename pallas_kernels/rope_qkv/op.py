"""rope_qkv: definition, shape rule, XLA reference."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxserve.pallas_kernels._axes import FLOATS, INT32, Axes
from jaxserve.pallas_kernels._op import Op, Operand, spec_like
from jaxserve.pallas_kernels.rope import op as rope
from jaxserve.pallas_kernels.rope.spec import RopeSpec


def reference(
    x: Any, positions: Any, *biases: Any, spec: RopeSpec, heads: int, kv_heads: int, layer: int | None
) -> Any:
    if biases:
        x = x + jnp.concatenate([bias if layer is None else bias[layer] for bias in biases])
    count = heads + 2 * kv_heads
    rows = x.reshape(x.shape[0], count, x.shape[1] // count)
    q, k, v = jnp.split(rows, (heads, heads + kv_heads), axis=1)
    return rope.reference(q, positions, spec=spec), rope.reference(k, positions, spec=spec), v


def shape_rule(
    x: Any, positions: Any, *biases: Any, spec: RopeSpec, heads: int, kv_heads: int, layer: int | None
) -> tuple[jax.ShapeDtypeStruct, ...]:
    axes = Axes("rope_qkv")
    axes.match("x", x, "T W", FLOATS)
    axes.match("positions", positions, "T", INT32)
    width, left = divmod(x.shape[1], heads + 2 * kv_heads)
    if left or not width:
        raise axes.fail(f"x has {x.shape[1]} channels, which are not those of {heads} + 2 * {kv_heads} heads")
    if spec.dim > width:
        raise axes.fail(f"spec rotates {spec.dim} channels but heads have only H = {width}")
    counts = (heads, kv_heads, kv_heads)
    if len(biases) not in (0, 3) or (layer is not None and not biases):
        raise axes.fail(f"there are biases for q, k and v or for none, and a layer is theirs; got {len(biases)}")
    for name, bias, count in zip("qkv", biases, counts, strict=False):
        axes.match(f"the bias of {name}", bias, f"{'' if layer is None else 'L '}{count * width}", (x.dtype,))
    if layer is not None and not 0 <= layer < axes["L"]:
        raise axes.fail(f"layer {layer} is not one of the {axes['L']} of the biases")
    return tuple(spec_like(x, (x.shape[0], count, width)) for count in counts)


OP = Op("rope_qkv", reference, shape_rule, multiple_results=True).publish()


def rope_qkv(
    x: Float[Operand, "T W"],
    positions: Int32[Operand, " T"],
    *biases: Float[Operand, "..."],
    spec: RopeSpec,
    heads: int,
    kv_heads: int,
    layer: int | None = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
    """Cuts the product that holds N heads of queries, K of keys and K of values side by side, W = (N + 2K) H, and turns
    the first two: (rope(q), rope(k), v).

    Three `biases` [NH], [KH], [KH] are added to q, k and v first, in x's dtype; with a `layer` they are stacks [L, NH],
    [L, KH], [L, KH] of several layers'. Returns x's dtype. Raises TypeError when the channels are not those of so many
    heads, biases do not fit, and where `rope` does.
    """
    return OP(x, positions, *biases, spec=spec, heads=heads, kv_heads=kv_heads, layer=layer)
