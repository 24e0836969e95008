"""sample_logits on CPUs: binds the native kernel of cpu.cc."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxserve.pallas_kernels._native import is_available, native_call
from jaxserve.pallas_kernels._op import Refusal
from jaxserve.pallas_kernels.sample_logits.op import OP


def kernel(logits: Any, *rest: Any, vocab: int) -> Callable[..., Any] | Refusal:
    """The native kernel for this call: one row at a time."""
    rows = logits.shape[0]
    if rows == 0:
        return Refusal("there are no rows")
    results = [jax.ShapeDtypeStruct((rows,), np.int32), jax.ShapeDtypeStruct((rows,), np.bool_)]
    return native_call("jaxserve_sample_logits", results, layer=None, vocab=np.int64(vocab))


if is_available():
    OP.register("cpu", kernel, name="native")
