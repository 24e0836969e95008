"""gated_activation on CPUs: binds the native kernel of cpu.cc."""

from collections.abc import Callable
from typing import Any

import jax

from jaxserve.pallas_kernels._native import is_available, native_call
from jaxserve.pallas_kernels._op import Refusal, spec_like
from jaxserve.pallas_kernels.gated_activation.op import OP


def kernel(x: Any, *, activation: str, out_dtype: str | None) -> Callable[..., jax.Array] | Refusal:
    """The native kernel for this call."""
    if x.dtype.name != "float32" or out_dtype not in (None, "float32", "bfloat16"):
        return Refusal(f"operands are {x.dtype.name} and results {out_dtype}; it knows float32, and results in bf16")
    result = spec_like(x, (*x.shape[:-1], x.shape[-1] // 2), out_dtype)
    return native_call("jaxserve_gated_activation", result, layer=None, activation=activation)


if is_available():
    OP.register("cpu", kernel, name="native")
