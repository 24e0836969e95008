"""The Pallas call behind paged_attention on Hopper: tiles of queries over the pages that a block table names.

A block takes a tile of queries of one sequence, a KV head with the query heads that share it, and a part of the keys.
Rows of wgmma's tile are (token, query head) pairs, columns the slots of a block of keys. One warpgroup copies pages,
the others compute: softmax runs online in float32 (FlashAttention, arXiv:2205.14135), in units of log 2; its weights
are rounded to the operands' dtype for the product with the values, and so are the queries. Of wide heads two
warpgroups compute a tile's weights, both all of them, and each adds up one half of the values' components.

Codes of a quantized cache become bf16 on their way, exactly, and are never scaled: with k = s (c + a) + m, c a code as
wgmma sees it and a the constant by which it is shifted,

    q.k = s (q.c + a sum q) + m sum q          sum_j p_j v_j = sum_j (p_j s_j) c_j + a sum_j p_j s_j + sum_j p_j m_j

so that scales and minimums, one a slot, are applied to columns of scores and weights. The two codes of a byte go into
different halves of a row; queries and results are in that order, too.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels import _mosaic
from jaxserve.pallas_kernels.paged_attention.mosaic_sizes import ROWS, STAGES, Kind, Shape, scratch_types

LOWEST = -1e30  # a finite start for the running maximum: -inf minus -inf would be NaN


def call(size: Shape, kind: Kind, out_dtype: Any) -> Callable[..., Any]:
    """(q [tiles, K, warpgroups, rows, H], sums float32 [2, tiles, K, warpgroups, 64] of q and of q times the shifts if
    the format has minimums, *cache, tables [S, P], spans [tiles, 3]) -> the tiles' results.

    A span is a sequence, the position of a tile's first token and that of its last, -1 for a tile that is not used.
    With parts: weighted values [tiles, splits, K, rows, H], maxima and sums of the weights [tiles, splits, K, 64], all
    float32. Without: the attention itself [tiles, K, warpgroups, 64, H] in `out_dtype`.
    """
    parts = (size.tiles, size.splits, size.kv_heads)
    if size.split is None:
        shape = (size.tiles, size.kv_heads, size.warpgroups, ROWS, size.head_dim)
        out: Any = jax.ShapeDtypeStruct(shape, out_dtype)
    else:
        statistics = jax.ShapeDtypeStruct((*parts, ROWS), jnp.float32)
        out = (jax.ShapeDtypeStruct((*parts, size.rows, size.head_dim), jnp.float32), statistics, statistics)

    def paged_attention(*refs: Any, **scratch: Any) -> None:
        block = _Block(size, kind, refs, scratch)
        wg = lax.axis_index("wg")
        pl.when(wg < size.computing)(lambda: block.compute(wg))
        pl.when(wg == size.computing)(block.load)

    return plgpu.kernel(
        paged_attention,
        out_type=out,
        grid=(size.tiles, size.kv_heads, size.splits),
        grid_names=("tile", "head", "split"),
        num_threads=size.computing + 1,
        thread_name="wg",
        scratch_types=scratch_types(size, kind),
        # tanh is kept exact: its short form is off by 2^-11, which a cap of 50 makes 2% of a weight.
        compiler_params=plgpu.CompilerParams(approx_math=kind.softcap is None),
    )


class _Worker(NamedTuple):
    """A warpgroup that computes: its number, and which of the tile's rows and of the values' components are its own."""

    index: Any
    rows: Any
    share: Any


class _Block:
    """What one block of the grid does, seen from the warpgroup that copies and from those that compute."""

    def __init__(self, size: Shape, kind: Kind, refs: tuple[Any, ...], scratch: dict[str, Any]):
        self.size, self.kind, self.scratch = size, kind, scratch
        self.q, *rest = refs
        self.sums: Any = rest.pop(0) if kind.shifted else None
        caches = [rest.pop(0) for _ in range(2 * kind.arrays)]
        if kind.layer is not None:
            caches = [cache.at[kind.layer] for cache in caches]
        self.caches = {"k": caches[: kind.arrays], "v": caches[kind.arrays :]}
        self.tables, spans, *self.out = rest
        # Tiles at the end of a context see most keys: they go first.
        self.tile = size.tiles - 1 - lax.axis_index("tile")
        self.head, self.split = lax.axis_index("head"), lax.axis_index("split")
        self.sequence, self.begin, self.last = (spans[self.tile, index] for index in range(3))
        seen_from = 0 if kind.window is None else jnp.maximum(self.begin - kind.window + 1, 0)
        self.first = lax.div(seen_from, size.block) * size.block
        end = self.last + 1
        if size.split is not None:
            self.first = jnp.maximum(self.first, self.split * size.split)
            end = jnp.minimum(end, (self.split + 1) * size.split)
        self.blocks = lax.div(jnp.maximum(end - self.first, 0) + size.block - 1, size.block)

    # --- the warpgroup that copies

    def load(self) -> None:
        size, kind = self.size, self.kind
        if size.computing > 1:
            plgpu.set_max_registers(_LOADING if kind.format is None else _CONVERTING, action="decrease")

        @pl.when(self.blocks > 0)
        def _queries() -> None:
            for wg in range(size.warpgroups):
                rows = self.scratch["q"].at[wg, pl.ds(0, size.rows)]
                plgpu.copy_gmem_to_smem(self.q.at[self.tile, self.head, wg], rows, self.scratch["q_ready"])

        if kind.format is None:
            pl.loop(0, self.blocks)(self._fetch)
        else:
            pl.when(self.blocks > 0)(lambda: self._fetch_codes(0))
            pl.loop(0, self.blocks)(self._fetch_converted)

        @pl.loop(jnp.maximum(self.blocks - STAGES, 0), self.blocks)
        def _leave(block: Any) -> None:  # the interpreter wants to see every barrier's end
            for half in ("k", "v"):
                plgpu.barrier_wait(self.scratch[f"{half}_free"].at[lax.rem(block, STAGES)])

    def _fetch(self, block: Any) -> None:
        for half in ("k", "v"):
            slot = self._wait_until_free(half, block)
            self._copy(half, block, self.scratch[half].at[slot], self.scratch[f"{half}_ready"].at[slot])

    def _fetch_codes(self, block: Any) -> None:
        slot = lax.rem(block, STAGES)
        for half in ("k", "v"):
            codes, stored = self.scratch[f"{half}_codes"].at[slot], self.scratch[f"{half}_stored"]
            targets = [codes, *(stored.at[index, slot] for index in range(self.kind.arrays - 1))]
            for array, target in enumerate(targets):
                self._copy(half, block, target, self.scratch[f"{half}_arrived"].at[slot], array)

    def _fetch_converted(self, block: Any) -> None:
        """Converts a block of keys and values, after sending for the codes of the next."""
        pl.when(block + 1 < self.blocks)(lambda: self._fetch_codes(block + 1))
        for half in ("k", "v"):
            slot = self._wait_until_free(half, block)
            plgpu.barrier_wait(self.scratch[f"{half}_arrived"].at[slot])
            for row in range(0, self.size.block, ROWS):
                self._convert(half, slot, row, self.last - self.first - block * self.size.block - row)
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.scratch[f"{half}_ready"].at[slot])

    def _wait_until_free(self, half: str, block: Any) -> Any:
        slot = lax.rem(block, STAGES)
        pl.when(block >= STAGES)(lambda: plgpu.barrier_wait(self.scratch[f"{half}_free"].at[slot]))
        return slot

    def _copy(self, half: str, block: Any, target: Any, barrier: Any, array: int = 0) -> None:
        """Starts copying an array of the slots of a block of keys, page by page."""
        size, cache = self.size, self.caches[half][array]
        step = min(size.block, size.page_size)
        for index in range(size.block // step):
            key = jnp.minimum(self.first + block * size.block + index * step, self.last)
            entry = self.tables[self.sequence, lax.div(key, size.page_size)]  # past the context they mean nothing
            within = pl.ds(pl.multiple_of(lax.div(lax.rem(key, size.page_size), step) * step, step), step)
            place = (entry, within, self.head) if array == 0 else (entry, within)
            plgpu.copy_gmem_to_smem(cache.at[place], target.at[pl.ds(index * step, step)], barrier)

    def _convert(self, half: str, slot: Any, first: int, last: Any) -> None:
        """Codes as bf16 numbers, and one head's scales and minimums, of 64 slots; behind the `last` of them, zeros."""
        rows = pl.ds(first, ROWS)
        codes = self.scratch[f"{half}_codes"].at[slot]
        width = codes.shape[1]
        stored = codes[rows, :]
        known = plgpu.broadcasted_iota(jnp.int32, stored.shape, 0, layout=plgpu.Layout.WGMMA) <= last
        for index, convert in enumerate(self._converters()):
            found = convert(stored)
            target = self.scratch[half].at[slot, rows, pl.ds(index * width, width)]
            target[...] = jnp.where(known, found, jnp.zeros_like(found))
        for index in range(self.kind.arrays - 1):
            numbers = plgpu.load(
                self.scratch[f"{half}_stored"].at[index, slot, rows], layout=plgpu.Layout.WGMMA, optimized=False
            ).astype(jnp.float32)
            place, head = (
                plgpu.broadcasted_iota(jnp.int32, numbers.shape, axis, layout=plgpu.Layout.WGMMA) for axis in range(2)
            )
            mine = jnp.where((place <= last) & (head == self.head), numbers, 0.0)
            self.scratch[f"{half}_numbers"][index, slot, rows] = mine.sum(axis=1)

    def _converters(self) -> list[Callable[[jax.Array], jax.Array]]:
        if not self.kind.parts:
            return [lambda stored: lax.bitcast_convert_type(stored, jnp.float8_e4m3fn).astype(self.kind.dtype)]
        return [
            lambda stored, part=part: part.codes(lax.bitcast_convert_type(stored, jnp.int8)) for part in self.kind.parts
        ]

    # --- a warpgroup that computes

    def compute(self, warpgroup: Any) -> None:
        size, kind = self.size, self.kind
        if size.computing > 1:
            loading = _LOADING if kind.format is None else _CONVERTING
            plgpu.set_max_registers((512 - loading) // size.computing // 8 * 8, action="increase")
        me = _Worker(warpgroup, warpgroup, 0)
        if size.shares > 1:
            me = _Worker(warpgroup, lax.div(warpgroup, size.shares), lax.rem(warpgroup, size.shares))
        pl.when(self.blocks > 0)(lambda: plgpu.barrier_wait(self.scratch["q_ready"]))
        lowest = jnp.minimum(self.begin + me.rows * size.tokens, self.last)
        ends = self._phases(lowest)
        carry = self._start()
        for start, end, masked in ends:
            carry = lax.fori_loop(
                start, end, lambda block, carry, masked=masked: self._add(me, block, carry, masked), carry
            )
        self._store(me, *carry)

    def _phases(self, lowest: Any) -> list[tuple[Any, Any, bool]]:
        """(from, to, whether some row does not see some key) of the blocks, for tokens from position `lowest` on."""
        size, kind = self.size, self.kind
        if kind.softcap is not None or kind.window is not None:
            # One loop: of three, for blocks that a window's start or the context's end cuts and those between, ptxas
            # spills.
            return [(0, self.blocks, True)]
        full = jnp.clip(lax.div(jnp.maximum(lowest + 1 - self.first, 0), size.block), 0, self.blocks)
        return [(0, full, False), (full, self.blocks, True)]

    def _start(self) -> Any:
        def vector(value: float) -> jax.Array:
            return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))

        mixed = _mosaic.zeros((ROWS, self.size.width))
        return mixed, vector(LOWEST), vector(0), tuple(vector(0) for _ in range(2 if self.kind.shifted else 0))

    def _add(self, me: "_Worker", block: Any, carry: Any, masked: bool) -> Any:
        """Takes in a block of keys: (weighted values, maximum and sum of the weights, sums of the weights times scales
        and times minimums)."""
        size, kind, scratch = self.size, self.kind, self.scratch
        mixed, best, weight, offsets = carry
        tile, slot = (ROWS, size.block), lax.rem(block, STAGES)
        key = self.first + block * size.block
        known = self._visible(me.rows, key, tile) if masked else None

        def only_known(values: jax.Array, instead: float) -> jax.Array:
            return values if known is None else jnp.where(known, values, instead)

        plgpu.barrier_wait(scratch["k_ready"].at[slot])
        scores = self._scores(me.rows, slot, tile)
        plgpu.barrier_arrive(scratch["k_free"].at[slot])
        scores = only_known(scores, LOWEST)
        higher = jnp.maximum(best, scores.max(axis=1))
        keep = jnp.exp2(best - higher)
        weights = only_known(jnp.exp2(scores - lax.broadcast_in_dim(higher, tile, [0])), 0.0)
        weight = weight * keep + weights.sum(axis=1)

        plgpu.barrier_wait(scratch["v_ready"].at[slot])
        if kind.format is not None:
            scale, *minimum = self._numbers("v", slot, tile)
            by_minimum = [(weights * each).sum(axis=1) for each in minimum]
            weights = weights * scale
            if by_minimum:
                sums = weights.sum(axis=1), *by_minimum
                offsets = tuple(old * keep + new for old, new in zip(offsets, sums, strict=True))
        elif masked:
            pl.when(key + size.block > self.last + 1)(lambda: self._clear(me.index, key, slot))
        left: Any = weights.astype(kind.dtype)
        if kind.staged:
            scratch["staging"][me.index] = left
            plgpu.commit_smem()
            left = scratch["staging"].at[me.index]
        mixed = mixed * lax.broadcast_in_dim(keep, mixed.shape, [0])
        mixed = mixed + _mosaic.multiply([(left, scratch["v"].at[slot, :, self._mine(me)])], mixed.shape)
        plgpu.barrier_arrive(scratch["v_free"].at[slot])
        return mixed, higher, weight, offsets

    def _visible(self, wg: Any, key: Any, tile: tuple[int, int]) -> jax.Array:
        """Which slots of a block of keys the rows see."""
        size = self.size
        place = key + plgpu.broadcasted_iota(jnp.int32, tile, 1, layout=plgpu.Layout.WGMMA)
        position = self.begin + wg * size.tokens
        if size.tokens > 1:
            row = plgpu.broadcasted_iota(jnp.int32, tile, 0, layout=plgpu.Layout.WGMMA)
            position = position + lax.div(row, jnp.int32(size.group))
        known = place <= position
        return known if self.kind.window is None else known & (place > position - self.kind.window)

    def _scores(self, wg: Any, slot: Any, tile: tuple[int, int]) -> jax.Array:
        """Queries times keys, in units of log 2."""
        scores = _mosaic.multiply([(self.scratch["q"].at[wg], self.scratch["k"].at[slot].T)], tile)
        if self.kind.format is not None:
            scale, *minimum = self._numbers("k", slot, tile)
            if minimum:
                sums, shifts = (
                    _mosaic.along(self.sums.at[index, self.tile, self.head, wg], tile, 0) for index in range(2)
                )
                scores = (scores + shifts) * scale + sums * minimum[0]
            else:
                scores = scores * scale
        cap = self.kind.softcap
        return scores if cap is None else (cap * _mosaic.LOG2_E) * jnp.tanh(scores * (1 / cap))

    def _numbers(self, half: str, slot: Any, tile: tuple[int, int]) -> list[jax.Array]:
        """Scales, and minimums if there are any, of a block's slots, along the columns of a tile."""
        numbers = self.scratch[f"{half}_numbers"]
        return [_mosaic.along(numbers.at[index, slot], tile, 1) for index in range(self.kind.arrays - 1)]

    def _clear(self, wg: Any, key: Any, slot: Any) -> None:
        """Sets values past the context to 0: their weight is 0, but they may be NaN."""
        values = self.scratch["v"].at[slot]

        @pl.when(wg == 0)
        def _first() -> None:
            for row, column in itertools.product(
                range(0, self.size.block, ROWS), range(0, self.size.head_dim, self.size.width)
            ):
                rows, area = pl.ds(row, ROWS), pl.ds(column, self.size.width)
                stored = values[rows, area]
                place = key + row + plgpu.broadcasted_iota(jnp.int32, stored.shape, 0, layout=plgpu.Layout.WGMMA)
                values[rows, area] = jnp.where(place <= self.last, stored, jnp.zeros_like(stored))
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.scratch["cleared"])

        plgpu.barrier_wait(self.scratch["cleared"])

    def _mine(self, me: "_Worker") -> Any:
        """The components of the values that a warpgroup adds up."""
        width = self.size.width
        return pl.ds(pl.multiple_of(me.share * width, width) if self.size.shares > 1 else 0, width)

    def _store(self, me: "_Worker", mixed: Any, best: jax.Array, weight: jax.Array, offsets: Any) -> None:
        size, found = self.size, self._unshift(me, mixed, offsets)
        if size.split is None:
            (out,) = self.out
            share = lax.broadcast_in_dim(1 / jnp.where(weight > 0, weight, 1.0), found.shape, [0])
            out[self.tile, self.head, me.rows, :, self._mine(me)] = (found * share).astype(out.dtype)
            return
        out, highest, total = self.out

        def statistics() -> None:
            highest[self.tile, self.split, self.head] = best
            total[self.tile, self.split, self.head] = weight

        pl.when(me.share == 0)(statistics)
        self.scratch["out"][me.share] = found
        plgpu.commit_smem()
        rows = self.scratch["out"].at[me.share, pl.ds(0, size.rows)]
        plgpu.copy_smem_to_gmem(rows, out.at[self.tile, self.split, self.head, :, self._mine(me)])
        plgpu.wait_smem_to_gmem(0)

    def _unshift(self, me: "_Worker", mixed: jax.Array, offsets: Any) -> jax.Array:
        """Weighted values, of what was weighted codes."""
        parts = self.kind.parts
        if not parts:
            return mixed
        by_scale, by_minimum = (lax.broadcast_in_dim(each, mixed.shape, [0]) for each in offsets)
        first, *second = ((mixed * (1 / part.divisor) + by_scale * float(part.shift) + by_minimum) for part in parts)
        if not second:
            return first
        place = plgpu.broadcasted_iota(jnp.int32, mixed.shape, 1, layout=plgpu.Layout.WGMMA)
        place = place + me.share * self.size.width
        return jnp.where(place < self.size.head_dim // 2, first, second[0])


_LOADING, _CONVERTING = 40, 128
"""Registers of the copying warpgroup; the others share what it leaves of 512."""
