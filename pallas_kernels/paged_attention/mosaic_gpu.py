"""paged_attention on Hopper for decoding, over a cache of bf16 or f16.

One block takes a sequence, a KV head with the query heads that share it, and SPLIT keys of the context. The query heads
are the rows of wgmma's tile, the keys of KEYS_PER_BLOCK slots its columns; pages are copied as the block table names
them, ahead of their use. Softmax runs online in float32 (FlashAttention, arXiv:2205.14135), its weights are rounded to
the cache's dtype for the product with the values, and so are the queries. The parts of a context have fixed borders and
are joined in their order (FlashDecoding), so that a token's result does not depend on its company.
"""

import dataclasses
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
from jaxserve.pallas_kernels.kv_write.format import KvFormat

KEYS_PER_BLOCK = 64
SPLIT = 512
STAGES = 2
ROWS = _mosaic.WARPGROUP_ROWS
_LOWEST = -1e30  # a finite start for the running maximum: -inf minus -inf would be NaN
_LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a call. `group` is the number of query heads of a KV head, padded to whole tiles of 8."""

    tokens: int
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    pages_per_seq: int

    @property
    def splits(self) -> int:
        return -(-self.pages_per_seq * self.page_size // SPLIT)

    @property
    def pages(self) -> int:
        """Pages of a block of keys."""
        return KEYS_PER_BLOCK // self.page_size


def kernel(
    q: Any,
    k: Any,
    *rest: Any,
    scale: float,
    window: int | None,
    softcap: float | None,
    format: KvFormat | None,
    layer: int | None,
    stage_lhs_in_smem: bool = False,
) -> Callable[..., jax.Array] | Refusal:
    """The kernel for this call, or why there is none. `stage_lhs_in_smem`: see quantized_matmul's."""
    if reason := not_hopper() or _unsupported(q, k, rest, format):
        return Refusal(reason)
    tokens, heads, head_dim = q.shape
    page_size, kv_heads = k.shape[-3:-1]
    shared = heads // kv_heads
    size = Shape(tokens, kv_heads, -(-shared // 8) * 8, head_dim, page_size, rest[1].shape[1])
    call = _call(size, k.dtype, window, softcap, layer, stage_lhs_in_smem)

    def mosaic(q: jax.Array, k: jax.Array, v: jax.Array, tables: Any, starts: Any, lengths: Any) -> jax.Array:
        rows, token = len(tables), jnp.arange(tokens, dtype=jnp.int32)
        row = jnp.minimum(jnp.searchsorted(starts[1:], token, side="right"), rows - 1)
        after = starts[row + 1] - token - 1  # tokens of the row behind this one
        seen = jnp.where(token < starts[rows], lengths[row] - after, 0).astype(jnp.int32)
        grouped = (q.astype(jnp.float32) * scale).astype(k.dtype).reshape(tokens, kv_heads, shared, head_dim)
        grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, size.group - shared), (0, 0)))
        mixed, highest, total = call(grouped, k, v, tables[row], seen)
        joined = _join(mixed[..., :shared, :], highest[..., :shared], total[..., :shared])
        return joined.reshape(q.shape).astype(q.dtype)

    return mosaic


def _unsupported(q: Any, k: Any, rest: Any, format: KvFormat | None) -> str:
    tokens, heads, head_dim = q.shape
    page_size, kv_heads = k.shape[-3:-1]
    if format is not None:
        return f"the cache is kept in {format}; it knows caches of bfloat16 and float16"
    if k.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the cache is {k.dtype.name}; it knows bfloat16 and float16"
    if tokens > rest[1].shape[0]:
        return f"{tokens} tokens of {rest[1].shape[0]} sequences; it decodes, one token a sequence"
    if head_dim not in (64, 128, 256) or heads // kv_heads > ROWS:
        return f"{heads // kv_heads} query heads of {head_dim} a KV head; it knows up to {ROWS}, of 64, 128 or 256"
    if page_size not in (8, 16, 32, 64):
        return f"pages of {page_size} tokens; it knows 8, 16, 32 and 64"
    return ""


def _join(mixed: jax.Array, highest: jax.Array, total: jax.Array) -> jax.Array:
    """The softmax over all parts [T, splits, K, G(, H)] of a context, in their order; 0 where nothing was seen."""
    best = highest.max(axis=1)
    out, weight = jnp.zeros_like(mixed[:, 0]), jnp.zeros_like(best)
    for part in range(mixed.shape[1]):
        share = jnp.where(total[:, part] > 0, jnp.exp2(highest[:, part] - best), 0.0)
        weight = weight + share * total[:, part]
        out = out + jnp.where(share[..., None] > 0, mixed[:, part] * share[..., None], 0.0)
    return out / jnp.where(weight > 0, weight, 1.0)[..., None]


def _call(
    size: Shape, dtype: Any, window: int | None, softcap: float | None, layer: int | None, staged: bool
) -> Callable[..., Any]:
    """The Pallas call: (q [T, K, group, H], k, v, tables [T, P], seen [T]) -> weighted values [T, splits, K, group, H],
    maxima and sums of the weights [T, splits, K, ROWS], all float32; scores are in units of log 2."""
    heads_layout = _mosaic.swizzled(size.head_dim, dtype)
    vector = plgpu.Layout.WGMMA.reduce(1)
    scores_tile, values_tile = (ROWS, KEYS_PER_BLOCK), (ROWS, size.head_dim)

    def paged_decode(q: Any, k: Any, v: Any, tables: Any, seen: Any, mixed: Any, highest: Any, total: Any, **scratch):
        q_smem, k_smem, v_smem, out_smem = (scratch[name] for name in ("q_smem", "k_smem", "v_smem", "out_smem"))
        token, head, split = (lax.axis_index(name) for name in ("token", "head", "split"))
        if layer is not None:
            k, v = k.at[layer], v.at[layer]
        length = seen[token]
        start = 0 if window is None else jnp.maximum(length - window, 0)
        first = jnp.maximum(split * SPLIT, lax.div(start, KEYS_PER_BLOCK) * KEYS_PER_BLOCK)
        keys = jnp.maximum(jnp.minimum(length, (split + 1) * SPLIT) - first, 0)
        blocks = lax.div(keys + KEYS_PER_BLOCK - 1, KEYS_PER_BLOCK)

        def fetch(block: Any) -> None:
            slot = lax.rem(block, STAGES)
            for index in range(size.pages):
                page = lax.div(first, size.page_size) + block * size.pages + index
                page = jnp.minimum(page, lax.div(length - 1, size.page_size))  # past the context entries mean nothing
                entry, place = tables[token, page], pl.ds(index * size.page_size, size.page_size)
                for cache, smem, barrier in ((k, k_smem, scratch["k_ready"]), (v, v_smem, scratch["v_ready"])):
                    plgpu.copy_gmem_to_smem(cache.at[entry, :, head], smem.at[slot, place], barrier.at[slot])

        @pl.when(blocks > 0)
        def _start():
            plgpu.copy_gmem_to_smem(q.at[token, head], q_smem.at[pl.ds(0, size.group)], scratch["q_ready"])
            plgpu.barrier_wait(scratch["q_ready"])

        for ahead in range(STAGES - 1):
            pl.when(ahead < blocks)(lambda ahead=ahead: fetch(ahead))

        def add_block(block: Any, carry: Any) -> Any:
            acc, best, weight = carry
            slot = lax.rem(block, STAGES)
            pl.when(block + STAGES - 1 < blocks)(lambda: fetch(block + STAGES - 1))
            plgpu.barrier_wait(scratch["k_ready"].at[slot])
            scores = _mosaic.multiply([(q_smem, k_smem.at[slot].T)], scores_tile)
            if softcap is not None:
                scores = softcap * jnp.tanh(scores * (1 / softcap))
            key = first + block * KEYS_PER_BLOCK
            place = key + plgpu.broadcasted_iota(jnp.int32, scores_tile, 1, layout=plgpu.Layout.WGMMA)
            known = place < length if window is None else (place < length) & (place >= length - window)
            scores = jnp.where(known, scores * _LOG2_E, _LOWEST)
            higher = jnp.maximum(best, scores.max(axis=1))
            keep = jnp.exp2(best - higher)
            weights = jnp.where(known, jnp.exp2(scores - lax.broadcast_in_dim(higher, scores_tile, [0])), 0.0)
            weight = weight * keep + weights.sum(axis=1)
            acc = acc * lax.broadcast_in_dim(keep, values_tile, [0])
            plgpu.barrier_wait(scratch["v_ready"].at[slot])

            @pl.when(key + KEYS_PER_BLOCK > length)
            def _forget():  # slots past the context may hold NaN
                values = v_smem[slot].astype(jnp.float32)
                row = key + plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
                v_smem[slot] = jnp.where(row < length, values, 0.0).astype(dtype)
                plgpu.commit_smem()

            left = weights.astype(dtype)
            if staged:
                scratch["staging"][...] = left
                plgpu.commit_smem()
                left = scratch["staging"]

            return acc + _mosaic.multiply([(left, v_smem.at[slot])], values_tile), higher, weight

        start_vector = plgpu.layout_cast(jnp.full((ROWS,), _LOWEST, jnp.float32), vector)
        carry = (_mosaic.zeros(values_tile), start_vector, plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), vector))
        acc, best, weight = lax.fori_loop(0, blocks, add_block, carry)
        highest[token, split, head] = best
        total[token, split, head] = weight
        out_smem[...] = acc
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, size.group)], mixed.at[token, split, head])
        plgpu.wait_smem_to_gmem(0)

    cache = plgpu.SMEM((STAGES, KEYS_PER_BLOCK, size.head_dim), dtype, transforms=heads_layout)
    ready = plgpu.Barrier(num_arrivals=size.pages, num_barriers=STAGES)
    scratch = {
        "q_smem": plgpu.SMEM((ROWS, size.head_dim), dtype, transforms=heads_layout),
        "k_smem": cache,
        "v_smem": cache,
        "out_smem": plgpu.SMEM(values_tile, jnp.float32, transforms=_mosaic.swizzled(size.head_dim, jnp.float32)),
        "q_ready": plgpu.Barrier(),
        "k_ready": ready,
        "v_ready": ready,
    }
    if staged:
        scratch["staging"] = plgpu.SMEM(scores_tile, dtype, transforms=_mosaic.swizzled(KEYS_PER_BLOCK, dtype))
    parts = (size.tokens, size.splits, size.kv_heads)
    statistics = jax.ShapeDtypeStruct((*parts, ROWS), jnp.float32)
    return plgpu.kernel(
        paged_decode,
        out_type=(jax.ShapeDtypeStruct((*parts, size.group, size.head_dim), jnp.float32), statistics, statistics),
        grid=(size.tokens, size.kv_heads, size.splits),
        grid_names=("token", "head", "split"),
        scratch_types=scratch,
    )
