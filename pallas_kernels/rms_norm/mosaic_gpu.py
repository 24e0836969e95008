"""rms_norm on Hopper, also behind a residual addition: a block holds a row in registers, from its only reading to its
only writing.

XLA sums a row up in one kernel and normalizes it in a second, each of which reads it; two more find the largest number
of a row and its codes.
The residual addition stays XLA's: it is part of the kernel that adds up the parts of a product and turns them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels._op import Refusal
from jaxserve.pallas_kernels._target import not_hopper
from jaxserve.pallas_kernels.quantized_matmul.op import CODES, LARGEST

VECTOR = 4
"""Neighbours that one of the 128 threads reads at once."""

NARROWEST, WIDEST = 512, 12288
"""Numbers of a row, of which a row has a multiple: 16384 of float32 do not fit in registers beside their weights."""

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


def kernel(x: Any, weight: Any, **params: Any) -> Callable[..., jax.Array] | Refusal:
    """The kernel for this call, or why there is none. A row is added up in one order, whatever it is batched with."""
    result = jnp.dtype(params["out_dtype"] or x.dtype)

    def store(row: Any, normal: jax.Array, out: Any) -> None:
        out[row] = normal

    call = _call(x, weight, store, [(x.shape[-1:], result)], **params)
    return call if isinstance(call, Refusal) else lambda x, weight: call(x, weight)[0].reshape(x.shape)


def quantized_kernel(
    x: Any, weight: Any, *, activation: str, **params: Any
) -> Callable[..., tuple[jax.Array, jax.Array]] | Refusal:
    """The norm's codes and scales, found while the row is in registers."""
    largest, codes_dtype = LARGEST[activation], CODES[activation]

    def store(row: Any, normal: jax.Array, codes: Any, scales: Any) -> None:
        wide = normal.astype(jnp.float32)
        scale = jnp.abs(wide).max() / largest
        found = jnp.clip(wide / jnp.where(scale > 0, scale, 1.0), -largest, largest)
        codes[row] = (jnp.round(found) if codes_dtype == jnp.int8 else found).astype(codes_dtype)
        scales[row] = scale

    call = _call(x, weight, store, [(x.shape[-1:], codes_dtype), ((), jnp.dtype(jnp.float32))], **params)
    if isinstance(call, Refusal):
        return call

    def quantized(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        codes, scales = call(x, weight)
        return codes.reshape(x.shape), scales.reshape(*x.shape[:-1], 1)

    return quantized


def _call(
    x: Any,
    weight: Any,
    store: Callable[..., None],
    results: Sequence[tuple[tuple[int, ...], Any]],
    *,
    eps: float,
    plus_one: bool,
    out_dtype: str | None,
    layer: int | None,
) -> Callable[..., Sequence[jax.Array]] | Refusal:
    """The Pallas call, or why there is none: store(row, its norm in `out_dtype`, *outs) for every row of x, with an out
    of `results`, (shape, dtype) of one row's, for all rows."""
    width, rows = x.shape[-1], math.prod(x.shape[:-1])
    result = jnp.dtype(out_dtype or x.dtype)
    if reason := not_hopper():
        return Refusal(reason)
    if width % NARROWEST or width > WIDEST or not rows:
        return Refusal(f"{rows} rows of {width}; it knows multiples of {NARROWEST} up to {WIDEST}")
    if any(dtype not in FLOATS for dtype in (x.dtype, weight.dtype, result)):
        dtypes = f"operands are {x.dtype.name} and {weight.dtype.name}, results {result.name}"
        return Refusal(f"{dtypes}; it knows float32, bfloat16 and float16")

    def rms_norm(x: Any, weight: Any, *outs: Any) -> None:
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
        store(row, scaled.astype(result), *outs)

    out_type = [jax.ShapeDtypeStruct((rows, *shape), dtype) for shape, dtype in results]
    call = plgpu.kernel(rms_norm, out_type=out_type, grid=(rows,), grid_names=("row",))
    return lambda x, weight: call(x.reshape(rows, width), weight)


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
