"""quantized_matmul on Hopper for QServe's weights (arXiv:2405.04532): 4-bit codes in groups, tokens of int8.

total[o, t] = sum_g s[o,g] (sum_{i in g} q[o,i] x[t,i] - z[o,g] X[t,g]),   X[t,g] = sum_{i in g} x[t,i]

Everything here is whole numbers in int32, and exact; what is not whole, an output's scale and a token's, is applied to
the sums behind the loop. A byte holds the codes of two neighbouring inputs, the high one as 16 (q - 8) in two's
complement: each nibble has a product of its own, with the even or the odd inputs. Codes pass through shared memory: of
int8 operands in registers ptxas is said to lose products. (QServe makes int8 weights of codes first, two operations a
code; multiplying each group's sums costs less for the tiles here, which are at most 64 tokens wide.)
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
from jaxserve.pallas_kernels.quantized_matmul.format import QuantFormat
from jaxserve.pallas_kernels.quantized_matmul.op import quantize_activation

GROUPS = (64, 128)


def kernel(
    x: Any,
    *arrays: Any,
    format: QuantFormat,
    shape: tuple[int, int],
    out_dtype: str,
    activation: str | None,
    layer: int | None,
    layout: str | None = None,
) -> Callable[..., jax.Array] | Refusal:
    """The kernel for this call, or why there is none."""
    if reason := not_hopper() or _unsupported(format, shape, activation, layout):
        return Refusal(reason)
    outputs, inputs = shape
    rows, group = math.prod(x.shape[:-1]), format.group_size(inputs)
    # Many tokens leave registers for few groups at a time. Sums are exact: how inputs are divided changes nothing.
    size = _mosaic.Blocks.of(rows, outputs, inputs, codes_per_byte=2 if rows <= _mosaic.TOKENS_PER_TILE else 1)
    call = _call(size, group, layer)

    def mosaic(x: jax.Array, codes: Any, scale: Any, zero: Any, channel: Any, *static: Any) -> jax.Array:
        narrow, x_scale = quantize_activation(x, str(activation), *static)
        flat = jnp.pad(narrow.reshape(rows, inputs), ((0, size.tokens - rows), (0, 0)))
        lanes = flat.reshape(size.tokens, -1, 2).transpose(2, 0, 1)
        sums = lanes.astype(jnp.int32).reshape(2, size.tokens, -1, group // 2).sum(axis=3).swapaxes(1, 2)
        total = _mosaic.join(call(codes, scale, zero, sums, lanes))[:rows].astype(jnp.float32)
        by_output = (channel if layer is None else channel[layer])[:, 0].astype(jnp.float32)
        return ((total * by_output).reshape(*x.shape[:-1], outputs) * x_scale).astype(out_dtype)

    return mosaic


def _unsupported(format: QuantFormat, shape: tuple[int, int], activation: str | None, layout: str | None) -> str:
    if layout:
        return f"the weight is packed in {layout}, for a CPU's kernel"
    if format.level2 != "channel" or format.ordered or activation not in ("int8", "int8-static"):
        return f"it multiplies codes of two levels of scales by int8, not {format}, {activation}"
    if format.group not in GROUPS:
        return f"groups of {format.group} inputs; it knows {', '.join(map(str, GROUPS))}"
    outputs, inputs = shape
    if outputs % 64 or inputs % 128:
        return f"a weight [{outputs}, {inputs}]; outputs must be a multiple of 64 and inputs one of 128"
    return ""


def _call(size: _mosaic.Blocks, group: int, layer: int | None) -> Callable[..., jax.Array]:
    """The Pallas call: (codes, scale, zero, int32 [2, G, T] sums of x's even and odd inputs, those inputs int8
    [2, T, I/2]) -> int32 [parallel splits, O, T]."""
    tile, steps, per_step = (_mosaic.WARPGROUP_ROWS, size.columns), size.steps, size.step // group
    sequential, width = size.sequential_splits, group // 2
    layout = _mosaic.swizzled(width, jnp.int8)

    def w4a8(codes: Any, *refs: Any, staging: Any) -> None:
        scale, zero, sums, lanes, out = refs
        if layer is not None:
            codes, scale, zero = (ref.at[layer] for ref in (codes, scale, zero))
        wg, split = _mosaic.warpgroup(size.warpgroups), lax.axis_index("split")
        row, first = lax.axis_index("rows") * size.rows, split * sequential * steps
        mine = pl.ds(wg * _mosaic.WARPGROUP_ROWS, _mosaic.WARPGROUP_ROWS)
        rows = pl.ds(row + wg * _mosaic.WARPGROUP_ROWS, _mosaic.WARPGROUP_ROWS)
        cols = pl.ds(lax.axis_index("cols") * size.columns, size.columns)

        def step_body(indices: Any, codes_smem: Any, *rest: Any) -> tuple[jax.Array]:
            *lanes_smem, (total,) = rest
            (step,) = indices
            for chunk in range(per_step):
                place = pl.ds(chunk * width, width)
                stored = lax.bitcast_convert_type(codes_smem[mine, place], jnp.int8)
                for half, nibble in enumerate(_mosaic.NIBBLES):
                    staging[wg, half] = nibble.whole(stored)
                plgpu.commit_smem()
                low, high = (
                    _mosaic.multiply([(staging.at[wg, half], lane.at[:, place].T)], tile, jnp.int32)
                    for half, lane in enumerate(lanes_smem)
                )
                index = (first + step) * per_step + chunk
                even, odd = (_mosaic.along(sums.at[half, index, cols], tile, 1, jnp.int32) for half in range(2))
                by_zero, by_scale = (_mosaic.along(ref.at[rows, index], tile, 0, jnp.int32) for ref in (zero, scale))
                found = low + lax.shift_right_arithmetic(high, jnp.full_like(high, 4)) + 8 * odd
                total = total + (found - by_zero * (even + odd)) * by_scale
            return (total,)

        def store(total: jax.Array) -> None:
            out[split, rows, cols] = total

        def block(lines: int) -> plgpu.BlockSpec:
            return plgpu.BlockSpec((lines, size.step // 2), lambda step: (0, first + step), transforms=layout)

        _mosaic.pipeline(
            step_body,
            steps * sequential,
            [block(size.rows), *[block(size.columns)] * 2],
            [codes.at[pl.ds(row, size.rows)], *(lanes.at[half, cols] for half in range(2))],
            (_mosaic.zeros(tile, jnp.int32),),
            size.warpgroups,
            store,
        )

    staging = (size.warpgroups, 2, _mosaic.WARPGROUP_ROWS, width)
    return plgpu.kernel(
        w4a8,
        **size.launch(jnp.int32),
        scratch_types={"staging": plgpu.SMEM(staging, jnp.int8, transforms=layout)},
    )
