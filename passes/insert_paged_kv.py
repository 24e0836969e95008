"""insert-paged-kv: attention over the step's own tokens becomes attention over a paged cache."""

import dataclasses
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve._compat import Atom, JaxprEqn, Var, spec_of, vars_of
from jaxserve.errors import UserError
from jaxserve.pallas_kernels import KV_FORMATS, KvFormat, kv_write, paged_attention
from jaxserve.pallas_kernels.kv_write.format import cache_layout, halves
from jaxserve.passes.graph import Graph, Input, Output, where
from jaxserve.passes.match import Match, NoMatch
from jaxserve.passes.pipeline import Context, KvGeometry, Pass, PassResult
from jaxserve.passes.rewrite import Rewriter, Values

ORDER = ("positions", "segments")
DTYPES = {"f32": "float32", "bf16": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class InsertPagedKv(Pass):
    """attention(q, k, v, positions, segments) becomes kv_write into two caches, then paged_attention over them.

    The caches of all layers are the inputs `kv/0/k` and `kv/0/v` [L, pages, B, K, H] with B = `page`, which one layer
    after the other writes, donated and returned under the same names; layers whose heads differ in number or size have
    caches `kv/1/k` and so on of their own. Few large arrays: what the host pays for a step goes by the number of arrays
    it hands over. With kv = int8, int4 or fp8 those hold codes, and `kv/0/k_scale` and so on [L, pages, B, K] the other
    arrays of the `KvFormat`. New arguments: kv_slots [T], block_tables [S, P], query_starts [S+1] and context_lens [S];
    `segments` is no longer read and goes.
    """

    name: ClassVar[str] = "insert-paged-kv"
    adds_outputs: ClassVar[bool] = True
    page: int = 16
    kv: Literal["f32", "bf16", "int8", "int4", "fp8"] = "bf16"

    def __post_init__(self) -> None:
        if self.page < 1:
            raise UserError(f"pass {self.name}: option page={self.page}; allowed: 1 and more tokens a page")

    @property
    def format(self) -> KvFormat | None:
        """How keys and values are quantized, if they are."""
        return KV_FORMATS.get(self.kv)

    def run(self, graph: Graph, context: Context) -> PassResult:
        rewriter = Rewriter(graph)
        report: list[Match | NoMatch] = []
        attentions = [eqn for eqn in graph.eqns if eqn.primitive.name == "jaxserve.attention"]
        if not attentions:
            report.append(NoMatch("graph", "there is no attention op"))
        pools: dict[tuple[int, ...], list[JaxprEqn]] = {}
        for eqn in attentions:
            refusal = self._refusal(rewriter.graph, eqn)
            if refusal is not None:
                report.append(refusal)
            else:
                pools.setdefault(spec_of(eqn.invars[1]).shape[1:], []).append(eqn)
        for index, (heads, eqns) in enumerate(pools.items()):
            entries = self._caches(index, context.kv.num_pages, self.page, *heads, len(eqns))
            caches: list[Atom] = list(map(rewriter.add_input, entries))
            for layer, eqn in enumerate(eqns):
                match, caches = self._insert(rewriter, layer, eqn, caches, context.kv)
                report.append(match)
            for entry, written in zip(entries, caches, strict=True):
                rewriter.add_output(Output(entry.path, entry.aval, replaces=entry.path), written)
        return PassResult.of(rewriter, report)

    def _refusal(self, graph: Graph, eqn: JaxprEqn) -> NoMatch | None:
        """Why an attention cannot go through the cache; UserError if that is for an option."""
        for name, entry in zip(ORDER, map(graph.input_of, eqn.invars[3:]), strict=True):
            if entry is None or entry.path != name:
                return NoMatch(where(eqn), f"its {name} are not the step's own, which the paged cache goes by")
        head_dim = spec_of(eqn.invars[1]).shape[2]
        if self.format and head_dim % self.format.per_byte:
            raise UserError(
                f"pass {self.name}: option kv={self.kv} keeps two components of a head in a byte, and the heads of "
                f"{where(eqn)} have {head_dim}; allowed: f32, bf16, int8, fp8"
            )
        return None

    def _insert(
        self, rewriter: Rewriter, layer: int, eqn: JaxprEqn, caches: list[Atom], kv: KvGeometry
    ) -> tuple[Match, list[Atom]]:
        """Puts an attention over `layer` of the caches as the layer before left them; the caches after it."""
        q, k, v, *_ = eqn.invars
        arguments = _arguments(rewriter, spec_of(q).shape[0], kv)
        options = {key: eqn.params[key] for key in ("scale", "window", "softcap")}
        place = {"format": self.format, "layer": layer}

        def paged(q: Any, k: Any, v: Any, *operands: Any) -> tuple[Any, ...]:
            *arrays, slots, tables, starts, lens = operands
            keys, values = map(tuple, halves(arrays))
            keys, values = kv_write(keys, values, k, v, slots, **place)
            return paged_attention(q, keys, values, tables, starts, lens, **place, **options), *keys, *values

        detail = f"{self.kv} {list(spec_of(caches[0]).shape)}[{layer}]"
        match = Match(where(eqn), tuple(eqn.invars), (eqn,), tuple(eqn.outvars), detail)
        examples = partial(_batch, self.page, kv, vars_of(eqn.invars), vars_of(caches), arguments)
        operands, tolerance = [q, k, v, *caches, *arguments], self._tolerance(spec_of(q).dtype)
        written = rewriter.replace(match, paged, operands, examples=examples, tolerance=tolerance)
        return match, list(written)

    def _caches(self, index: int, *sizes: int) -> list[Input]:
        """The arrays of the keys of a pool of layers, then those of its values."""
        layout = cache_layout(self.format, DTYPES.get(self.kv), *sizes)
        return [
            Input(f"kv/{index}/{side}{name and '_'}{name}", "cache", spec, axes)
            for side in "kv"
            for name, (axes, spec) in layout.items()
        ]

    def _tolerance(self, dtype: np.dtype) -> float:
        """How far the attention of activations of `dtype` may move: a bf16 cache rounds K and V to 2^-8 of each."""
        if self.format:
            return 2 * self.format.error
        return 0.0 if dtype == DTYPES[self.kv] else 2.0**-7


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
    operands: list[Var],
    caches: list[Var],
    arguments: tuple[Var, ...],
    rng: np.random.Generator,
    values: Values,
) -> tuple[Values, Values] | None:
    """The same ragged batch in both spellings: fresh sequences of nearly equal lengths on shuffled pages. Slots that
    nobody has written hold NaN or any code. The pool has no more pages than twice what the batch fills: one for a card
    would not fit into the memory of the machine that compiles.

    None for a bucket of more tokens than its sequences can hold in the cache: another bucket is checked.
    """
    del values
    tokens = spec_of(operands[0]).shape[0]
    rows = min(kv.seqs, tokens)
    counts = np.array([tokens // rows + (row < tokens % rows) for row in range(rows)])
    needed = -(-counts // page)
    if needed.max() > kv.pages_per_seq or needed.sum() > kv.num_pages:
        return None
    positions = np.concatenate([np.arange(count) for count in counts]).astype(np.int32)
    segments = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    tables = np.zeros((kv.seqs, kv.pages_per_seq), np.int32)
    pages = min(kv.num_pages, 2 * int(needed.sum()))
    free = rng.permutation(pages)
    for row, count in enumerate(needed):
        tables[row, :count], free = free[:count], free[count:]
    slots = tables[segments, positions // page] * page + positions % page
    padded = np.pad(counts, (0, kv.seqs - len(counts)))
    starts = np.concatenate([[0], np.cumsum(padded)]).astype(np.int32)
    old = {operands[3]: positions, operands[4]: segments}
    ragged = (slots, tables, starts, padded.astype(np.int32))
    new = {**old, **dict(zip(arguments, ragged, strict=True))}
    new |= {cache: _unwritten(spec_of(cache), pages) for cache in caches}
    return old, new


def _unwritten(cache: jax.ShapeDtypeStruct, pages: int) -> np.ndarray:
    layers, _, *rest = cache.shape
    return np.full((layers, pages, *rest), np.nan if jnp.issubdtype(cache.dtype, jnp.floating) else 255)
