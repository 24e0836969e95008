"""Rewriting: replacements are ordinary functions, traced at the operands' shapes and spliced in."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxserve._compat import Atom, JaxprEqn, Var, fresh_outvars, fresh_var, jaxpr_as_fun, spec_of, vars_of
from jaxserve.passes.graph import KINDS, Graph, Input, Output
from jaxserve.passes.match import Match, traced
from jaxserve.passes.trace import resolve
from jaxserve.passes.weights import WeightEdit

Values = dict[Var, np.ndarray]
# (generator, values of the match's operands) -> values for the old region, values for the new one, by variable; or None
# when no numbers can be made for this region.
Examples = Callable[[np.random.Generator, Values], tuple[Values, Values] | None]


@dataclasses.dataclass(frozen=True)
class Replaced:
    """One match and what took its place: `verify` runs both on the same numbers.

    `new` maps `new_operands` (variables of the graph before the pass, or inputs that the pass added) to the match's
    results. `examples` gives the numbers to try where random ones would mean nothing (positions, block tables);
    `tolerance` bounds ||new - old|| / ||old|| beyond the rounding of the dtype.
    """

    match: Match
    new: Callable[..., Any]
    new_operands: tuple[Atom, ...]
    edits: tuple[WeightEdit, ...] = ()
    examples: Examples | None = None
    tolerance: float = 0.0


class Rewriter:
    """Collects replacements over one graph; `finish` gives the new graph, in order and without what is dead."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.edits: list[WeightEdit] = []
        self.replaced: list[Replaced] = []
        self._inputs: list[tuple[Input, Var]] = list(zip(graph.inputs, graph.jaxpr.invars, strict=True))
        self._outputs: list[tuple[Output, Atom]] = list(zip(graph.outputs, graph.jaxpr.outvars, strict=True))
        self._eqns: list[JaxprEqn] = list(graph.eqns)
        self._renamed: dict[Var, Atom] = {}
        self._added = {entry.path: (entry, var) for entry, var in self._inputs}

    def add_input(self, entry: Input) -> Var:
        """A new input; asking again for the same one gives the same variable.

        An entry that differs from the old input at its path takes its place: the old one must lose its readers.
        """
        known, var = self._added.get(entry.path, (None, None))
        if var is None or known != entry:
            var = fresh_var(entry.aval)
            self._added[entry.path] = entry, var
            self._inputs.append((entry, var))
        return var

    def has_input(self, path: str) -> bool:
        """Whether the graph has an input at `path` or a replacement has added one."""
        return path in self._added

    def is_replaced(self, var: Var) -> bool:
        """Whether `var` is the result of a match that has been replaced already."""
        return var in self._renamed

    @property
    def renamed(self) -> dict[Var, Atom]:
        """What gives the results of the matches that have been replaced."""
        return {var: resolve(self._renamed, var) for var in self._renamed}

    def add_output(self, output: Output, var: Atom) -> None:
        self._outputs.append((output, var))

    def replace(
        self,
        match: Match,
        new: Callable[..., Any],
        operands: Sequence[Atom],
        edits: Sequence[WeightEdit] = (),
        examples: Examples | None = None,
        tolerance: float = 0.0,
    ) -> tuple[Atom, ...]:
        """Computes the results of `match` by `new(*operands)` instead.

        `new` returns the match's results first, with the same shapes and dtypes; what it returns beyond them is handed
        back as atoms (for further outputs). An edit that several matches share is taken once. Raises TypeError when the
        replacement's results do not fit, ValueError when it is computed from the results that it replaces or when
        another replacement already gives them.
        """
        outs = self._splice(new, operands, match)
        if len(outs) < len(match.results):
            raise TypeError(f"{match.where}: the replacement gives {len(outs)} results of {len(match.results)}")
        if any(old in self._renamed for old in match.results):
            raise ValueError(f"{match.where}: a result of this match has been replaced already")
        for old, atom in zip(match.results, outs, strict=False):
            if spec_of(old) != spec_of(atom):
                raise TypeError(f"{match.where}: the replacement gives {atom.aval}, the match gave {old.aval}")
            self._renamed[old] = atom
        self.edits.extend(edit for edit in edits if edit not in self.edits)
        self.replaced.append(Replaced(match, new, tuple(operands), tuple(edits), examples, tolerance))
        return outs[len(match.results) :]

    def change_weights(self, match: Match, edits: Sequence[WeightEdit], tolerance: float = 0.0) -> None:
        """Leaves the region of `match` as it is, computed from the parameters that `edits` write in place.

        Those are no longer what the checkpoint stores in quantized form. The match's operands are all the variables
        that its equations read from outside.
        """
        written = {path for edit in edits for path in edit.writes}
        for index, (entry, var) in enumerate(self._inputs):
            if entry.path in written and entry.stored is not None:
                self._inputs[index] = self._added[entry.path] = dataclasses.replace(entry, stored=None), var
        program = self.graph.jaxpr.replace(
            invars=vars_of(match.operands),
            outvars=list(match.results),
            eqns=list(match.eqns),
            debug_info=_anonymous(self.graph),
        )
        self.edits.extend(edits)
        self.replaced.append(Replaced(match, jaxpr_as_fun(program), match.operands, tuple(edits), None, tolerance))

    def _splice(self, function: Callable[..., Any], operands: Sequence[Atom], match: Match) -> tuple[Atom, ...]:
        program = traced(function, [spec_of(atom) for atom in operands])
        env: dict[Var, Atom] = dict(zip(program.invars, operands, strict=True))
        info = _common_place(match.eqns)
        for eqn in program.eqns:
            outvars = fresh_outvars(eqn)
            invars = [resolve(env, atom) for atom in eqn.invars]
            env.update(zip(eqn.outvars, outvars, strict=True))
            self._eqns.append(eqn.replace(invars=invars, outvars=outvars, source_info=info))
        return tuple(resolve(env, atom) for atom in program.outvars)

    def finish(self) -> Graph:
        """The rewritten graph."""
        eqns = [eqn.replace(invars=[resolve(self._renamed, atom) for atom in eqn.invars]) for eqn in self._eqns]
        outvars = [resolve(self._renamed, atom) for _, atom in self._outputs]
        live = _live_in_order(eqns, outvars)
        return _assemble(self.graph, self._inputs, [output for output, _ in self._outputs], live, outvars)


def eliminate_dead_code(graph: Graph) -> Graph:
    """The graph without equations and parameters that no output needs."""
    return Rewriter(graph).finish()


def _live_in_order(eqns: Sequence[JaxprEqn], outvars: Sequence[Atom]) -> list[JaxprEqn]:
    """The equations that the outputs need, each after what it reads, otherwise in the order in which their results are
    first needed by the original sequence: stable, so that dumps of two passes can be compared.

    Raises ValueError for a cycle.
    """
    producers = {out: eqn for eqn in eqns for out in eqn.outvars}
    needed: set[int] = set()
    stack: list[Var] = vars_of(outvars)
    while stack:
        eqn = producers.get(stack.pop())
        if eqn is not None and id(eqn) not in needed:
            needed.add(id(eqn))
            stack.extend(vars_of(eqn.invars))
    ordered: list[JaxprEqn] = []
    placed: set[int] = set()
    for root in eqns:
        if id(root) in needed:
            _place(root, producers, placed, ordered)
    return ordered


def _place(root: JaxprEqn, producers: dict[Var, JaxprEqn], placed: set[int], ordered: list[JaxprEqn]) -> None:
    """Appends `root` after everything it reads; a loop and not a recursion, since graphs are deep."""
    stack, opened = [root], set()
    while stack:
        eqn = stack[-1]
        if id(eqn) in placed:
            stack.pop()
            continue
        waiting = [producers[v] for v in vars_of(eqn.invars) if v in producers and id(producers[v]) not in placed]
        if waiting:
            if id(eqn) in opened:
                raise ValueError(
                    f"{eqn.primitive.name} is computed from its own result: a replacement reads what it gives"
                )
            opened.add(id(eqn))
            stack.extend(reversed(waiting))
        else:
            placed.add(id(eqn))
            ordered.append(stack.pop())


def _common_place(eqns: Sequence[JaxprEqn]) -> Any:
    """Source information that says where all of some equations are: their innermost common scope."""
    info = eqns[-1].source_info
    stacks = [eqn.source_info.name_stack for eqn in eqns]
    common = []
    for scopes in zip(*(stack.stack for stack in stacks), strict=False):
        if len(set(scopes)) > 1:
            break
        common.append(scopes[0])
    return info.replace(name_stack=dataclasses.replace(stacks[-1], stack=tuple(common)))


def _assemble(
    graph: Graph,
    inputs: Sequence[tuple[Input, Var]],
    outputs: Sequence[Output],
    eqns: Sequence[JaxprEqn],
    outvars: Sequence[Atom],
) -> Graph:
    used = {var for eqn in eqns for var in vars_of(eqn.invars)} | set(vars_of(outvars))
    kept = [(entry, var) for entry, var in inputs if var in used]
    kept.sort(key=lambda pair: KINDS.index(pair[0].kind))
    jaxpr = graph.jaxpr.replace(
        invars=[var for _, var in kept], outvars=list(outvars), eqns=list(eqns), debug_info=_anonymous(graph)
    )
    return Graph(tuple(entry for entry, _ in kept), tuple(outputs), jaxpr)


def _anonymous(graph: Graph) -> Any:
    """Debug info without argument names, which would no longer line up with the inputs."""
    return graph.jaxpr.debug_info._replace(arg_names=None, result_paths=None)
