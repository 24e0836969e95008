"""paged_attention: definition and shape rule. The XLA reference has a file of its own."""

from typing import Any

import jax
from jaxtyping import Array, Float, Int32

from jaxserve.pallas_kernels._axes import FLOATS, INT32, Axes
from jaxserve.pallas_kernels._op import Op, Operand, spec_like
from jaxserve.pallas_kernels.attention.op import check_options
from jaxserve.pallas_kernels.kv_write.format import Cache, KvFormat, halves, match_cache
from jaxserve.pallas_kernels.paged_attention.reference import reference


def shape_rule(
    *operands: Any,
    format: KvFormat | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    layer: int | None,
) -> jax.ShapeDtypeStruct:
    q, *caches, block_tables, query_starts, context_lens = operands
    axes, (k_cache, v_cache) = Axes("paged_attention"), halves(caches)
    axes.match("q", q, "T N H", FLOATS)
    match_cache(axes, "k_cache", k_cache, format, FLOATS, layer)
    match_cache(axes, "v_cache", v_cache, format, (caches[0].dtype,), layer)
    axes.match("block_tables", block_tables, "S P", INT32)
    axes.match("query_starts", query_starts, "S+1", INT32)
    axes.match("context_lens", context_lens, "S", INT32)
    check_options(axes, scale, window, softcap)
    return spec_like(q)


OP = Op("paged_attention", reference, shape_rule).publish()


def paged_attention(
    q: Float[Operand, "T N H"],
    k_cache: Cache,
    v_cache: Cache,
    block_tables: Int32[Operand, "S P"],
    query_starts: Int32[Operand, " S+1"],
    context_lens: Int32[Operand, " S"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    format: KvFormat | None = None,
    layer: int | None = None,
) -> Float[Array, "T N H"]:
    """Causal softmax attention of a ragged batch of sequences over keys and values in the paged cache.

    Row s owns the tokens query_starts[s] <= t < query_starts[s+1]; they are the last ones of its context_lens[s]
    tokens, so token t sits at position i = context_lens[s] - query_starts[s+1] + t. The key at position j of row s is
    k_cache[block_tables[s, j // B], j % B], values alike; those of the tokens themselves must be written already.
    Without a `format` a cache is one array [pages, B, K, H]; with one it is the tuple of the format's arrays, from
    which keys and values are computed in float32 (see `KvFormat`), a few pages at a time. With a `layer`, every array
    holds several layers' caches, [L, pages, B, K, H], and that one's is read.

    o[t,n] = sum_j softmax_j(cap(scale * q[t,n] . k[j, n // (N/K)])) v[j, n // (N/K)] over the j with 0 <= i - j
    (< `window` if given); cap(s) is softcap * tanh(s / softcap), or s. Computed in float32, rounded once to q's dtype.

    Tokens from query_starts[S] on are padding and give 0. Entries of a block table past the context may hold anything,
    and nothing of a page or slot outside the context reaches a result, not even NaN.
    Raises TypeError when shapes, dtypes, the number of arrays or the layer do not fit, N is no multiple of K, or an
    option is out of range.
    """
    return OP(
        q,
        *jax.tree.leaves((k_cache, v_cache)),
        block_tables,
        query_starts,
        context_lens,
        scale=float(scale),
        window=None if window is None else int(window),
        softcap=None if softcap is None else float(softcap),
        format=format,
        layer=layer,
    )
