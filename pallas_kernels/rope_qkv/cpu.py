"""rope_qkv on CPUs: binds the native kernel in rope/cpu.cc."""

from collections.abc import Callable
from typing import Any

from jaxserve.pallas_kernels._native import is_available, native_call
from jaxserve.pallas_kernels._op import Refusal
from jaxserve.pallas_kernels.rope.cpu import refusal
from jaxserve.pallas_kernels.rope.spec import RopeSpec
from jaxserve.pallas_kernels.rope_qkv.op import OP, shape_rule


def kernel(x: Any, positions: Any, *, spec: RopeSpec, heads: int, kv_heads: int) -> Callable[..., Any] | Refusal:
    """The native kernel for this call, which reads each row once."""
    results = shape_rule(x, positions, spec=spec, heads=heads, kv_heads=kv_heads)
    return refusal(x) or native_call(
        "jaxserve_rope_qkv", results, layer=None, inv_freq=spec.inv_freq(), interleaved=spec.interleaved
    )


if is_available():
    OP.register("cpu", kernel, name="native")
