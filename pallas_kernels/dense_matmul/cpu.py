"""dense_matmul on CPUs: binds the native kernel of cpu.cc."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels._native import is_available, native_call
from jaxserve.pallas_kernels._op import Refusal
from jaxserve.pallas_kernels.dense_matmul.op import OP

DTYPES = ("float32", "bfloat16")


def kernel(x: Any, w: Any, *, out_dtype: str) -> Callable[..., jax.Array] | Refusal:
    """The native kernel for this call, which adds up every row in one order, whatever it is batched with."""
    if x.dtype.name not in DTYPES or out_dtype not in DTYPES:
        return Refusal(f"operands are {x.dtype.name} and results {out_dtype}; it knows {', '.join(DTYPES)}")
    rows, (outputs, inputs) = math.prod(x.shape[:-1]), w.shape
    result = jax.ShapeDtypeStruct((rows, outputs), jnp.dtype(out_dtype))
    call = native_call("jaxserve_dense_matmul", result, layer=None)

    def native(x: jax.Array, w: jax.Array) -> jax.Array:
        return call(x.reshape(rows, inputs), w).reshape(*x.shape[:-1], outputs)

    return native


if is_available():
    OP.register("cpu", kernel, name="native")
