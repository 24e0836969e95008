"""kv_write on Hopper: quantizes keys and values and writes codes and numbers into their slots, all in one kernel.

A block takes the keys, or the values, of some tokens. Rows of its tile are (token, KV head) pairs, so that the extent
of a row is found within four threads. What is to be stored goes through shared memory to each token's slot. XLA makes a
scatter of every array of the cache instead, and finds and quantizes the rows before that.
"""

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
from jaxserve.pallas_kernels.kv_write.format import NUMBERS, KvFormat, halves

ROWS = _mosaic.WARPGROUP_ROWS
HEAD_DIMS = (64, 96, 128, 256)
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


def kernel(*operands: Any, format: KvFormat | None, layer: int | None) -> Callable[..., Any] | Refusal:
    """The kernel for this call, or why there is none; XLA copies the caches first where they are not donated."""
    codes, k = operands[0], operands[-3]
    reason = not_hopper() or _unsupported(codes, k, format)
    if reason or format is None:
        return Refusal(reason)
    tokens, kv_heads, head_dim = k.shape
    heads = 1 << (kv_heads - 1).bit_length()  # rows of a token
    each = ROWS // heads
    tiles, lanes = -(-tokens // each), format.per_byte
    width = head_dim // lanes

    def kv_write(x: Any, slots: Any, *refs: Any, scratch: Any) -> None:
        tile = lax.axis_index("tile")
        rows = [
            plgpu.load(
                x.at[lax.axis_index("half"), lane, pl.ds(tile * ROWS, ROWS)], layout=plgpu.Layout.WGMMA, optimized=False
            )
            for lane in range(lanes)
        ]
        for ref, array in zip(scratch, _encode(rows, format), strict=True):
            ref[...] = array
        plgpu.commit_smem()
        for index, targets in enumerate(halves(refs)):
            pl.when(lax.axis_index("half") == index)(lambda targets=targets: store(tile, slots, scratch, targets))
        plgpu.wait_smem_to_gmem(0)

    def store(tile: Any, slots: Any, scratch: Sequence[Any], targets: Sequence[Any]) -> None:
        targets = [target if layer is None else target.at[layer] for target in targets]
        pages, page_size = targets[0].shape[:2]
        for token in range(each):
            slot = slots[tile * each + token]

            @pl.when((slot >= 0) & (slot < pages * page_size))
            def _copy(token: int = token, slot: Any = slot) -> None:
                place = lax.div(slot, page_size), lax.rem(slot, page_size)
                for ref, target in zip(scratch, targets, strict=True):
                    plgpu.copy_smem_to_gmem(ref.at[pl.ds(token * heads, kv_heads)], target.at[place])

    stored = [plgpu.SMEM((ROWS, width), jnp.uint8), *[plgpu.SMEM((ROWS,), jnp.dtype(NUMBERS)) for _ in format.numbers]]
    call = plgpu.kernel(
        kv_write, out_type=(), grid=(tiles, 2), grid_names=("tile", "half"), scratch_types={"scratch": stored}
    )

    def mosaic(*operands: jax.Array) -> tuple[jax.Array, ...]:
        *caches, k, v, slots = operands
        padding = tiles * each - tokens
        x = jnp.stack([k, v]).reshape(2, tokens, kv_heads, width, lanes)
        x = jnp.pad(x, ((0, 0), (0, padding), (0, heads - kv_heads), (0, 0), (0, 0)))
        refs = [jax.new_ref(cache) for cache in caches]
        call(
            x.transpose(0, 4, 1, 2, 3).reshape(2, lanes, -1, width),
            jnp.pad(slots, (0, padding), constant_values=-1),
            *refs,
        )
        return tuple(jax.freeze(ref) for ref in refs)

    return mosaic


def _unsupported(codes: Any, k: Any, format: KvFormat | None) -> str:
    tokens, kv_heads, head_dim = k.shape
    if format is None:
        return f"the cache is {codes.dtype.name}; XLA needs no more kernels to write numbers as they are"
    if k.dtype not in FLOATS:
        return f"rows are {k.dtype.name}; it knows float32, bfloat16 and float16"
    if head_dim not in HEAD_DIMS or kv_heads > ROWS or not tokens:
        return f"{kv_heads} heads of {head_dim}; it knows up to {ROWS}, of {', '.join(map(str, HEAD_DIMS))}"
    if kv_heads % 8:
        return f"scales of {kv_heads} KV heads; they are copied in rows of a multiple of 8"
    return ""


def _encode(lanes: Sequence[Any], format: KvFormat) -> list[Any]:
    """`format.encode` of rows whose components 2i and 2i + 1 are apart if a byte holds two codes."""
    wide = [lane.astype(jnp.float32) for lane in lanes]
    shape = wide[0].shape

    def along(numbers: Any) -> Any:
        return lax.broadcast_in_dim(numbers.astype(jnp.float32), shape, [0])

    def extreme(pick: Callable[[Any, Any], Any], found: Sequence[Any]) -> Any:
        return found[0] if len(found) == 1 else pick(*found)

    def scaled(extent: Any) -> tuple[Any, Any]:
        scale = (extent / format.largest).astype(NUMBERS)
        divisor = scale.astype(jnp.float32)
        return scale, along(jnp.where(divisor == 0, 1.0, divisor))

    if "minimum" not in format.numbers:
        scale, divisor = scaled(jnp.abs(wide[0]).max(axis=1))
        codes = jnp.clip(wide[0] / divisor, -format.largest, format.largest).astype(format.element)
        return [lax.bitcast_convert_type(codes, jnp.uint8), scale]
    low = extreme(jnp.minimum, [lane.min(axis=1) for lane in wide])
    scale, divisor = scaled(extreme(jnp.maximum, [lane.max(axis=1) for lane in wide]) - low)
    minimum = low.astype(NUMBERS)
    codes = [jnp.clip(jnp.round((lane - along(minimum)) / divisor), 0, format.largest) for lane in wide]
    first, *second = [each.astype(jnp.int32) for each in codes]
    packed = first | (second[0] << 4) if second else first
    return [packed.astype(jnp.uint8), scale, minimum]
