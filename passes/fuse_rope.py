"""fuse-rope: cutting a fused product into q, k and v, adding biases, and turning q and k becomes one op."""

import dataclasses
from functools import partial
from typing import ClassVar

from jaxserve._compat import Atom, JaxprEqn, Var, spec_of
from jaxserve.pallas_kernels import rope_qkv
from jaxserve.passes.graph import Graph, where
from jaxserve.passes.match import Match, NoMatch
from jaxserve.passes.pipeline import Context, Pass, PassResult
from jaxserve.passes.readers import cut_of_stack
from jaxserve.passes.rewrite import Rewriter

ROPE, ATTENTION = "jaxserve.rope", "jaxserve.attention"


@dataclasses.dataclass(frozen=True)
class FuseRope(Pass):
    """rope(q), rope(k) and v become rope_qkv of the array in which q, k and v lie side by side (fuse-qkv makes it).

    They are found from the attention op backwards; q and k must be turned alike. Biases that are added to all three are
    taken along, out of stacks too. The native CPU kernel reads a row once and finds its cosines and sines once, where
    XLA has a loop for each of the three.
    """

    name: ClassVar[str] = "fuse-rope"
    platform: ClassVar[str | None] = "cpu"

    def run(self, graph: Graph, context: Context) -> PassResult:
        del context
        rewriter = Rewriter(graph)
        report = [_fuse(rewriter, eqn) for eqn in graph.eqns if eqn.primitive.name == ATTENTION]
        return PassResult.of(rewriter, report)


@dataclasses.dataclass(frozen=True)
class _Part:
    """What q, k or v is before it is turned: columns of an array, with a bias if there is one, which may be the one of
    a `layer` in a stack; and the equations that compute it."""

    array: Atom
    columns: tuple[int, int]
    bias: tuple[Atom, ...]
    layer: int | None
    eqns: tuple[JaxprEqn, ...]


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
    found = [_part(graph, atom) for atom in (*(rope.invars[0] for rope in ropes), results[2])]
    parts = [part for part in found if part is not None]
    if len(parts) < 3:
        return refuse("q, k or v is no part of a wider array")
    product, ends = parts[0].array, [0, *(part.columns[1] for part in parts)]
    if any(part.array is not product or part.columns[0] != end for part, end in zip(parts, ends, strict=False)):
        return refuse("q, k and v do not lie side by side in one array")
    if ends[-1] != spec_of(product).shape[1]:
        return refuse("q, k and v are not all of the array in which they lie")
    if len({(len(part.bias), part.layer) for part in parts}) > 1:
        return refuse("biases are not added to all of q, k and v, or are those of different layers")
    (_, heads, width), (_, kv_heads, _) = (spec_of(var).shape for var in results[:2])
    operands = (product, ropes[0].invars[1], *(bias for part in parts for bias in part.bias))
    options = {"spec": ropes[0].params["spec"], "heads": heads, "kv_heads": kv_heads, "layer": parts[0].layer}
    note = f"{heads} + 2 * {kv_heads} heads of {width}{', with biases' if parts[0].bias else ''}"
    match = Match(where(ropes[0]), operands, (*(eqn for part in parts for eqn in part.eqns), *ropes), results, note)
    rewriter.replace(match, partial(rope_qkv, **options), operands)
    return match


def _part(graph: Graph, atom: Atom) -> _Part | None:
    """The part of a wider array that `atom` is, cut into heads, or None."""
    heads = graph.producer(atom)
    inner = graph.producer(heads.invars[0]) if heads is not None and heads.primitive.name == "reshape" else None
    if heads is None or inner is None:
        return None
    bias, layer, eqns = (), None, (heads,)
    if inner.primitive.name == "add":
        bias, layer, of_bias = _bias(graph, inner.invars[1])
        eqns = (*of_bias, inner, heads)
        cut = graph.producer(inner.invars[0]) if bias else None
    else:
        cut = inner
    if cut is None or cut.primitive.name != "slice":
        return None
    (first, start), (last, end) = cut.params["start_indices"], cut.params["limit_indices"]
    if first != 0 or last != spec_of(cut.invars[0]).shape[0] or spec_of(atom).shape[0] != last:
        return None
    return _Part(cut.invars[0], (start, end), bias, layer, (cut, *eqns))


def _bias(graph: Graph, atom: Atom) -> tuple[tuple[Atom, ...], int | None, tuple[JaxprEqn, ...]]:
    """The vector that is added to every row, or its stack and its layer, and the equations between; no vector if `atom`
    is none."""
    spread = graph.producer(atom)
    if spread is None or spread.primitive.name != "broadcast_in_dim":
        return (), None, ()
    vector = spread.invars[0]
    if len(spec_of(vector).shape) != 1 or spread.params["broadcast_dimensions"] != (1,):
        return (), None, ()
    cut = cut_of_stack(graph, vector)
    if not cut:
        return (vector,), None, (spread,)
    return (cut[0].invars[0],), cut[0].params["start_indices"][0], (*cut, spread)
