"""rope_qkv on CPUs: binds the native kernel in rope/cpu.cc."""

from collections.abc import Callable
from typing import Any

from jaxserve.pallas_kernels._native import is_available, native_call
from jaxserve.pallas_kernels._op import Refusal, spec_like
from jaxserve.pallas_kernels.rope.cpu import refusal
from jaxserve.pallas_kernels.rope.spec import RopeSpec
from jaxserve.pallas_kernels.rope_qkv.op import OP


def kernel(
    x: Any, positions: Any, *biases: Any, spec: RopeSpec, heads: int, kv_heads: int, layer: int | str | None
) -> Callable[..., Any] | Refusal:
    """The native kernel for this call, which reads each row once."""
    del positions, biases
    width = x.shape[1] // (heads + 2 * kv_heads)
    results = [spec_like(x, (x.shape[0], count, width)) for count in (heads, kv_heads, kv_heads)]
    return refusal(x) or native_call(
        "jaxserve_rope_qkv", results, layer=layer, inv_freq=spec.inv_freq(), interleaved=spec.interleaved
    )


if is_available():
    OP.register("cpu", kernel, name="native", traced=True)
