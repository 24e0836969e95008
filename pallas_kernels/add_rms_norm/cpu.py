"""add_rms_norm on CPUs: binds the native kernel in rms_norm/cpu.cc."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxserve.pallas_kernels._native import is_available, native_call
from jaxserve.pallas_kernels._op import Refusal, spec_like
from jaxserve.pallas_kernels.add_rms_norm.op import OP
from jaxserve.pallas_kernels.rms_norm.cpu import refusal


def kernel(
    x: Any, y: Any, weight: Any, *, eps: float, plus_one: bool, out_dtype: str | None, layer: int | str | None
) -> Callable[..., Any] | Refusal:
    """The native kernel for this call, which adds up a row in one order, whatever it is batched with."""
    results = [spec_like(x), spec_like(x, dtype=out_dtype)]
    return refusal(weight, x, y, out_dtype=out_dtype) or native_call(
        "jaxserve_add_rms_norm", results, layer=layer, aliases={0: 0}, eps=np.float32(eps), plus_one=plus_one
    )


if is_available():
    OP.register("cpu", kernel, name="native", traced=True)
