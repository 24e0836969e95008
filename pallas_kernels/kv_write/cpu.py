"""kv_write on CPUs: binds the native kernel of cpu.cc, which writes in place."""

from collections.abc import Callable
from typing import Any

import jax

from jaxserve.pallas_kernels._native import is_available, native_call
from jaxserve.pallas_kernels._op import Refusal
from jaxserve.pallas_kernels.kv_write.format import KvFormat
from jaxserve.pallas_kernels.kv_write.op import OP

FLOATS = ("float32", "bfloat16")


def kernel(*operands: Any, format: KvFormat | None, layer: int | str | None) -> Callable[..., Any] | Refusal:
    """The native kernel for this call; XLA copies the caches first where they are not donated."""
    *caches, k, _, slots = operands
    if k.dtype.name not in FLOATS or (format is None and caches[0].dtype.name not in FLOATS) or slots.shape[0] == 0:
        return Refusal(f"rows are {k.dtype.name} and the cache {caches[0].dtype.name}; it knows {', '.join(FLOATS)}")
    results = [jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in caches]
    aliases = {i: i for i in range(len(caches))}
    return native_call(
        "jaxserve_kv_write",
        results,
        aliases=aliases,
        format=format.name if format else "",
        layer=layer,
    )


if is_available():
    OP.register("cpu", kernel, name="native", traced=True)
