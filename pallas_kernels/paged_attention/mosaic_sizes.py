"""What a Pallas call of paged_attention on Hopper is made of: its sizes, its kind of cache, its shared memory."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels import _mosaic
from jaxserve.pallas_kernels.kv_write.format import KvFormat

ROWS = _mosaic.WARPGROUP_ROWS
STAGES = 2
VALUES = 128
"""The most components of the values that one warpgroup adds up, for they are in its registers."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a call.

    `tokens` are those of one warpgroup's rows, `group` the query heads of a KV head, `split` the keys of a part of a
    context (None: it has one part), `block` the keys of a step.
    """

    tiles: int
    warpgroups: int
    tokens: int
    group: int
    kv_heads: int
    head_dim: int
    page_size: int
    pages_per_seq: int
    block: int
    split: int | None

    @property
    def rows(self) -> int:
        """Rows of a warpgroup that are stored: of single tokens, only as many as there are, in whole tiles of 8."""
        return ROWS if self.tokens > 1 else -(-self.group // 8) * 8

    @property
    def shares(self) -> int:
        """Warpgroups among which the components of a tile's values are divided; each computes all of its weights."""
        return -(-self.head_dim // VALUES)

    @property
    def width(self) -> int:
        """Components of the values that one warpgroup adds up."""
        return self.head_dim // self.shares

    @property
    def computing(self) -> int:
        """Warpgroups that compute."""
        return self.warpgroups * self.shares

    @property
    def splits(self) -> int:
        return 1 if self.split is None else -(-self.pages_per_seq * self.page_size // self.split)


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a cache holds and how: `parts` are the codes of a byte (none: numbers of `dtype` themselves)."""

    dtype: Any
    softcap: float | None
    window: int | None
    layer: int | None
    format: KvFormat | None
    staged: bool

    @property
    def parts(self) -> tuple[_mosaic.Part, ...]:
        if self.format is None or self.format.element != "uint8":
            return ()
        return _mosaic.NIBBLES if self.format.per_byte == 2 else (_mosaic.BYTE,)

    @property
    def arrays(self) -> int:
        """Arrays of the keys, or of the values."""
        return 1 if self.format is None else len(self.format.arrays)

    @property
    def shifted(self) -> bool:
        """Whether there are minimums, and codes that are shifted."""
        return self.arrays == 3


def scratch_types(size: Shape, kind: Kind) -> dict[str, Any]:
    """The shared memory and the barriers of a block of the grid, by name."""
    tile = _mosaic.swizzled(size.head_dim // max(1, len(kind.parts)), kind.dtype)
    keys = plgpu.SMEM((STAGES, size.block, size.head_dim), kind.dtype, transforms=tile)
    copies = size.block // min(size.block, size.page_size)
    arrivals = copies if kind.format is None else 1
    scratch: dict[str, Any] = {
        "q": plgpu.SMEM((size.warpgroups, ROWS, size.head_dim), kind.dtype, transforms=tile),
        "q_ready": plgpu.Barrier(num_arrivals=size.warpgroups),
        "cleared": plgpu.Barrier(),
    }
    for half in ("k", "v"):
        scratch[half] = keys
        scratch[f"{half}_ready"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=STAGES)
        scratch[f"{half}_free"] = plgpu.Barrier(num_arrivals=size.computing, num_barriers=STAGES)
        if kind.format is not None:
            width = size.head_dim // kind.format.per_byte
            bytes_tile = _mosaic.swizzled(width, jnp.uint8)
            scratch[f"{half}_codes"] = plgpu.SMEM((STAGES, size.block, width), jnp.uint8, transforms=bytes_tile)
            stored = (kind.arrays - 1, STAGES, size.block, size.kv_heads)
            scratch[f"{half}_stored"] = plgpu.SMEM(stored, jnp.float16)
            scratch[f"{half}_arrived"] = plgpu.Barrier(num_arrivals=copies * kind.arrays, num_barriers=STAGES)
            scratch[f"{half}_numbers"] = plgpu.SMEM((kind.arrays - 1, STAGES, size.block), jnp.float32)
    if size.split is not None:
        layout = _mosaic.swizzled(size.width, jnp.float32)
        scratch["out"] = plgpu.SMEM((size.shares, ROWS, size.width), jnp.float32, transforms=layout)
    if kind.staged:
        layout = _mosaic.swizzled(size.block, kind.dtype)
        scratch["staging"] = plgpu.SMEM((size.computing, ROWS, size.block), kind.dtype, transforms=layout)
    return scratch
