"""insert-paged-kv: attention over the step's own tokens becomes attention over a paged cache."""

import dataclasses
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import numpy as np

from jaxserve._compat import JaxprEqn, Var, spec_of, vars_of
from jaxserve.errors import UserError
from jaxserve.pallas_kernels import kv_write, paged_attention
from jaxserve.passes.graph import Graph, Input, Output, where
from jaxserve.passes.match import Match, NoMatch
from jaxserve.passes.pipeline import Context, KvGeometry, Pass, PassResult
from jaxserve.passes.rewrite import Rewriter, Values

ORDER = ("positions", "segments")
DTYPES = {"f32": "float32", "bf16": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class InsertPagedKv(Pass):
    """attention(q, k, v, positions, segments) becomes kv_write into two caches, then paged_attention over them.

    The caches of the i-th attention are the inputs `kv/i/k` and `kv/i/v` [pages, B, K, H] with B = `page`, donated and
    returned under the same names. New arguments: kv_slots [T], block_tables [S, P], query_starts [S+1] and
    context_lens [S]; `segments` is no longer read and goes.
    """

    name: ClassVar[str] = "insert-paged-kv"
    adds_outputs: ClassVar[bool] = True
    page: int = 16
    kv: Literal["f32", "bf16"] = "bf16"

    def __post_init__(self) -> None:
        if self.page < 1:
            raise UserError(f"pass {self.name}: option page={self.page}; allowed: 1 and more tokens a page")

    def run(self, graph: Graph, context: Context) -> PassResult:
        rewriter = Rewriter(graph)
        report: list[Match | NoMatch] = []
        attentions = [eqn for eqn in graph.eqns if eqn.primitive.name == "jaxserve.attention"]
        if not attentions:
            report.append(NoMatch("graph", "there is no attention op"))
        for index, eqn in enumerate(attentions):
            report.append(self._insert(rewriter, index, eqn, context.kv))
        return PassResult.of(rewriter, report)

    def _insert(self, rewriter: Rewriter, index: int, eqn: JaxprEqn, kv: KvGeometry) -> Match | NoMatch:
        q, k, v, *order = eqn.invars
        for name, entry in zip(ORDER, map(rewriter.graph.input_of, order), strict=True):
            if entry is None or entry.path != name:
                return NoMatch(where(eqn), f"its {name} are not the step's own, which the paged cache goes by")
        (tokens, _, _), (_, kv_heads, head_dim) = spec_of(q).shape, spec_of(k).shape
        cache = jax.ShapeDtypeStruct((kv.num_pages, self.page, kv_heads, head_dim), DTYPES[self.kv])
        caches = [rewriter.add_input(Input(f"kv/{index}/{name}", "cache", cache, "pages B K H")) for name in "kv"]
        slots, tables, starts, lens = _arguments(rewriter, tokens, kv)
        options = {key: eqn.params[key] for key in ("scale", "window", "softcap")}

        def paged(q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, *ragged: Any) -> tuple[Any, ...]:
            k_cache, v_cache = kv_write(k_cache, v_cache, k.astype(k_cache.dtype), v.astype(v_cache.dtype), slots)
            return paged_attention(q, k_cache, v_cache, *ragged, **options), k_cache, v_cache

        match = Match(where(eqn), tuple(eqn.invars), (eqn,), tuple(eqn.outvars), f"kv/{index} {list(cache.shape)}")
        examples = partial(_batch, self.page, kv, tokens, vars_of(eqn.invars), caches, (slots, tables, starts, lens))
        operands = [q, k, v, *caches, slots, tables, starts, lens]
        # A bf16 cache rounds K and V: 2^-8 of each.
        tolerance = 0.0 if cache.dtype == spec_of(q).dtype else 2.0**-7
        written = rewriter.replace(match, paged, operands, examples=examples, tolerance=tolerance)
        for name, var in zip("kv", written, strict=True):
            rewriter.add_output(Output(f"kv/{index}/{name}", cache, replaces=f"kv/{index}/{name}"), var)
        return match


def _arguments(rewriter: Rewriter, tokens: int, kv: KvGeometry) -> tuple[Var, ...]:
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "kv_slots": ((tokens,), "T"),
        "block_tables": ((kv.seqs, kv.pages_per_seq), "S P"),
        "query_starts": ((kv.seqs + 1,), "S+1"),
        "context_lens": ((kv.seqs,), "S"),
    }
    return tuple(
        rewriter.add_input(Input(name, "arg", jax.ShapeDtypeStruct(shape, "int32"), axes))
        for name, (shape, axes) in shapes.items()
    )


def _batch(
    page: int,
    kv: KvGeometry,
    tokens: int,
    operands: list[Var],
    caches: list[Var],
    arguments: tuple[Var, ...],
    rng: np.random.Generator,
    values: Values,
) -> tuple[Values, Values] | None:
    """The same ragged batch in both spellings: fresh sequences of nearly equal lengths on shuffled pages.

    None for a bucket of more tokens than its sequences can hold in the cache: another bucket is checked.
    """
    del values
    rows = min(kv.seqs, tokens)
    counts = np.array([tokens // rows + (row < tokens % rows) for row in range(rows)])
    needed = -(-counts // page)
    if needed.max() > kv.pages_per_seq or needed.sum() > kv.num_pages:
        return None
    positions = np.concatenate([np.arange(count) for count in counts]).astype(np.int32)
    segments = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    tables = np.zeros((kv.seqs, kv.pages_per_seq), np.int32)
    free = rng.permutation(kv.num_pages)
    for row, count in enumerate(needed):
        tables[row, :count], free = free[:count], free[count:]
    slots = tables[segments, positions // page] * page + positions % page
    padded = np.pad(counts, (0, kv.seqs - len(counts)))
    starts = np.concatenate([[0], np.cumsum(padded)]).astype(np.int32)
    old = {operands[3]: positions, operands[4]: segments}
    ragged = (slots, tables, starts, padded.astype(np.int32))
    new = {**old, **dict(zip(arguments, ragged, strict=True))}
    new |= {cache: rng.normal(size=spec_of(cache).shape) for cache in caches}
    return old, new
