"""canonicalize: every linear layer reads its weight as [O, I], and nothing dead remains."""

import dataclasses
from typing import ClassVar

import jax
import numpy as np

from jaxserve._compat import JaxprEqn
from jaxserve.passes.graph import Graph, Input, where
from jaxserve.passes.match import Match, NoMatch
from jaxserve.passes.pipeline import Context, Pass, PassResult
from jaxserve.passes.rewrite import Rewriter
from jaxserve.passes.weights import Value, WeightEdit, dense

CONTRACT_LAST = (((1,), (1,)), ((), ()))
CONTRACT_FIRST = (((1,), (0,)), ((), ()))


@dataclasses.dataclass(frozen=True)
class Canonicalize(Pass):
    """Folds transposes of weights into the weights, and drops dead equations and parameters.

    Every spelling of y = x W^T leaves as a dot that contracts the last axis of a weight [O, I]. `x @ w.T` reads w as
    it is. Where a dot contracts the first axis of a parameter (flax's own Dense keeps [I, O]), or the last one of its
    transpose, the parameter is stored transposed, unless it has another reader: then it keeps its shape.
    """

    name: ClassVar[str] = "canonicalize"

    def run(self, graph: Graph, context: Context) -> PassResult:
        del context
        rewriter = Rewriter(graph)
        report: list[Match | NoMatch] = []
        for eqn in graph.eqns:
            found = _double_transpose(graph, eqn)
            if found is not None:
                _read_untransposed(rewriter, found)
            else:
                found = _transposed_weight(graph, eqn) if _is_transpose(eqn) else _transposed_dot(graph, eqn)
                if isinstance(found, Match):
                    _fold(rewriter, found)
            if found is not None:
                report.append(found)
        return PassResult.of(rewriter, report)


def _double_transpose(graph: Graph, eqn: JaxprEqn) -> Match | None:
    """x [T, I] dot transpose(w [O, I]): other readers of w or of its transpose do not matter."""
    if eqn.primitive.name != "dot_general" or eqn.params["dimension_numbers"] != CONTRACT_FIRST:
        return None
    transpose = graph.producer(eqn.invars[1])
    entry = None if transpose is None else _transposed_param(graph, transpose)
    if transpose is None or entry is None:
        return None
    operands = (eqn.invars[0], transpose.invars[0])
    return Match(where(eqn), operands, (transpose, eqn), tuple(eqn.outvars), f"{entry.path} read without transpose")


def _transposed_dot(graph: Graph, eqn: JaxprEqn) -> Match | NoMatch | None:
    """x [T, I] dot w [I, O]."""
    if eqn.primitive.name != "dot_general" or eqn.params["dimension_numbers"] != CONTRACT_FIRST:
        return None
    entry = graph.param_of(eqn.invars[1])
    return None if entry is None else _sole_reader(graph, eqn, entry, tuple(eqn.invars))


def _transposed_weight(graph: Graph, eqn: JaxprEqn) -> Match | NoMatch | None:
    """transpose(w [I, O]) that not only dots of `_double_transpose` read: it becomes a parameter stored transposed."""
    entry = _transposed_param(graph, eqn)
    if entry is None:
        return None
    untransposed = [_double_transpose(graph, user) is not None for user in graph.users(eqn.outvars[0])]
    if untransposed and all(untransposed) and not graph.is_output(eqn.outvars[0]):
        return None
    if any(untransposed):
        return NoMatch(where(eqn), f"{entry.path} is also read untransposed, so it cannot be stored transposed")
    return _sole_reader(graph, eqn, entry, tuple(eqn.invars))


def _is_transpose(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "transpose" and eqn.params["permutation"] == (1, 0)


def _transposed_param(graph: Graph, eqn: JaxprEqn) -> Input | None:
    """The parameter whose transpose `eqn` computes, or None."""
    return graph.param_of(eqn.invars[0]) if _is_transpose(eqn) else None


def _sole_reader(graph: Graph, eqn: JaxprEqn, entry: Input, operands: tuple) -> Match | NoMatch:
    if graph.only_user(graph.var(entry.path)) is not eqn:
        return NoMatch(where(eqn), f"{entry.path} has other readers, so it cannot be stored transposed")
    return Match(where(eqn), operands, (eqn,), tuple(eqn.outvars), f"{entry.path} stored transposed")


def _read_untransposed(rewriter: Rewriter, match: Match) -> None:
    """Replaces a dot with a transposed weight by one that contracts the weight's last axis."""
    dot = match.eqns[-1]
    params = {**dot.params, "dimension_numbers": CONTRACT_LAST}
    rewriter.replace(match, lambda x, w: dot.primitive.bind(x, w, **params), match.operands)


def _fold(rewriter: Rewriter, match: Match) -> None:
    """Replaces the weight by its transpose; a transposed dot becomes one that contracts the last axes."""
    (eqn,) = match.eqns
    entry = rewriter.graph.param_of(eqn.invars[-1])
    assert entry is not None
    rows, columns = entry.aval.shape
    folded = Input(entry.path, "param", jax.ShapeDtypeStruct((columns, rows), entry.aval.dtype), _swap(entry.axes))
    weight = rewriter.add_input(folded)
    edit = WeightEdit((entry.path,), (entry.path,), _transpose)
    if eqn.primitive.name == "transpose":
        rewriter.replace(match, lambda w: w, [weight], [edit])
        return
    params = {**eqn.params, "dimension_numbers": CONTRACT_LAST}
    rewriter.replace(match, lambda x, w: eqn.primitive.bind(x, w, **params), [eqn.invars[0], weight], [edit])


def _transpose(value: Value) -> tuple[Value, ...]:
    return (np.ascontiguousarray(dense(value).T),)


def _swap(axes: str) -> str:
    return " ".join(reversed(axes.split()))
