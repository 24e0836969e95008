"""paged_attention on Hopper: a ragged batch as tiles of queries for `mosaic_body`'s Pallas call.

Rows of one token (decoding) are tiles of their own, and contexts are cut into parts with fixed borders that are joined
in their order (FlashDecoding), in mixed steps too: what a decoding sequence gets does not depend on its company. Rows
of several tokens (prefill, verification) are cut into tiles, each of which goes through all the keys that it sees.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels import _mosaic
from jaxserve.pallas_kernels._op import Refusal
from jaxserve.pallas_kernels._target import not_hopper
from jaxserve.pallas_kernels.kv_write.format import KvFormat
from jaxserve.pallas_kernels.paged_attention.mosaic_body import call
from jaxserve.pallas_kernels.paged_attention.mosaic_sizes import ROWS, VALUES, Kind, Shape

SPLIT = 512
HEAD_DIMS = (64, 96, 128, 256)
PAGE_SIZES = (8, 16, 32, 64, 128)
DTYPES = {"uint8": jnp.dtype(jnp.bfloat16), "float8_e4m3fn": jnp.dtype(jnp.float16)}
"""Of what codes become: exact, and the one to which Hopper converts them."""


class _Batch(NamedTuple):
    """Tables [S, P], and of every row its first token, number of tokens and context."""

    tables: Any
    starts: Any
    counts: Any
    lengths: Any


def kernel(
    q: Any,
    *operands: Any,
    scale: float,
    window: int | None,
    softcap: float | None,
    format: KvFormat | None,
    layer: int | None,
    stage_lhs_in_smem: bool = False,
) -> Callable[..., jax.Array] | Refusal:
    """The kernel for this call, or why there is none. `stage_lhs_in_smem`: see quantized_matmul's."""
    if reason := not_hopper() or _unsupported(q, operands, format):
        return Refusal(reason)
    dtype = operands[0].dtype if format is None else DTYPES[format.element]
    kind = Kind(dtype, softcap, window, layer, format, stage_lhs_in_smem)
    rows = operands[-3].shape[0]

    def mosaic(q: jax.Array, *operands: Any) -> jax.Array:
        *caches, tables, starts, lengths = operands
        counts = starts[1:] - starts[:-1]
        batch, tokens = _Batch(tables, starts[:-1], counts, lengths), q.shape[0]
        # Units of log 2; a softcap comes before them.
        wide = q.astype(jnp.float32) * (scale if softcap is not None else scale * _mosaic.LOG2_E)
        if tokens <= rows:
            token = jnp.arange(tokens, dtype=jnp.int32)
            row = jnp.minimum(jnp.searchsorted(starts[1:], token, side="right"), rows - 1)
            position = jnp.where(token < starts[rows], lengths[row] - counts[row] + token - batch.starts[row], -1)
            return _single_tokens(wide, caches, tables[row], position, kind).astype(q.dtype)
        several = _tiles(wide, caches, batch, kind, q.dtype)
        single = counts == 1
        token = jnp.where(single, batch.starts, 0)
        alone = _single_tokens(wide[token], caches, tables, jnp.where(single, lengths - 1, -1), kind)
        return several.at[jnp.where(single, token, tokens)].set(alone.astype(q.dtype), mode="drop")

    return mosaic


def _unsupported(q: Any, operands: Sequence[Any], format: KvFormat | None) -> str:
    _, heads, head_dim = q.shape
    codes = operands[0]
    page_size, kv_heads = codes.shape[-3:-1]
    if format is None and codes.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the cache is {codes.dtype.name}; it knows bfloat16, float16 and formats of few bits"
    if head_dim not in HEAD_DIMS or heads // kv_heads > ROWS:
        return (
            f"{heads // kv_heads} query heads of {head_dim} a KV head; it knows up to {ROWS}, of {_listed(HEAD_DIMS)}"
        )
    if page_size not in PAGE_SIZES:
        return f"pages of {page_size} tokens; it knows {_listed(PAGE_SIZES)}"
    if format is not None and head_dim > VALUES:
        return (
            f"heads of {head_dim} in {format}; of codes it knows up to {VALUES}, for shared memory holds no wider tiles"
        )
    if format is not None and head_dim % 64 and format.per_byte > 1:
        return f"heads of {head_dim} in {format}; it knows 64 and 128"
    if format is not None and (kv_heads % 8 or page_size * kv_heads < 64):
        return f"scales of {kv_heads} KV heads; they are copied in rows of a multiple of 8"
    return ""


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _single_tokens(q: Any, caches: Sequence[Any], tables: Any, position: Any, kind: Kind) -> Any:
    """Attention of R tokens q [R,N,H] with a block table each [R,P], at positions [R]; -1 gives 0. Float32 [R,N,H]."""
    size = _shape(q, caches, tables, q.shape[0], kind, tokens=1, warpgroups=1, split=SPLIT)
    rows = jnp.arange(size.tiles, dtype=jnp.int32)
    grouped = q.reshape(size.tiles, size.kv_heads, 1, size.group, size.head_dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, 0), (0, size.rows - size.group), (0, 0)))
    spans = jnp.stack([rows, position, position], axis=1).astype(jnp.int32)
    mixed, highest, total = _run(size, kind, jnp.float32, grouped, caches, tables, spans)
    joined = _join(mixed[..., : size.group, :], highest[..., : size.group], total[..., : size.group])
    return _in_order(joined, kind).reshape(q.shape)


def _tiles(q: Any, caches: Sequence[Any], batch: _Batch, kind: Kind, dtype: Any) -> Any:
    """Attention of the rows that own several tokens, [T,N,H]; padding is 0, other rows hold nothing of use."""
    tokens, rows = len(q), len(batch.counts)
    each = ROWS // (q.shape[1] // caches[0].shape[-2])  # tokens of a warpgroup
    # A warpgroup computes the same whether another shares its keys or not; two are for rows that fill them.
    # Heads that two warpgroups share leave no registers for more.
    warpgroups = 2 if tokens >= rows * each * 2 and q.shape[2] <= VALUES else 1
    each_tile = each * warpgroups
    most = max(1, (tokens + min(rows, tokens // 2) * (each_tile - 1)) // each_tile)
    size = _shape(q, caches, batch.tables, most, kind, tokens=each, warpgroups=warpgroups, split=None)

    own = jnp.where(batch.counts > 1, (batch.counts + each_tile - 1) // each_tile, 0)
    through = jnp.cumsum(own)
    before, tile = through - own, jnp.arange(most, dtype=jnp.int32)
    row = jnp.searchsorted(through, tile, side="right").astype(jnp.int32)
    used, row = row < rows, jnp.minimum(row, rows - 1)
    start = (tile - before[row]) * each_tile  # within the row
    begin = batch.lengths[row] - batch.counts[row] + start
    last = jnp.minimum(begin + each_tile, batch.lengths[row]) - 1
    spans = jnp.stack([row, begin, jnp.where(used, last, -1)], axis=1).astype(jnp.int32)

    places = batch.starts[row] + start
    taken = jnp.take(q, places[:, None] + jnp.arange(each_tile, dtype=jnp.int32), axis=0, mode="clip")
    taken = taken.reshape(most, warpgroups, each, size.kv_heads, size.group, size.head_dim)
    taken = taken.transpose(0, 3, 1, 2, 4, 5).reshape(most, size.kv_heads, warpgroups, -1, size.head_dim)
    taken = jnp.pad(taken, ((0, 0), (0, 0), (0, 0), (0, ROWS - each * size.group), (0, 0)))
    found = _run(size, kind, dtype, taken, caches, batch.tables, spans)[..., : each * size.group, :]
    found = _in_order(found, kind).reshape(most, size.kv_heads, warpgroups, each, size.group, size.head_dim)
    found = found.transpose(0, 2, 3, 1, 4, 5).reshape(-1, *q.shape[1:])

    token = jnp.arange(tokens, dtype=jnp.int32)
    of_token = jnp.searchsorted(batch.starts + batch.counts, token, side="right").astype(jnp.int32)
    real, of_token = of_token < rows, jnp.minimum(of_token, rows - 1)
    place = before[of_token] * each_tile + token - batch.starts[of_token]
    return jnp.where(real[:, None, None], jnp.take(found, place, axis=0, mode="clip"), 0)


def _shape(q: Any, caches: Sequence[Any], tables: Any, tiles: int, kind: Kind, **parts: Any) -> Shape:
    """`parts` are the tokens of a warpgroup, warpgroups, and split of a `Shape`."""
    page_size, kv_heads = caches[0].shape[-3:-1]
    heads, head_dim = q.shape[1:]
    # Wide blocks where registers and shared memory hold them.
    wide = parts["split"] is None and kind.format is None and kind.softcap is None and head_dim <= VALUES
    return Shape(
        tiles=tiles,
        group=heads // kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        pages_per_seq=tables.shape[1],
        block=128 if wide else 64,
        **parts,
    )


def _run(size: Shape, kind: Kind, out_dtype: Any, q: Any, caches: Sequence[Any], tables: Any, spans: Any) -> Any:
    """The Pallas call on queries [tiles, K, warpgroups, rows, H] in float32."""
    q, sums = _queries(q, kind)
    if sums is not None:
        sums = (jnp.pad(sums, ((0, 0),) * 4 + ((0, ROWS - size.rows),)),)
    return call(size, kind, out_dtype)(q, *(sums or ()), *caches, tables, spans)


def _queries(q: Any, kind: Kind) -> tuple[Any, Any]:
    """Queries [..., H] as they are multiplied with codes, and the sums of q and of q times the shifts, [2, ...]."""
    if not kind.parts:
        return q.astype(kind.dtype), None
    lanes = [q[..., index :: len(kind.parts)].astype(kind.dtype) for index in range(len(kind.parts))]
    wide = [lane.astype(jnp.float32).sum(axis=-1) for lane in lanes]
    shifted = sum(lane * part.shift for lane, part in zip(wide, kind.parts, strict=True))
    scaled = [lane / jnp.asarray(part.divisor, kind.dtype) for lane, part in zip(lanes, kind.parts, strict=True)]
    return jnp.concatenate(scaled, axis=-1), jnp.stack([sum(wide), shifted])


def _in_order(found: Any, kind: Kind) -> Any:
    """Results [..., H] in the order of their components."""
    parts = max(1, len(kind.parts))
    return found.reshape(*found.shape[:-1], parts, -1).swapaxes(-1, -2).reshape(found.shape)


def _join(mixed: jax.Array, highest: jax.Array, total: jax.Array) -> jax.Array:
    """The softmax over all parts [T, splits, K, G(, H)] of a context, in their order; 0 where nothing was seen."""
    best = highest.max(axis=1)
    out, weight = jnp.zeros_like(mixed[:, 0]), jnp.zeros_like(best)
    for part in range(mixed.shape[1]):
        share = jnp.where(total[:, part] > 0, jnp.exp2(highest[:, part] - best), 0.0)
        weight = weight + share * total[:, part]
        out = out + jnp.where(share[..., None] > 0, mixed[:, part] * share[..., None], 0.0)
    return out / jnp.where(weight > 0, weight, 1.0)[..., None]
