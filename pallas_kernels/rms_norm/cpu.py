"""rms_norm on CPUs: binds the native kernel of cpu.cc."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxserve.pallas_kernels._native import is_available, native_call
from jaxserve.pallas_kernels._op import Refusal, spec_like
from jaxserve.pallas_kernels.rms_norm.op import OP


def refusal(weight: Any, *rows: Any, out_dtype: str | None) -> Refusal | None:
    """Why the native kernels do not take these operands, if they do not."""
    dtypes = sorted({each.dtype.name for each in (weight, *rows)})
    if dtypes != ["float32"] or out_dtype not in (None, "float32", "bfloat16") or weight.shape[-1] == 0:
        return Refusal(
            f"operands are {', '.join(dtypes)} and results {out_dtype}; it knows float32, and results in bf16"
        )
    return None


def kernel(
    x: Any, weight: Any, *, eps: float, plus_one: bool, out_dtype: str | None, layer: int | str | None
) -> Callable[..., jax.Array] | Refusal:
    """The native kernel for this call, which adds up a row in one order, whatever it is batched with."""
    return refusal(weight, x, out_dtype=out_dtype) or native_call(
        "jaxserve_rms_norm", spec_like(x, dtype=out_dtype), layer=layer, eps=np.float32(eps), plus_one=plus_one
    )


if is_available():
    OP.register("cpu", kernel, name="native", traced=True)
