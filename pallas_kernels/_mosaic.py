"""What the Pallas kernels for Hopper share: operand tiles, vectors along an accumulator's axes, and a product's left
operand, in registers or in shared memory.

Names of axes in a kernel's grid: `rows` are tiles of outputs, `cols` tiles of tokens, `split` parts of the inputs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

WARPGROUP_ROWS = 64
"""Rows of one warpgroup's accumulator."""

TOKENS_PER_TILE = 64
"""The most tokens (columns of an accumulator) of one tile; fewer are rounded up to a multiple of 8."""


STEP_BYTES = 128
"""Bytes of a row of the weight that one step of a pipeline reads; of 16-bit weights twice as many."""

STAGES = 4
BLOCKS = 256
"""Splits are made until so many blocks read weights: about twice the cores of the largest card."""

STEPS_PER_SPLIT = 4

LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Part:
    """One nibble of every byte, or the byte itself: which bits, which of them are flipped, by how much the code that
    results is too small, and what it must be divided by."""

    mask: int
    flip: int
    shift: int
    divisor: int = 1

    def whole(self, stored: jax.Array) -> jax.Array:
        """int8 numbers (q - shift) * divisor of int8 bytes [rows, k]."""
        if self.mask != -1:
            stored = stored & jnp.int8(self.mask)
        if self.flip:
            stored = stored ^ jnp.int8(self.flip)
        return stored

    def codes(self, stored: jax.Array) -> jax.Array:
        """The same in bf16."""
        return self.whole(stored).astype(jnp.bfloat16)


BYTE = Part(-1, -128, 128)
"""An unsigned code."""

NIBBLES = Part(0x0F, 0, 0), Part(-16, -128, 8, 16)
"""Two unsigned codes, the low nibble's and the high one's."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a product [O, I] x [I, T] is divided: tokens are padded to whole tiles, a pipeline's step is `step` inputs.

    The inputs of a row are cut into `splits` parts by the weight's shape alone. Parts are added in order, whether
    several blocks compute them (few tokens: every core is needed to read the weights) or one does (many), so a token's
    result does not depend on its company.
    """

    outputs: int
    inputs: int
    tokens: int
    step: int

    @staticmethod
    def of(tokens: int, outputs: int, inputs: int, codes_per_byte: float) -> "Blocks":
        """The division for weights of so many codes a byte (a half of them: 16 bits)."""
        columns = min(TOKENS_PER_TILE, -(-tokens // 8) * 8)
        most = max(128, int(STEP_BYTES * codes_per_byte))
        step = most if inputs % most == 0 else 128
        return Blocks(outputs, inputs, -(-tokens // columns) * columns, step)

    @property
    def columns(self) -> int:
        """Tokens of a tile."""
        return min(TOKENS_PER_TILE, self.tokens)

    @property
    def warpgroups(self) -> int:
        """Two share a tile of many tokens, if there are rows for both."""
        return 2 if self.tokens > TOKENS_PER_TILE and self.outputs % (2 * WARPGROUP_ROWS) == 0 else 1

    @property
    def rows(self) -> int:
        return self.warpgroups * WARPGROUP_ROWS

    @property
    def splits(self) -> int:
        splits, steps, blocks = 1, self.inputs // self.step, self.outputs // WARPGROUP_ROWS
        while blocks * splits < BLOCKS and steps % (2 * splits) == 0 and steps // (2 * splits) >= STEPS_PER_SPLIT:
            splits *= 2
        return splits

    @property
    def steps(self) -> int:
        """Pipeline steps of a split."""
        return self.inputs // self.step // self.splits

    @property
    def parallel_splits(self) -> int:
        """How many of the parts are blocks of their own."""
        return self.splits if self.tokens <= TOKENS_PER_TILE else 1

    @property
    def sequential_splits(self) -> int:
        """How many parts one block computes."""
        return self.splits // self.parallel_splits

    def end_of_step(self, step: Any, total: jax.Array, part: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(total, part), with the part added to the total where a split ends; with one split it stays the part."""
        if self.sequential_splits == 1:
            return total, part
        going_on = (lax.rem(step + 1, self.steps) != 0).astype(part.dtype)
        return total + part * (1 - going_on), part * going_on

    def result(self, total: jax.Array, part: jax.Array) -> jax.Array:
        return part if self.sequential_splits == 1 else total

    def launch(self, dtype: Any) -> dict[str, Any]:
        """Arguments of `plgpu.kernel`: the grid, threads, and a result [parallel splits, O, T]."""
        return {
            "out_type": jax.ShapeDtypeStruct((self.parallel_splits, self.outputs, self.tokens), dtype),
            "grid": (self.outputs // self.rows, self.tokens // self.columns, self.parallel_splits),
            "grid_names": ("rows", "cols", "split"),
            # Several computing warpgroups get another beside them that only copies; a lone one copies for itself, which
            # leaves registers for more blocks a core.
            **({"num_threads": self.warpgroups + 1, "thread_name": "wg"} if self.warpgroups > 1 else {}),
        }


def join(found: jax.Array) -> jax.Array:
    """[T, O] from the parts [splits, O, T], added in their order."""
    return functools.reduce(jnp.add, [found[split] for split in range(len(found))]).T


def swizzled(width: int, dtype: Any) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """How a tile whose rows are read `width` elements at a time lies in shared memory for wgmma."""
    bytes_wide = math.gcd(128, width * jnp.dtype(dtype).itemsize)
    tiling: Any = plgpu.TilingTransform  # not abstract, whatever their stubs say
    swizzle: Any = plgpu.SwizzleTransform
    return tiling((8, bytes_wide // jnp.dtype(dtype).itemsize)), swizzle(bytes_wide)


def along(ref: Any, tile: tuple[int, int], axis: int, dtype: Any = jnp.float32) -> jax.Array:
    """A vector along the rows (axis 0) or columns (axis 1) of an accumulator, repeated along the other."""
    vector = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False).astype(dtype)
    return lax.broadcast_in_dim(vector, tile, [axis])


def zeros(shape: tuple[int, int], dtype: Any = jnp.float32) -> jax.Array:
    """Zeros laid out as an accumulator is."""
    return plgpu.layout_cast(jnp.zeros(shape, dtype), plgpu.Layout.WGMMA)


def multiply(pairs: Sequence[tuple[Any, Any]], tile: tuple[int, int], dtype: Any = jnp.float32) -> jax.Array:
    """The sum [rows, columns] of a @ b over `pairs` of a left operand [rows, k], in registers or shared memory, and a
    right one [k, columns] in shared memory."""

    def scope(acc: Any) -> jax.Array:
        for left, right in pairs:
            plgpu.wgmma(acc, left, right)
        return acc[...]

    return pl.run_scoped(scope, plgpu.WGMMAAccumulatorRef(tile, dtype))


def warpgroup(warpgroups: int) -> Any:
    """Which of the warpgroups this is."""
    return lax.axis_index("wg") if warpgroups > 1 else 0


def pipeline(
    body: Callable[..., Any],
    steps: int,
    in_specs: Sequence[plgpu.BlockSpec],
    operands: Sequence[Any],
    start: Any,
    warpgroups: int,
    finish: Callable[..., None],
) -> None:
    """finish(*carry) after body((step,), *blocks in shared memory, carry) -> carry for every step, from `start`; blocks
    are copied `STAGES` steps ahead."""
    if warpgroups == 1:
        run = plgpu.emit_pipeline(
            body, grid=(steps,), in_specs=in_specs, max_concurrent_steps=min(STAGES, steps), init_carry=start
        )
        finish(*run(*operands))
        return
    plgpu.emit_pipeline_warp_specialized(
        body,
        grid=(steps,),
        in_specs=in_specs,
        max_concurrent_steps=min(STAGES, steps),
        memory_registers=40,
        wg_axis="wg",
        num_compute_wgs=warpgroups,
        compute_context=lambda run: finish(*run(start)),
    )(*operands)
