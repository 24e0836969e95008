"""A graph cut into layers, so that they can be run one after another with no more than one layer's weights in memory.

Cutting goes by dataflow alone. Segment 0 is what comes before the layers (the embedding), segment i + 1 is layer i; an
equation belongs to the latest segment among those of its operands and of the layers whose parameters it reads:

    segment(eqn) = max(i + 1 for parameters `layers_i/...`, segments of operands, 0)

So what follows the layers (the last norm, the head) belongs to the last of them. An equation that reads no parameter
(positions, constants) or nothing else (a transposed weight) goes with the first that needs it.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence

import jax

from jaxserve._compat import Jaxpr, JaxprEqn, Var, jaxpr_as_fun, spec_of, vars_of
from jaxserve.passes.graph import Graph, Input, Output
from jaxserve.passes.printer import print_graph


@dataclasses.dataclass(frozen=True)
class Part:
    """Some equations of one segment, as a function: (parameters, operands) -> results.

    `params` are paths; `operands` are other inputs of the graph and what earlier segments computed.
    """

    params: tuple[str, ...]
    operands: tuple[Var, ...]
    results: tuple[Var, ...]
    jaxpr: Jaxpr

    def __call__(self, params: Sequence[jax.Array], operands: Sequence[jax.Array]) -> list[jax.Array]:
        return jaxpr_as_fun(self.jaxpr)(*params, *operands)

    @functools.cached_property
    def text(self) -> str:
        """Equal for parts that compute the same of different parameters: one compilation serves them all."""
        inputs = tuple(Input(str(i), "arg", spec_of(var)) for i, var in enumerate(self.jaxpr.invars))
        outputs = tuple(Output(str(i), spec_of(var)) for i, var in enumerate(self.results))
        return f"{len(self.params)} parameters\n{print_graph(Graph(inputs, outputs, self.jaxpr), places=False)}"


class Segments:
    """The segments of a graph; see the module's text."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._number = _numbers(graph)
        self.count = 1 + max(self._number.values(), default=0)
        self._eqns: list[list[JaxprEqn]] = [[] for _ in range(self.count)]
        for eqn in graph.eqns:
            self._eqns[self._number[id(eqn)]].append(eqn)

    def of(self, var: Var) -> int | None:
        """The segment that computes `var`; None when the graph does not."""
        producer = self.graph.producer(var)
        return None if producer is None else self._number[id(producer)]

    def results(self, number: int) -> list[Var]:
        """All that a segment computes, in program order."""
        return [var for eqn in self._eqns[number] for var in eqn.outvars] if number < self.count else []

    def first_reader(self, path: str) -> int:
        """The first segment that reads a parameter; the last one for a parameter that is only an output."""
        readers = self.graph.users(self.graph.var(path))
        return min((self._number[id(eqn)] for eqn in readers), default=self.count - 1)

    def part(self, number: int, results: Iterable[Var]) -> Part:
        """What segment `number` computes for `results`; those that are computed elsewhere must be operands."""
        outs = tuple(dict.fromkeys(results))
        wanted, kept, inside = set(outs), list[JaxprEqn](), set[Var]()
        for eqn in reversed(self._eqns[number]):
            if wanted.intersection(eqn.outvars):
                kept.append(eqn)
                inside.update(eqn.outvars)
                wanted.update(vars_of(eqn.invars))
        kept.reverse()
        read = [var for eqn in kept for var in vars_of(eqn.invars)]
        free = [var for var in dict.fromkeys([*read, *outs]) if var not in inside]
        params = {var: entry.path for var in free if (entry := self.graph.param_of(var)) is not None}
        operands = tuple(var for var in free if var not in params)
        anonymous = self.graph.jaxpr.debug_info._replace(arg_names=None, result_paths=None)
        jaxpr = self.graph.jaxpr.replace(
            invars=[*params, *operands], outvars=list(outs), eqns=kept, debug_info=anonymous
        )
        return Part(tuple(params.values()), operands, outs, jaxpr)


def layer_of(path: str) -> int | None:
    """The layer that a parameter belongs to by its path, or None."""
    found = re.search(r"\blayers_(\d+)/", path)
    return int(found[1]) if found else None


def _numbers(graph: Graph) -> dict[int, int]:
    """Segment of every equation, by its id."""
    found: dict[int, int] = {}
    sources: dict[int, set[str]] = {}  # kinds of input that an equation is computed from
    for eqn in graph.eqns:
        kinds, segments = set[str](), list[int]()
        for var in vars_of(eqn.invars):
            entry, producer = graph.input_of(var), graph.producer(var)
            if producer is not None:
                kinds |= sources[id(producer)]
                segments += [found[id(producer)]] if id(producer) in found else []
            elif entry is not None:
                layer = layer_of(entry.path) if entry.kind == "param" else None
                kinds.add("param" if entry.kind == "param" else "arg")
                segments += [] if layer is None else [layer + 1]
        sources[id(eqn)] = kinds
        if segments or kinds == {"param", "arg"}:
            found[id(eqn)] = max(segments, default=0)
    for eqn in reversed(graph.eqns):
        if id(eqn) not in found:
            users = [found[id(user)] for out in eqn.outvars for user in graph.users(out)]
            found[id(eqn)] = min(users, default=0)
    return found
