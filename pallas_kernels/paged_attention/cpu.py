"""paged_attention on CPUs: binds the native kernel of cpu.cc."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxserve.pallas_kernels._native import is_available, native_call
from jaxserve.pallas_kernels._op import Refusal
from jaxserve.pallas_kernels.kv_write.format import KvFormat
from jaxserve.pallas_kernels.paged_attention.op import OP

FLOATS = ("float32", "bfloat16")


def kernel(
    q: Any,
    k: Any,
    *rest: Any,
    scale: float,
    window: int | None,
    softcap: float | None,
    format: KvFormat | None,
    layer: int | str | None,
) -> Callable[..., jax.Array] | Refusal:
    """The native kernel for this call: one token's heads at a time, so that a token's result depends on no other."""
    if q.dtype.name not in FLOATS or (format is None and k.dtype.name not in FLOATS):
        return Refusal(f"queries are {q.dtype.name} and the cache {k.dtype.name}; it knows {', '.join(FLOATS)}")
    return native_call(
        "jaxserve_paged_attention",
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        scale=np.float32(scale),
        window=np.int64(window or 0),
        softcap=np.float32(softcap or 0.0),
        format=format.name if format else "",
        layer=layer,
    )


if is_available():
    OP.register("cpu", kernel, name="native", traced=True)
