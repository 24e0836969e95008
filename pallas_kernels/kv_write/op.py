"""kv_write: definition, shape rule, XLA reference."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxserve.pallas_kernels._axes import FLOATS, INT32, Axes
from jaxserve.pallas_kernels._op import Op, Operand, spec_like


def _scatter(cache: Any, rows: Any, slots: Any) -> Any:
    flat = cache.reshape(-1, *cache.shape[2:])
    # A negative index would count from the end; one past the end is dropped.
    index = jnp.where(slots < 0, flat.shape[0], slots)
    return flat.at[index].set(rows.astype(cache.dtype), mode="drop").reshape(cache.shape)


def reference(k_cache: Any, v_cache: Any, k: Any, v: Any, slots: Any) -> Any:
    return _scatter(k_cache, k, slots), _scatter(v_cache, v, slots)


def shape_rule(k_cache: Any, v_cache: Any, k: Any, v: Any, slots: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    axes = Axes("kv_write")
    axes.match("k_cache", k_cache, "pages B K H", FLOATS)
    axes.match("v_cache", v_cache, "pages B K H", (k_cache.dtype,))
    axes.match("k", k, "T K H", FLOATS)
    axes.match("v", v, "T K H", (k.dtype,))
    axes.match("slots", slots, "T", INT32)
    return spec_like(k_cache), spec_like(v_cache)


OP = Op("kv_write", reference, shape_rule, multiple_results=True).publish()


def kv_write(
    k_cache: Float[Operand, "pages B K H"],
    v_cache: Float[Operand, "pages B K H"],
    k: Float[Operand, "T K H"],
    v: Float[Operand, "T K H"],
    slots: Int32[Operand, " T"],
) -> tuple[Float[Array, "pages B K H"], Float[Array, "pages B K H"]]:
    """The caches with token t's key and value stored at page slots[t] // B, offset slots[t] % B.

    A negative slot, or one past the pool, writes nothing. Slots of one call must differ from each other: which of two
    writes to one slot wins is not defined. k and v are rounded to the cache's dtype. Donate the caches and the write
    happens in place.

    Raises TypeError when shapes or dtypes do not fit.
    """
    return OP(k_cache, v_cache, k, v, slots)
