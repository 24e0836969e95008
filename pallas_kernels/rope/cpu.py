"""rope on CPUs: binds the native kernel of cpu.cc."""

from collections.abc import Callable
from typing import Any

import jax

from jaxserve.pallas_kernels._native import is_available, native_call
from jaxserve.pallas_kernels._op import Refusal, spec_like
from jaxserve.pallas_kernels.rope.op import OP
from jaxserve.pallas_kernels.rope.spec import RopeSpec


def refusal(x: Any) -> Refusal | None:
    """Why the native kernels do not take this operand, if they do not."""
    if x.dtype.name not in ("float32", "bfloat16"):
        return Refusal(f"x is {x.dtype.name}; it knows float32 and bfloat16")
    return None


def kernel(x: Any, positions: Any, *, spec: RopeSpec) -> Callable[..., jax.Array] | Refusal:
    """The native kernel for this call, which finds the cosines and sines of a token once for all of its heads."""
    del positions
    return refusal(x) or native_call(
        "jaxserve_rope", spec_like(x), layer=None, inv_freq=spec.inv_freq(), interleaved=spec.interleaved
    )


if is_available():
    OP.register("cpu", kernel, name="native")
