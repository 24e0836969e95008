"""roll-layers: layers that compute alike run as one loop."""

import dataclasses
from typing import ClassVar

from jaxserve.passes.graph import Graph, where
from jaxserve.passes.loops import MIN_REPEATS, Loop, find_loops
from jaxserve.passes.match import Match, NoMatch
from jaxserve.passes.pipeline import Context, Pass, PassResult


@dataclasses.dataclass(frozen=True)
class RollLayers(Pass):
    """Four and more segments of equations that differ only in the layer that they read become one loop.

    The graph stays as it is, with every layer written out: the loop is made where the graph is lowered
    (`passes.loops`). Programs shrink by the number of layers, and so do the time to compile and to load them and the
    memory that they take. Weights must be stacked, and the target's kernels must take a layer that is known only when
    the program runs: those of CPUs do.
    """

    name: ClassVar[str] = "roll-layers"

    def run(self, graph: Graph, context: Context) -> PassResult:
        if not context.loops:
            refusal = NoMatch("graph", "the target's kernels read a layer that is known when they are compiled")
            return PassResult(graph, report=(refusal,))
        found = tuple(_match(graph, loop) for loop in find_loops(graph))
        nothing = NoMatch("graph", f"no {MIN_REPEATS} segments in a row differ only in the layer that they read")
        return PassResult(graph, report=found or (nothing,))


def _match(graph: Graph, loop: Loop) -> Match:
    first, last = graph.eqns[loop.first], graph.eqns[loop.end - 1]
    note = f"{loop.repeats} segments of {loop.length} equations in a loop that carries {len(loop.carried)} arrays"
    return Match(f"{where(first)} to {where(last)}", tuple(first.invars), (first, last), tuple(last.outvars), note)
