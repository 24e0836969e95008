"""quantized_matmul on Hopper: weights of 4 or 8 bits as the left operand of wgmma, bf16 tokens as the right one.

y[t, o] = sum_g s[o,g] (sum_{i in g} q[o,i] x[t,i] - z[o,g] X[t,g]) + m[o,g] X[t,g],   X[t,g] = sum_{i in g} x[t,i]

Codes become bf16 in registers, exactly; scales and offsets are applied in float32 to each group's sum, so that weights
are rounded nowhere. A byte holds the codes of two neighbouring inputs: x is taken apart into its even and odd inputs
and each half multiplied with one nibble, which is used where it lies in the byte (the high one is 16 q, x/16 undoes
it). Signed arithmetic on bytes shifts some codes by a constant b; b X of the inputs concerned is added back.

The inputs of a row are cut into `splits` parts by the weight's shape alone. Parts are added in order, whether several
blocks computed them (few tokens: all cores are needed to read the weights) or one (many), so a token's result does not
depend on its company.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels import _mosaic
from jaxserve.pallas_kernels._op import Refusal
from jaxserve.pallas_kernels._target import not_hopper
from jaxserve.pallas_kernels.dense_matmul.mosaic_gpu import product
from jaxserve.pallas_kernels.quantized_matmul.format import QuantFormat
from jaxserve.pallas_kernels.quantized_matmul.op import quantize_activation

GROUPS = (32, 64, 128)
CHUNK = 128  # inputs that share a partial sum where one scale is for the whole row


def parts(format: QuantFormat) -> tuple[_mosaic.Part, ...]:
    """How the codes of a format are read from its bytes: of input 2i and 2i + 1, or of each input."""
    if not format.packed:
        return (_mosaic.Part(-1, 0, 0) if format.signed else _mosaic.BYTE,)
    if format.signed:
        return _mosaic.Part(0x0F, 0x08, -8), _mosaic.Part(-16, 0, 0, 16)
    return _mosaic.NIBBLES


def kernel(
    x: Any,
    *arrays: Any,
    format: QuantFormat,
    shape: tuple[int, int],
    out_dtype: str,
    activation: str | None,
    layer: int | None,
    layout: str | None = None,
    stage_lhs_in_smem: bool = False,
) -> Callable[..., jax.Array] | Refusal:
    """The kernel for this call, or why there is none. `stage_lhs_in_smem` sends the codes through shared memory to
    wgmma: the interpreter knows no left operand in registers."""
    if reason := not_hopper() or _repacked(layout) or _unsupported(x, format, shape, activation):
        return Refusal(reason)
    outputs, inputs = shape
    rows = math.prod(x.shape[:-1])
    size = _mosaic.Blocks.of(rows, outputs, inputs, codes_per_byte=len(parts(format)))
    call = _call(size, format, layer, stage_lhs_in_smem)

    def mosaic(x: jax.Array, codes: jax.Array, *numbers: jax.Array) -> jax.Array:
        flat = jnp.pad(x.reshape(rows, inputs), ((0, size.tokens - rows), (0, 0)))
        lanes, sums, shifts = _prepare(flat, format, size)
        scales = (*numbers, sums, shifts) if format.group else ()
        found = call(codes, *scales, *lanes)
        y = _mosaic.join(found)
        if not format.group:
            by_output = [(value if layer is None else value[layer]).T.astype(jnp.float32) for value in numbers]
            y = weighted(y, sums.T, shifts.T, *by_output, offset=format.offset)
        return y[:rows].astype(out_dtype).reshape(*x.shape[:-1], outputs)

    return mosaic


def _repacked(layout: str | None) -> str:
    return f"the weight is packed in {layout}, for a CPU's kernel" if layout else ""


def _unsupported(x: Any, format: QuantFormat, shape: tuple[int, int], activation: str | None) -> str:
    outputs, inputs = shape
    if activation is not None:
        return f"activations quantized to {activation} are not its business"
    if x.dtype != jnp.bfloat16:
        return f"activations are {x.dtype.name}; it knows bfloat16"
    if format.element != "int" or format.level2 or format.ordered:
        return f"it knows whole numbers with one level of scales, inputs in their order, not {format}"
    if format.group is not None and format.group not in GROUPS:
        return f"groups of {format.group} inputs; it knows {', '.join(map(str, GROUPS))} and whole rows"
    if outputs % 64 or inputs % 128:
        return f"a weight [{outputs}, {inputs}]; outputs must be a multiple of 64 and inputs one of 128"
    return ""


def weighted(part: Any, sums: Any, shifts: Any, scale: Any, second: Any = None, *, offset: str) -> Any:
    """Sums of weights times x, from sums of codes times x, of x, and of shifts times x; all broadcast, in float32."""
    part = part + shifts
    if offset == "zero":
        part = part - second * sums
    part = part * scale
    return part + second * sums if offset == "minimum" else part


def _prepare(x: jax.Array, format: QuantFormat, size: _mosaic.Blocks) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """What the kernel multiplies codes with, and float32 [G, T] sums of the inputs that share a scale: plain, and times
    the shifts of the codes."""
    kinds, group = parts(format), format.group or size.inputs
    lanes = [x[:, index :: len(kinds)] for index in range(len(kinds))]
    grouped = x.astype(jnp.float32).reshape(size.tokens, -1, group // len(kinds), len(kinds)).sum(axis=2)
    shifts = jnp.array([kind.shift for kind in kinds], jnp.float32)
    scaled = [lane / jnp.bfloat16(kind.divisor) for lane, kind in zip(lanes, kinds, strict=True)]
    return scaled, grouped.sum(axis=2).T, (grouped * shifts).sum(axis=2).T


def _call(size: _mosaic.Blocks, format: QuantFormat, layer: int | None, staged: bool) -> Callable[..., jax.Array]:
    """The Pallas call, float32 [parallel splits, O, T]: of (codes, scale, offset?, sums, shifts, *lanes), or, where
    one scale is for the whole row, of (codes, *lanes), without scales."""
    kinds, tile = parts(format), (_mosaic.WARPGROUP_ROWS, size.columns)
    group = format.group or CHUNK
    group_bytes, step_bytes = group // len(kinds), size.step // len(kinds)
    steps, per_step, sequential = size.steps, size.step // group, size.sequential_splits

    def quantized_matmul(codes: Any, *refs: Any, staging: Any = None) -> None:
        *numbers, out = refs
        numbers, lanes = numbers[: -len(kinds)], numbers[-len(kinds) :]
        weights, tokens = numbers[:-2], numbers[-2:]  # numbers of outputs [O, G], and of tokens [G, T]
        if layer is not None:
            codes, weights = codes.at[layer], [ref.at[layer] for ref in weights]
        wg, split = _mosaic.warpgroup(size.warpgroups), lax.axis_index("split")
        row, first = lax.axis_index("rows") * size.rows, split * sequential * steps
        mine = pl.ds(wg * _mosaic.WARPGROUP_ROWS, _mosaic.WARPGROUP_ROWS)
        rows = pl.ds(row + wg * _mosaic.WARPGROUP_ROWS, _mosaic.WARPGROUP_ROWS)
        cols = pl.ds(lax.axis_index("cols") * size.columns, size.columns)

        def group_sum(stored: Any, x_tiles: Sequence[Any], place: Any) -> jax.Array:
            tiles = [kind.codes(stored) for kind in kinds]
            if staged:
                for index, codes_tile in enumerate(tiles):
                    staging[wg, index] = codes_tile
                plgpu.commit_smem()
                tiles = [staging.at[wg, index] for index in range(len(kinds))]
            return _mosaic.multiply([(left, x.at[:, place].T) for left, x in zip(tiles, x_tiles, strict=True)], tile)

        def step_body(indices: Any, codes_smem: Any, *rest: Any) -> tuple[jax.Array, jax.Array]:
            *x_smem, (total, part) = rest
            (step,) = indices
            for chunk in range(per_step):
                place = pl.ds(chunk * group_bytes, group_bytes)
                found = group_sum(lax.bitcast_convert_type(codes_smem[mine, place], jnp.int8), x_smem, place)
                if format.group:
                    index = (first + step) * per_step + chunk
                    by_token = [_mosaic.along(ref.at[index, cols], tile, 1) for ref in tokens]
                    by_output = [_mosaic.along(ref.at[rows, index], tile, 0) for ref in weights]
                    found = weighted(found, *by_token, *by_output, offset=format.offset)
                part = part + found
            return size.end_of_step(step, total, part)

        def store(total: jax.Array, part: jax.Array) -> None:
            out[split, rows, cols] = size.result(total, part)

        def block(rows_of_tile: int, dtype: Any) -> plgpu.BlockSpec:
            layout = _mosaic.swizzled(group_bytes, dtype)
            return plgpu.BlockSpec((rows_of_tile, step_bytes), lambda step: (0, first + step), transforms=layout)

        _mosaic.pipeline(
            step_body,
            steps * sequential,
            [block(size.rows, jnp.int8), *[block(size.columns, jnp.bfloat16)] * len(kinds)],
            [codes.at[pl.ds(row, size.rows)], *(lane.at[cols] for lane in lanes)],
            (_mosaic.zeros(tile), _mosaic.zeros(tile)),
            size.warpgroups,
            store,
        )

    staging = (size.warpgroups, len(kinds), _mosaic.WARPGROUP_ROWS, group_bytes)
    layout = _mosaic.swizzled(group_bytes, jnp.bfloat16)
    return plgpu.kernel(
        quantized_matmul,
        **size.launch(jnp.float32),
        scratch_types={"staging": plgpu.SMEM(staging, jnp.bfloat16, transforms=layout)} if staged else {},
    )


def narrow_kernel(
    x: Any,
    *arrays: Any,
    format: QuantFormat,
    shape: tuple[int, int],
    out_dtype: str,
    activation: str | None,
    layer: int | None,
    layout: str | None = None,
) -> Callable[..., jax.Array] | Refusal:
    """Codes times codes: int8 summed exactly in int32, or e4m3; both scales are applied to the sums."""
    if reason := not_hopper() or _repacked(layout):
        return Refusal(reason)
    pairs = {"int8": "int", "int8-static": "int", "e4m3": "e4m3"}
    plain = format.bits == 8 and format.group is None and format.offset == "none" and not format.ordered
    if activation is None or pairs[activation] != format.element or not plain:
        return Refusal(
            f"it multiplies int8 or e4m3 codes by their like, with one scale a row, not {format}, {activation}"
        )
    dtype = jnp.float8_e4m3fn if activation == "e4m3" else jnp.int8
    multiply = product(math.prod(x.shape[:-1]), shape, dtype, layer)
    if isinstance(multiply, Refusal):
        return multiply

    def mosaic(x: jax.Array, codes: jax.Array, scale: jax.Array, *static: jax.Array) -> jax.Array:
        narrow, x_scale = quantize_activation(x, activation, *static)
        total = multiply(narrow.reshape(-1, x.shape[-1]), codes).astype(jnp.float32)
        by_output = (scale if layer is None else scale[layer])[:, 0].astype(jnp.float32)
        return ((total * by_output).reshape(*x.shape[:-1], shape[0]) * x_scale).astype(out_dtype)

    return mosaic
