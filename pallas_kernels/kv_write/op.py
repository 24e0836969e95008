"""kv_write: definition, shape rule, XLA reference."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int32

from jaxserve.pallas_kernels._axes import FLOATS, INT32, Axes
from jaxserve.pallas_kernels._op import Op, Operand, spec_like
from jaxserve.pallas_kernels.kv_write.format import Cache, KvFormat, encode, halves, match_cache


def _scatter(cache: Any, rows: Any, slots: Any) -> Any:
    flat = cache.reshape(-1, *rows.shape[1:])
    # A negative index would count from the end; one past the end is dropped.
    index = jnp.where(slots < 0, flat.shape[0], slots)
    return flat.at[index].set(rows, mode="drop").reshape(cache.shape)


def reference(*operands: Any, format: KvFormat | None, layer: int | None) -> Any:
    *caches, k, v, slots = operands
    if layer is not None:
        pages, page_size = caches[0].shape[1:3]
        slots = jnp.where((slots >= 0) & (slots < pages * page_size), slots + layer * pages * page_size, -1)
    dtype = caches[0].dtype
    rows = (*encode(k, format, dtype), *encode(v, format, dtype))
    return tuple(_scatter(cache, each, slots) for cache, each in zip(caches, rows, strict=True))


def shape_rule(*operands: Any, format: KvFormat | None, layer: int | None) -> tuple[jax.ShapeDtypeStruct, ...]:
    *caches, k, v, slots = operands
    axes, (k_cache, v_cache) = Axes("kv_write"), halves(caches)
    match_cache(axes, "k_cache", k_cache, format, FLOATS, layer)
    match_cache(axes, "v_cache", v_cache, format, (caches[0].dtype,), layer)
    axes.match("k", k, "T K H", FLOATS)
    axes.match("v", v, "T K H", (k.dtype,))
    axes.match("slots", slots, "T", INT32)
    return tuple(map(spec_like, caches))


OP = Op("kv_write", reference, shape_rule, multiple_results=True).publish()


def kv_write(
    k_cache: Cache,
    v_cache: Cache,
    k: Float[Operand, "T K H"],
    v: Float[Operand, "T K H"],
    slots: Int32[Operand, " T"],
    *,
    format: KvFormat | None = None,
    layer: int | None = None,
) -> tuple[Any, Any]:
    """The caches with token t's key and value stored at page slots[t] // B, offset slots[t] % B.

    Without a `format` a cache is one array [pages, B, K, H] of a floating dtype, to which k and v are rounded; with
    one it is the tuple of the format's arrays, and k and v are quantized (see `KvFormat`). With a `layer`, every array
    holds several layers' caches, [L, pages, B, K, H], and that one's is written. The caches come back in the form in
    which they were given.

    A negative slot, or one past the pool, writes nothing. Slots of one call must differ from each other: which of two
    writes to one slot wins is not defined. Donate the caches and the write happens in place.

    Raises TypeError when shapes, dtypes, the number of arrays or the layer do not fit.
    """
    arrays, form = jax.tree.flatten((k_cache, v_cache))
    return jax.tree.unflatten(form, OP(*arrays, k, v, slots, format=format, layer=layer))
