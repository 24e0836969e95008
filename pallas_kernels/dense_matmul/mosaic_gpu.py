"""dense_matmul on Hopper: both operands through shared memory into wgmma, weights on the left so that few tokens fill
a tile. `product` serves int8 and float8 codes too.

Sums of a pipeline's step are added in float32 (int32 for int8): Hopper's own sums of float8 products keep but 14 bits.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels import _mosaic
from jaxserve.pallas_kernels._op import Refusal
from jaxserve.pallas_kernels._target import not_hopper


def kernel(x: Any, w: Any, *, out_dtype: str) -> Callable[..., jax.Array] | Refusal:
    """The kernel for this call, or why there is none."""
    if reason := not_hopper():
        return Refusal(reason)
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return Refusal(f"operands are {x.dtype.name}; it knows bfloat16 and float16")
    multiply = product(math.prod(x.shape[:-1]), tuple(w.shape), x.dtype, None)
    if isinstance(multiply, Refusal):
        return multiply

    def mosaic(x: jax.Array, w: jax.Array) -> jax.Array:
        found = multiply(x.reshape(-1, x.shape[-1]), w)
        return found.astype(out_dtype).reshape(*x.shape[:-1], w.shape[0])

    return mosaic


def product(
    tokens: int, shape: tuple[int, int], dtype: Any, layer: int | None
) -> Callable[[jax.Array, jax.Array], jax.Array] | Refusal:
    """x [T, I], w [O, I] -> x @ w.T, float32 [T, O], of int8 operands int32. With a `layer` w is [L, O, I]."""
    outputs, inputs = shape
    if outputs % _mosaic.WARPGROUP_ROWS or inputs % 128:
        return Refusal(f"a weight [{outputs}, {inputs}]; outputs must be a multiple of 64 and inputs one of 128")
    size = _mosaic.Blocks.of(tokens, outputs, inputs, codes_per_byte=1)
    total_dtype = jnp.int32 if dtype == jnp.int8 else jnp.float32
    tile, layout = (_mosaic.WARPGROUP_ROWS, size.columns), _mosaic.swizzled(size.step, dtype)

    def matmul(w: Any, x: Any, out: Any) -> None:
        if layer is not None:
            w = w.at[layer]
        wg, split = _mosaic.warpgroup(size.warpgroups), lax.axis_index("split")
        row, first = lax.axis_index("rows") * size.rows, split * size.sequential_splits * size.steps
        mine = pl.ds(wg * _mosaic.WARPGROUP_ROWS, _mosaic.WARPGROUP_ROWS)
        rows = pl.ds(row + wg * _mosaic.WARPGROUP_ROWS, _mosaic.WARPGROUP_ROWS)
        cols = pl.ds(lax.axis_index("cols") * size.columns, size.columns)

        def step_body(indices: Any, w_smem: Any, x_smem: Any, carry: Any) -> tuple[jax.Array, jax.Array]:
            total, part = carry
            found = _mosaic.multiply([(w_smem.at[mine], x_smem.T)], tile, total_dtype)
            return size.end_of_step(indices[0], total, part + found)

        def store(total: jax.Array, part: jax.Array) -> None:
            out[split, rows, cols] = size.result(total, part)

        blocks = [
            plgpu.BlockSpec((lines, size.step), lambda step: (0, first + step), transforms=layout)
            for lines in (size.rows, size.columns)
        ]
        start = _mosaic.zeros(tile, total_dtype), _mosaic.zeros(tile, total_dtype)
        operands = w.at[pl.ds(row, size.rows)], x.at[cols]
        steps = size.steps * size.sequential_splits
        _mosaic.pipeline(step_body, steps, blocks, operands, start, size.warpgroups, store)

    call = plgpu.kernel(matmul, **size.launch(total_dtype))

    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        return _mosaic.join(call(w, jnp.pad(x, ((0, size.tokens - tokens), (0, 0)))))[:tokens]

    return multiply
