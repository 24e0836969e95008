"""fuse-rope: cutting a fused product into q, k and v, and turning the first two, becomes one op."""

import dataclasses
from functools import partial
from typing import ClassVar

from jaxserve._compat import Atom, JaxprEqn, Var, spec_of
from jaxserve.pallas_kernels import rope_qkv
from jaxserve.passes.graph import Graph, where
from jaxserve.passes.match import Match, NoMatch
from jaxserve.passes.pipeline import Context, Pass, PassResult
from jaxserve.passes.rewrite import Rewriter

ROPE, ATTENTION = "jaxserve.rope", "jaxserve.attention"


@dataclasses.dataclass(frozen=True)
class FuseRope(Pass):
    """rope(q), rope(k) and v become rope_qkv of the array in which q, k and v lie side by side (fuse-qkv makes it).

    They are found from the attention op backwards; q and k must be turned alike. The native CPU kernel reads a row once
    and finds its cosines and sines once, where XLA has a loop for each of the three.
    """

    name: ClassVar[str] = "fuse-rope"
    platform: ClassVar[str | None] = "cpu"

    def run(self, graph: Graph, context: Context) -> PassResult:
        del context
        rewriter = Rewriter(graph)
        report = [_fuse(rewriter, eqn) for eqn in graph.eqns if eqn.primitive.name == ATTENTION]
        return PassResult.of(rewriter, report)


def _fuse(rewriter: Rewriter, attention: JaxprEqn) -> Match | NoMatch:
    """Replaces what an attention reads, or says why not."""
    graph, refuse = rewriter.graph, partial(NoMatch, where(attention))
    results = tuple(atom for atom in attention.invars[:3] if isinstance(atom, Var))
    ropes = [eqn for eqn in map(graph.producer, results[:2]) if eqn is not None and eqn.primitive.name == ROPE]
    if len(ropes) < 2 or len(results) < 3:
        return refuse("q or k is not turned")
    if ropes[0].params != ropes[1].params or ropes[0].invars[1] is not ropes[1].invars[1]:
        return refuse("q and k are turned by different angles")
    if any(rewriter.is_replaced(var) for var in results):
        return refuse("another attention reads the same q, k or v")
    parts = [_part(graph, atom) for atom in (ropes[0].invars[0], ropes[1].invars[0], results[2])]
    cuts = [part[0] for part in parts if part]
    if len(cuts) < 3:
        return refuse("q, k or v is no part of a wider array")
    product, bounds = cuts[0].invars[0], [0]
    for cut in cuts:
        (_, start), (_, end) = cut.params["start_indices"], cut.params["limit_indices"]
        if cut.invars[0] is not product or start != bounds[-1]:
            return refuse("q, k and v do not lie side by side in one array")
        bounds.append(end)
    if bounds[-1] != spec_of(product).shape[1]:
        return refuse("q, k and v are not all of the array in which they lie")
    (_, heads, width), (_, kv_heads, _) = (spec_of(var).shape for var in results[:2])
    eqns = (*(eqn for part in parts if part for eqn in part), *ropes)
    operands, note = (product, ropes[0].invars[1]), f"{heads} + 2 * {kv_heads} heads of {width}"
    match = Match(where(ropes[0]), operands, eqns, results, note)
    new = partial(rope_qkv, spec=ropes[0].params["spec"], heads=heads, kv_heads=kv_heads)
    rewriter.replace(match, new, operands)
    return match


def _part(graph: Graph, atom: Atom) -> tuple[JaxprEqn, JaxprEqn] | None:
    """The slice of all rows of an array and the reshape into heads that `atom` is, or None."""
    heads = graph.producer(atom)
    cut = graph.producer(heads.invars[0]) if heads is not None and heads.primitive.name == "reshape" else None
    if heads is None or cut is None or cut.primitive.name != "slice":
        return None
    rows, (given, *_) = spec_of(cut.outvars[0]).shape[0], spec_of(cut.invars[0]).shape
    return (cut, heads) if rows == given == spec_of(atom).shape[0] else None
