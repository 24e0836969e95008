"""Finding layers that compute alike, and running them as one loop.

A graph stays unrolled, so that passes see every layer; only the function that is lowered has the loop. Programs get
smaller by the number of layers: less to compile, to load and to keep in memory.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from typing import Literal as Choice

import jax
import numpy as np

from jaxserve._compat import Atom, JaxprEqn, Literal, Var, spec_of, vars_of
from jaxserve.pallas_kernels._op import TRACED
from jaxserve.passes.graph import Graph, Values, run_eqn

MIN_REPEATS = 4
"""Fewer repetitions are not worth a loop."""

Place = tuple[int, int]
"""A result of a segment: the equation's number in it, and the number among its results."""


@dataclasses.dataclass(frozen=True)
class Loop:
    """`repeats` segments of `length` equations each, from equation `first` on.

    A segment reads what was there before, results of its own, and `carried` results of the segment before it; the first
    segment reads the given atoms in their place. `steps` says by how much the layer that an equation reads grows from
    segment to segment.
    """

    first: int
    length: int
    repeats: int
    carried: Mapping[Place, Var]
    steps: Mapping[int, int]

    @property
    def end(self) -> int:
        return self.first + self.length * self.repeats


def find_loops(graph: Graph) -> list[Loop]:
    """The loops of a graph from its beginning on, each the longest that begins there."""
    search = _Search(graph)
    loops: list[Loop] = []
    at = 0
    while at < len(graph.eqns):
        loop = search.at(at)
        if loop is not None:
            loops.append(loop)
        at = loop.end if loop is not None else at + 1
    return loops


def call_with_loops(graph: Graph, values: Mapping[str, Any]) -> dict[str, Any]:
    """`graph.call(values)` in which `find_loops` run as loops; traceable by jit."""
    known: Values = {var: values[entry.path] for var, entry in zip(graph.jaxpr.invars, graph.inputs, strict=True)}
    at = 0
    for loop in find_loops(graph):
        _run(graph.eqns[at : loop.first], known)
        _run_loop(graph.eqns, loop, known)
        at = loop.end
    _run(graph.eqns[at:], known)
    return graph.results(known)


@dataclasses.dataclass(frozen=True)
class _Read:
    """Where a segment has an operand from: a literal, a result of its `own` or of the one `before`, or `outside`."""

    kind: Choice["literal", "own", "before", "outside"]
    what: Any


class _Search:
    """What is asked of a graph while its loops are looked for."""

    def __init__(self, graph: Graph) -> None:
        numbers: dict[Any, int] = {}
        eqns, ends = graph.eqns, vars_of(graph.jaxpr.outvars)
        self.graph = graph
        # Equal numbers: equations that may be the same one of two layers.
        self.alike = [numbers.setdefault(_signature(graph, eqn), len(numbers)) for eqn in eqns]
        # By which equation a variable is made, as which result; and which equation reads it last.
        self.made = {var: (number, i) for number, eqn in enumerate(eqns) for i, var in enumerate(eqn.outvars)}
        self.last_read = {var: number for number, eqn in enumerate(eqns) for var in vars_of(eqn.invars)}
        self.last_read |= dict.fromkeys(ends, len(eqns))

    def at(self, first: int) -> Loop | None:
        """The loop from an equation on that covers most, if there is one."""
        most = (len(self.alike) - first) // MIN_REPEATS
        lengths = [n for n in range(1, most + 1) if self._repeated(first, n)]
        loops = [loop for length in lengths if (loop := self._loop(first, length)) is not None]
        return max(loops, key=lambda loop: loop.end, default=None)

    def _repeated(self, first: int, length: int) -> bool:
        """Whether the first equations look alike, and some of them read one layer of several."""
        eqns, alike = self.graph.eqns, self.alike
        starts = range(first + length, first + MIN_REPEATS * length, length)
        return (
            all(alike[start] == alike[first] for start in starts)
            and all(alike[start : start + length] == alike[first : first + length] for start in starts)
            and any(_layer(self.graph, eqn) is not None for eqn in eqns[first : first + length])
        )

    def _loop(self, first: int, length: int) -> Loop | None:
        begin, second = self._reads(first, 0, length), self._reads(first + length, length, length)
        carried: dict[Place, Var] = {}
        fixed: set[Var] = set()
        for here, there in zip(begin, second, strict=True):
            if here.kind == "outside" and there.kind == "before":
                if carried.setdefault(there.what, here.what) is not here.what:
                    return None
            elif here != there:
                return None
            elif here.kind == "outside":
                fixed.add(here.what)
        if len(set(carried.values())) < len(carried) or not fixed.isdisjoint(carried.values()):
            return None
        layers, next_layers = self._layers(first, length), self._layers(first + length, length)
        steps = {i: next_layers[i] - layer for i, layer in layers.items()}
        repeats = 2
        while self._follows(first, length, repeats, second, {i: layers[i] + repeats * steps[i] for i in steps}):
            repeats += 1
        loop = Loop(first, length, repeats, carried, steps)
        return loop if repeats >= MIN_REPEATS and self._leaves_only_carried(loop) else None

    def _follows(self, first: int, length: int, repeats: int, reads: list[_Read], layers: dict[int, int]) -> bool:
        """Whether the segment after `repeats` of them computes as the second one does, but of these layers."""
        start = first + repeats * length
        return (
            self.alike[start : start + length] == self.alike[first : first + length]
            and self._layers(start, length) == layers
            and self._reads(start, length, length) == reads
        )

    def _layers(self, start: int, length: int) -> dict[int, int]:
        """The layers that the equations of the segment from `start` on read, by their number in it."""
        found = {i: _layer(self.graph, eqn) for i, eqn in enumerate(self.graph.eqns[start : start + length])}
        return {i: layer for i, layer in found.items() if layer is not None}

    def _reads(self, start: int, back: int, length: int) -> list[_Read]:
        """What the segment from `start` on reads; results of the `back` equations in front of it by their place."""
        return [self._read(atom, start, back) for eqn in self.graph.eqns[start : start + length] for atom in eqn.invars]

    def _read(self, atom: Atom, start: int, back: int) -> _Read:
        if isinstance(atom, Literal):
            return _Read("literal", (str(atom.val), str(atom.aval)))
        number, result = self.made.get(atom, (-1, 0))
        if number >= start:
            return _Read("own", (number - start, result))
        if number >= start - back:
            return _Read("before", (number - start + back, result))
        return _Read("outside", atom)

    def _leaves_only_carried(self, loop: Loop) -> bool:
        """Whether what is read after the loop are carried results of its last segment."""
        last = loop.end - loop.length
        return all(
            self.last_read.get(var, -1) < loop.end or (number - last, result) in loop.carried
            for number in range(loop.first, loop.end)
            for result, var in enumerate(self.graph.eqns[number].outvars)
        )


def _layer(graph: Graph, eqn: JaxprEqn) -> int | None:
    """Which entry of stacks of layers an equation reads, if it reads one."""
    if eqn.primitive.name != "slice" or graph.param_of(eqn.invars[0]) is None:
        return eqn.params.get("layer")
    (first, *starts), (end, *ends) = eqn.params["start_indices"], eqn.params["limit_indices"]
    whole = not any(starts) and tuple(ends) == spec_of(eqn.invars[0]).shape[1:]
    return first if whole and end == first + 1 and set(eqn.params["strides"] or (1,)) == {1} else None


def params_of_any_layer(graph: Graph, eqn: JaxprEqn) -> list[tuple[str, str]]:
    """The parameters of an equation as text, but for those that say which layer of several it reads."""
    names = set(eqn.params)
    if _layer(graph, eqn) is not None:
        names -= {"layer", "start_indices", "limit_indices"}
    return [(name, str(eqn.params[name])) for name in sorted(names)]


def _signature(graph: Graph, eqn: JaxprEqn) -> Any:
    """What two equations of one kind have in common, but for the layer that they read."""
    specs = [str(spec_of(atom)) for atom in (*eqn.invars, *eqn.outvars)]
    return eqn.primitive.name, str(params_of_any_layer(graph, eqn)), *specs


def _run(eqns: Sequence[JaxprEqn], known: Values) -> None:
    for eqn in eqns:
        run_eqn(eqn, known, partial(eqn.primitive.bind, **eqn.params))


def _run_loop(eqns: Sequence[JaxprEqn], loop: Loop, known: Values) -> None:
    """Adds what the loop leaves to the values known."""
    segment = eqns[loop.first : loop.first + loop.length]
    places = list(loop.carried)
    begin = [loop.carried[place] for place in places]

    def body(index: Any, carry: list[Any]) -> list[Any]:
        values = known | dict(zip(begin, carry, strict=True))
        for number, eqn in enumerate(segment):
            run_eqn(eqn, values, _at(eqn, loop.steps.get(number, 0), index))
        return [values[segment[number].outvars[result]] for number, result in places]

    left = jax.lax.fori_loop(0, loop.repeats, body, [known[var] for var in begin])
    last = loop.end - loop.length
    for (number, result), value in zip(places, left, strict=True):
        known[eqns[last + number].outvars[result]] = value


def _at(eqn: JaxprEqn, step: int, index: Any) -> Any:
    """What an equation of the first segment computes in segment `index`."""
    if step == 0:
        return partial(eqn.primitive.bind, **eqn.params)
    if eqn.primitive.name == "slice":
        return lambda x: jax.lax.dynamic_slice_in_dim(x, eqn.params["start_indices"][0] + index * step, 1)
    layer = np.int32(eqn.params["layer"]) + index * np.int32(step)
    params = {**eqn.params, "layer": TRACED}
    return lambda *operands: eqn.primitive.bind(*operands, layer, **params)
