"""rms_norm on Hopper, also behind a residual addition: a block holds a row in registers, from its only reading to its
only writing.

XLA sums a row up in one kernel and normalizes it in a second (with int8 activations a third), each of which reads it.
The residual addition stays XLA's: it is part of the kernel that adds up the parts of a product and turns them.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels._op import Refusal
from jaxserve.pallas_kernels._target import not_hopper

VECTOR = 4
"""Neighbours that one of the 128 threads reads at once."""

NARROWEST, WIDEST = 512, 16384
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


def kernel(
    x: Any, weight: Any, *, eps: float, plus_one: bool, out_dtype: str | None, layer: int | None
) -> Callable[..., jax.Array] | Refusal:
    """The kernel for this call, or why there is none. A row is added up in one order, whatever it is batched with."""
    width, rows = x.shape[-1], math.prod(x.shape[:-1])
    result = jnp.dtype(out_dtype or x.dtype)
    if reason := not_hopper():
        return Refusal(reason)
    if width % NARROWEST or width > WIDEST or not rows:
        return Refusal(f"{rows} rows of {width}; it knows multiples of {NARROWEST} up to {WIDEST}")
    if any(dtype not in FLOATS for dtype in (x.dtype, weight.dtype, result)):
        dtypes = f"operands are {x.dtype.name} and {weight.dtype.name}, results {result.name}"
        return Refusal(f"{dtypes}; it knows float32, bfloat16 and float16")

    def rms_norm(x: Any, weight: Any, out: Any) -> None:
        row, place = lax.axis_index("row"), plgpu.Layout.WG_STRIDED((width,), vec_size=VECTOR)
        weight = weight if layer is None else weight.at[layer]
        wide, scale = (
            plgpu.load(ref, layout=place, optimized=False).astype(jnp.float32) for ref in (x.at[row], weight)
        )
        normal = wide * lax.rsqrt((wide * wide).sum() / width + eps)
        if plus_one:
            scaled = (normal * (1.0 + scale)).astype(x.dtype)
        else:
            scaled = normal.astype(x.dtype) * scale.astype(x.dtype)
        out[row] = scaled.astype(result)

    call = plgpu.kernel(
        rms_norm, out_type=jax.ShapeDtypeStruct((rows, width), result), grid=(rows,), grid_names=("row",)
    )
    return lambda x, weight: call(x.reshape(rows, width), weight).reshape(x.shape)


def add_kernel(x: Any, y: Any, weight: Any, **params: Any) -> Callable[..., tuple[jax.Array, jax.Array]] | Refusal:
    """(x + y, its norm): a sum by XLA before the kernel."""
    del y
    norm = kernel(x, weight, **params)
    if isinstance(norm, Refusal):
        return norm

    def add(x: jax.Array, y: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = x + y
        return h, norm(h, weight)

    return add
