"""choose-layout: quantized weights take the order in which the target's kernel loads them."""

import dataclasses
from functools import partial
from typing import ClassVar

import jax
import numpy as np

from jaxserve._compat import JaxprEqn, Var
from jaxserve.pallas_kernels import OPS
from jaxserve.pallas_kernels.quantized_matmul import layout as layouts
from jaxserve.passes.graph import Graph, Input, where
from jaxserve.passes.match import Match, NoMatch
from jaxserve.passes.pipeline import Context, Pass, PassResult
from jaxserve.passes.readers import QUANTIZED
from jaxserve.passes.rewrite import Rewriter
from jaxserve.passes.weights import Value, WeightEdit, dense

READERS = (QUANTIZED, "jaxserve.quantized_take")


@dataclasses.dataclass(frozen=True)
class ChooseLayout(Pass):
    """quantized_matmul(x, codes, ...) reads panels of sixteen outputs, and so does a lookup in the same weight.

    The native CPU kernel adds up one output in each of sixteen lanes; of a weight that lies row after row it would have
    to transpose the codes and scales of every step. The bytes stay the same, in another order, so the weight takes no
    more memory. Other kernels and the references take either order. A weight that does not fill panels stays as it is.
    """

    name: ClassVar[str] = "choose-layout"
    keeps_numbers: ClassVar[bool] = True
    platform: ClassVar[str | None] = "cpu"

    def run(self, graph: Graph, context: Context) -> PassResult:
        del context
        rewriter = Rewriter(graph)
        report: list[Match | NoMatch] = []
        for entry in graph.of_kind("param"):
            readers = graph.users(graph.var(entry.path))
            if any(_reads_codes(graph, eqn, entry) for eqn in readers):
                report += _pack(rewriter, readers)
        return PassResult.of(rewriter, report)


def _reads_codes(graph: Graph, eqn: JaxprEqn, entry: Input) -> bool:
    return eqn.primitive.name in READERS and graph.param_of(eqn.invars[1]) is entry


def _pack(rewriter: Rewriter, readers: list[JaxprEqn]) -> list[Match | NoMatch]:
    """All readers of a weight take it in panels, or none does."""
    graph, first = rewriter.graph, readers[0]
    format, (outputs, inputs) = first.params["format"], first.params["shape"]
    entries = [graph.param_of(atom) for atom in first.invars[1 : 1 + len(format.fields)]]
    fields = [entry for entry in entries if entry is not None]
    problem = layouts.refusal(format, outputs, inputs) or _problem(graph, readers, fields)
    if problem or len(fields) < len(entries):
        return [NoMatch(where(first), problem or "a part of the weight is computed, not a parameter")]
    packed, edits = [], []
    specs = layouts.specs(format, outputs, inputs, "panels")
    for entry, (name, (panels, _)) in zip(fields, specs.items(), strict=True):
        packed.append(rewriter.add_input(_in_panels(entry, panels)))
        if panels != entry.aval.shape:
            edits.append(WeightEdit((entry.path,), (entry.path,), partial(_packed, name)))
    return [_substitute(rewriter, eqn, packed, edits) for eqn in readers]


def _in_panels(entry: Input, shape: tuple[int, ...]) -> Input:
    """A field as it is declared once it lies in panels; the same where it keeps its shape."""
    if shape == entry.aval.shape:
        return entry
    outputs, inputs = entry.axes.split() if entry.axes else ("O", "I")
    axes = f"{outputs}/{shape[2]} {inputs} {' '.join(map(str, shape[2:]))}"
    return dataclasses.replace(entry, aval=jax.ShapeDtypeStruct(shape, entry.aval.dtype), axes=axes)


def _problem(graph: Graph, readers: list[JaxprEqn], fields: list[Input]) -> str | None:
    """Why the arrays of a weight cannot change together."""
    for entry in fields:
        others = [eqn for eqn in graph.users(graph.var(entry.path)) if eqn not in readers]
        if others or graph.is_output(graph.var(entry.path)):
            return f"{entry.path} is read by {others[0].primitive.name if others else 'an output'}, too"
    if others := [eqn for eqn in readers if eqn.primitive.name not in READERS or eqn.params["layout"] is not None]:
        return f"its reader {others[0].primitive.name} takes no panels"
    return None


def _substitute(rewriter: Rewriter, eqn: JaxprEqn, packed: list[Var], edits: list[WeightEdit]) -> Match:
    shape, count = eqn.params["shape"], 1 + len(packed)
    note = f"[{shape[0]}, {shape[1]}] {eqn.params['format']} in panels of {layouts.OUTPUTS} outputs"
    match = Match(where(eqn), tuple(eqn.invars), (eqn,), tuple(eqn.outvars), note)
    bind = partial(OPS[eqn.primitive.name], **{**eqn.params, "layout": "panels"})
    rewriter.replace(match, bind, [eqn.invars[0], *packed, *eqn.invars[count:]], edits)
    return match


def _packed(name: str, value: Value) -> tuple[np.ndarray, ...]:
    return (layouts.pack(name, dense(value)),)
