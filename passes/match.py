"""Matching by example: a search function is traced, and its program is looked for in a graph.

A match that fails is a falsy `NoMatch` that says why, so that `compile --explain` can print it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxserve import _compat
from jaxserve._compat import Atom, Jaxpr, JaxprEqn, Literal, Var
from jaxserve.passes.graph import Graph, where
from jaxserve.passes.trace import inline


@dataclasses.dataclass(frozen=True)
class Match:
    """A region of a graph: what it reads (`operands`), the equations in it, and what it gives (`results`)."""

    where: str
    operands: tuple[Atom, ...]
    eqns: tuple[JaxprEqn, ...]
    results: tuple[Var, ...]
    note: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.note or 'matched'}"


@dataclasses.dataclass(frozen=True)
class NoMatch:
    """Falsy; `where` it was tried and the `reason` it failed. `asked` for by name was something that is not there,
    which people are told even if they did not want to know about every region."""

    where: str
    reason: str
    asked: bool = False

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"{self.where}: no match, {self.reason}"


class Pattern:
    """A search function by example.

    `examples` give each operand's rank and dtype; their sizes do not matter. Matching goes in two phases: the
    traced example is unified with the graph by its primitives alone, which binds the operands; then the search function
    is traced again at the operands' true shapes and compared parameter by parameter. So a pattern never needs a list
    of "parameters to ignore", and never accepts a region that computes something else.
    """

    def __init__(self, search: Callable[..., Any], *examples: jax.ShapeDtypeStruct):
        self.search = search
        self.examples = examples

    @functools.cached_property
    def _shape_free(self) -> Jaxpr:
        program = traced(self.search, self.examples)
        if len(program.outvars) != 1:
            raise ValueError(f"a pattern computes one array, {self.search.__name__} computes {len(program.outvars)}")
        return program

    def match(self, graph: Graph, root: Var) -> Match | NoMatch:
        """The region of `graph` that ends in `root` and computes the search function, or why there is none."""
        producer = graph.producer(root)
        place = where(producer) if producer is not None else "input"
        operands = _unify(graph, self._shape_free, root, place, exact=False)
        if isinstance(operands, NoMatch):
            return operands
        try:
            program = traced(self.search, [_compat.spec_of(atom) for atom in operands.operands])
        except (TypeError, ValueError) as error:
            return NoMatch(place, f"shapes do not fit the pattern ({str(error).splitlines()[0]})")
        return _unify(graph, program, root, place, exact=True)


def traced(function: Callable[..., Any], specs: Sequence[jax.ShapeDtypeStruct]) -> Jaxpr:
    """The flat jaxpr of a function of arrays."""
    return inline(_compat.trace(function, *specs))


def _unify(graph: Graph, program: Jaxpr, root: Var, place: str, exact: bool) -> Match | NoMatch:
    """Walks back from `root` along `program`; operands are bound where the program reads its inputs."""
    producers = {out: eqn for eqn in program.eqns for out in eqn.outvars}
    bound: dict[Var, Atom] = {}
    region: dict[int, JaxprEqn] = {}
    stack: list[tuple[Atom, Atom]] = [(program.outvars[0], root)]
    while stack:
        want, have = stack.pop()
        if isinstance(want, Literal):
            if not _same(want, have):
                return NoMatch(place, f"expected the constant {want.val}, found {_name(graph, have)}")
            continue
        if want in bound:
            if not _same(bound[want], have):
                return NoMatch(
                    place, f"one operand is read twice by the pattern but the graph reads {_name(graph, have)}"
                )
            continue
        bound[want] = have
        eqn = producers.get(want)
        if eqn is None:
            continue
        found = graph.producer(have)
        reason = _difference(eqn, found, exact)
        if reason:
            return NoMatch(place, reason)
        assert found is not None and isinstance(have, Var)
        if eqn.outvars.index(want) != found.outvars.index(have):
            return NoMatch(place, f"another result of {eqn.primitive.name} is read than the pattern reads")
        region[id(found)] = found
        stack.extend(zip(eqn.invars, found.invars, strict=True))
    missing = [var for var in program.invars if var not in bound]
    if missing:
        return NoMatch(place, "the pattern ignores one of its operands")
    escape = _escapes(graph, region, root)
    if escape:
        return NoMatch(place, escape)
    return Match(place, tuple(bound[var] for var in program.invars), tuple(region.values()), (root,))


def _same(a: Atom, b: Atom) -> bool:
    """The same variable, or equal constants."""
    if isinstance(a, Literal) and isinstance(b, Literal):
        return bool(a.val == b.val) and _compat.spec_of(a) == _compat.spec_of(b)
    return a is b


def _difference(want: JaxprEqn, have: JaxprEqn | None, exact: bool) -> str | None:
    if have is None:
        return f"expected {want.primitive.name}, found an input"
    if want.primitive is not have.primitive or len(want.invars) != len(have.invars):
        return f"expected {want.primitive.name}, found {have.primitive.name}"
    if exact:
        for key in sorted(want.params):
            if want.params[key] != have.params.get(key):
                return f"{want.primitive.name} has {key}={have.params.get(key)}, the pattern {want.params[key]}"
    return None


def _escapes(graph: Graph, region: dict[int, JaxprEqn], root: Var) -> str | None:
    """Why the region cannot be replaced as a whole: an inner value is also read outside it."""
    for eqn in region.values():
        for var in eqn.outvars:
            if var is root:
                continue
            outside = [user for user in graph.users(var) if id(user) not in region]
            if outside:
                return f"{eqn.primitive.name}'s result also feeds {outside[0].primitive.name} at {where(outside[0])}"
            if graph.is_output(var):
                return f"{eqn.primitive.name}'s result is also an output of the graph"
    return None


def _name(graph: Graph, atom: Atom) -> str:
    if isinstance(atom, Literal):
        return f"the constant {atom.val}"
    entry, producer = graph.input_of(atom), graph.producer(atom)
    return entry.path if entry else producer.primitive.name if producer else "nothing"
