"""paged_attention in plain JAX: online softmax over blocks of pages, so that neither time nor memory follows the pool.

Rows of one token (decoding) are computed together, one loop over the blocks of the longest of them. Rows of several
tokens (prefill chunks, verification) are cut into query tiles, and each tile loops over the blocks it can see.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.attention.op import cap
from jaxserve.pallas_kernels.kv_write.format import KvFormat, decode, halves

KEYS_PER_BLOCK = 128
TOKENS_PER_TILE = 32
_EXACT = jax.lax.Precision.HIGHEST
_LOWEST = -1e30  # a finite start for the running maximum: -inf minus -inf would be NaN


class _Options(NamedTuple):
    scale: float
    window: int | None
    softcap: float | None
    format: KvFormat | None


class _Softmax(NamedTuple):
    """Running maximum and sum of the weights [...], and the weighted sum of values [..., H]."""

    highest: Any
    total: Any
    mixed: Any

    @classmethod
    def start(cls, shape: tuple[int, ...], head_dim: int) -> "_Softmax":
        zeros = jnp.zeros(shape, jnp.float32)
        return cls(zeros + _LOWEST, zeros, jnp.zeros((*shape, head_dim), jnp.float32))

    def add(self, scores: Any, values: Any, equation: str) -> "_Softmax":
        """Takes in a block of scores [..., keys], -inf where a key is not visible."""
        highest = jnp.maximum(self.highest, scores.max(axis=-1))
        keep = jnp.exp(self.highest - highest)
        weights = jnp.exp(scores - highest[..., None])
        mixed = jnp.einsum(equation, weights, values, precision=_EXACT)
        return _Softmax(highest, self.total * keep + weights.sum(axis=-1), self.mixed * keep[..., None] + mixed)

    def result(self) -> Any:
        """The attention output; 0 where nothing was visible."""
        return self.mixed / jnp.where(self.total > 0, self.total, 1.0)[..., None]


def reference(
    *operands: Any,
    scale: float,
    window: int | None,
    softcap: float | None,
    format: KvFormat | None,
    layer: int | None,
) -> Any:
    q, *caches, block_tables, query_starts, context_lens = operands
    if layer is not None:
        block_tables = block_tables + layer * caches[0].shape[1]
        caches = [cache.reshape(-1, *cache.shape[2:]) for cache in caches]
    k_cache, v_cache = halves(caches)
    tokens, rows = q.shape[0], block_tables.shape[0]
    options = _Options(scale, window, softcap, format)
    counts = query_starts[1:] - query_starts[:-1]
    first_positions = context_lens - counts
    if tokens <= rows:
        # Pure decoding. Looking up each token's row keeps this right for any ragged batch, if slower than tiles.
        token = jnp.arange(tokens, dtype=jnp.int32)
        row = jnp.searchsorted(query_starts[1:], token, side="right").astype(jnp.int32)
        real = row < rows
        row = jnp.minimum(row, rows - 1)
        position = jnp.where(real, first_positions[row] + token - query_starts[row], -1)
        return _single_tokens(q, k_cache, v_cache, block_tables[row], position, options).astype(q.dtype)

    several = _tiles(q, k_cache, v_cache, block_tables, query_starts, first_positions, options)
    single = counts == 1
    token = jnp.where(single, query_starts[:-1], 0)
    position = jnp.where(single, first_positions, -1)
    alone = _single_tokens(q[token], k_cache, v_cache, block_tables, position, options).astype(q.dtype)
    return several.at[jnp.where(single, token, tokens)].set(alone, mode="drop")


def _gather(
    cache: Sequence[Any], format: KvFormat | None, tables: Any, first_page: Any, pages: int, highest_position: Any
) -> tuple[Any, Any]:
    """Keys or values of `pages` pages from `first_page` [R] on: float32 [R,J,K,H], positions [R,J]; J = pages*B.

    Slots past `highest_position` [R] come back as 0, whatever they and the table entries that lead there hold.
    """
    page_size = cache[0].shape[1]
    page = first_page[:, None] + jnp.arange(pages, dtype=jnp.int32)
    entries = jnp.take_along_axis(tables, page, axis=1, mode="clip")
    found = decode([jnp.take(array, entries, axis=0, mode="clip") for array in cache], format)
    found = found.reshape(len(entries), pages * page_size, *found.shape[3:])
    positions = first_page[:, None] * page_size + jnp.arange(pages * page_size, dtype=jnp.int32)
    known = positions <= highest_position[:, None]
    return jnp.where(known[:, :, None, None], found, 0.0), positions


def _first_page(position: Any, page_size: int, window: int | None) -> Any:
    """The first page that a token at `position` can see."""
    return jnp.zeros_like(position) if window is None else jnp.maximum(position - window + 1, 0) // page_size


def _visible(query: Any, key: Any, window: int | None) -> Any:
    """Whether the key's position can be seen from the query's."""
    distance = query - key
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def _single_tokens(q: Any, k_cache: Any, v_cache: Any, tables: Any, position: Any, options: _Options) -> Any:
    """Attention of R tokens q [R,N,H] with a block table each [R,P], at positions [R]; -1 gives 0. Float32 [R,N,H]."""
    rows, heads, head_dim = q.shape
    page_size, kv_heads = k_cache[0].shape[1:3]
    pages = max(1, min(KEYS_PER_BLOCK // page_size, tables.shape[1]))
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32) * options.scale
    first_page = _first_page(position, page_size, options.window)
    blocks = (position // page_size + 1 - first_page + pages - 1) // pages

    def add_block(block: Any, softmax: _Softmax) -> _Softmax:
        start = first_page + block * pages
        keys, key_position = _gather(k_cache, options.format, tables, start, pages, position)
        values, _ = _gather(v_cache, options.format, tables, start, pages, position)
        scores = cap(jnp.einsum("rkgh,rjkh->rkgj", grouped, keys, precision=_EXACT), options.softcap)
        visible = _visible(position[:, None], key_position, options.window)
        return softmax.add(jnp.where(visible[:, None, None], scores, -jnp.inf), values, "rkgj,rjkh->rkgh")

    start = _Softmax.start(grouped.shape[:3], head_dim)
    softmax = jax.lax.fori_loop(0, blocks.max(), add_block, start)
    return softmax.result().reshape(rows, heads, head_dim)


def _tiles(
    q: Any, k_cache: Any, v_cache: Any, tables: Any, query_starts: Any, first_positions: Any, options: _Options
) -> Any:
    """Attention of the rows that own several tokens, [T,N,H]; padding is 0, other rows hold nothing of use."""
    tokens, heads, head_dim = q.shape
    page_size, kv_heads = k_cache[0].shape[1:3]
    size = min(TOKENS_PER_TILE, tokens)
    pages = max(1, min(KEYS_PER_BLOCK // page_size, tables.shape[1]))
    counts = query_starts[1:] - query_starts[:-1]
    tiles_through = jnp.cumsum(jnp.where(counts > 1, (counts + size - 1) // size, 0))
    padded = jnp.pad(q, ((0, size), (0, 0), (0, 0)))
    offsets = jnp.arange(size, dtype=jnp.int32)

    def compute_tile(tile: Any, out: Any) -> Any:
        row = jnp.searchsorted(tiles_through, tile, side="right").astype(jnp.int32)
        tiles_before = jnp.where(row > 0, tiles_through[row - 1], 0)
        start = (tile - tiles_before) * size  # within the row
        real = start + offsets < counts[row]
        position = jnp.where(real, first_positions[row] + start + offsets, -1)
        queries = jax.lax.dynamic_slice_in_dim(padded, query_starts[row] + start, size)
        queries = queries.reshape(size, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32) * options.scale
        last = position.max()
        first_page = _first_page(position[:1], page_size, options.window)

        def add_block(block: Any, softmax: _Softmax) -> _Softmax:
            page = first_page + block * pages
            keys, key_position = _gather(k_cache, options.format, tables[row][None], page, pages, last[None])
            values, _ = _gather(v_cache, options.format, tables[row][None], page, pages, last[None])
            scores = cap(jnp.einsum("ikgh,jkh->kgij", queries, keys[0], precision=_EXACT), options.softcap)
            visible = _visible(position[:, None], key_position, options.window)
            return softmax.add(jnp.where(visible, scores, -jnp.inf), values[0], "kgij,jkh->kgih")

        blocks = (last // page_size + 1 - first_page[0] + pages - 1) // pages
        softmax = _Softmax.start((kv_heads, heads // kv_heads, size), head_dim)
        softmax = jax.lax.fori_loop(0, blocks, add_block, softmax)
        result = jnp.moveaxis(softmax.result(), 2, 0).reshape(size, heads, head_dim).astype(q.dtype)
        # A last tile reaches past its row: into rows that come later and overwrite it, or into padding, where it is 0.
        return jax.lax.dynamic_update_slice_in_dim(out, result, query_starts[row] + start, axis=0)

    out = jax.lax.fori_loop(0, tiles_through[-1], compute_tile, jnp.zeros_like(padded))
    return out[:tokens]
