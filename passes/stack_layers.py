"""stack-layers: parameters that layers have alike become one array each."""

import dataclasses
import itertools
import re
from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import numpy as np

from jaxserve._compat import JaxprEqn, Var, spec_of
from jaxserve.passes.graph import Graph, Input, where
from jaxserve.passes.match import Match, NoMatch
from jaxserve.passes.pipeline import Context, Pass, PassResult, PipelineResult
from jaxserve.passes.readers import QUANTIZED
from jaxserve.passes.rewrite import Rewriter
from jaxserve.passes.weights import Value, WeightEdit, dense

LAYER = re.compile(r"_(\d+)(?=/)")


@dataclasses.dataclass(frozen=True)
class StackLayers(Pass):
    """The parameters layers_0/p, layers_1/p, ... of one shape become layers_0-9/p with a leading axis L.

    quantized_matmul reads its `layer` of the stacks of its weight, in place; a vector (a norm's scale, a bias) is cut
    out of its stack where it is read. What the host pays for a step goes by the number of arrays that it hands over,
    which is then that of one layer. A dense matrix stays as it is: XLA would copy its layer out of the stack first.
    """

    name: ClassVar[str] = "stack-layers"

    def run(self, graph: Graph, context: Context) -> PassResult:
        del context
        rewriter = Rewriter(graph)
        report: list[Match | NoMatch] = []
        stacks, alone = _stacks(graph)
        for members in stacks:
            report += _stack(rewriter, members)
        report += [NoMatch(path, reason) for path, reason in alone.items()]
        return PassResult.of(rewriter, report)


def unstacked(result: PipelineResult) -> Graph:
    """The last graph of a pipeline in which every layer has weights of its own: for reports that speak of layers."""
    before = list(itertools.takewhile(lambda stage: stage.step.name != StackLayers.name, result.stages))
    return before[-1].result.graph if before else result.graph


@dataclasses.dataclass(frozen=True)
class _Member:
    """What one layer adds to stacks that are read together: the parameters, and the equations that read them."""

    params: tuple[Input, ...]
    readers: tuple[JaxprEqn, ...]

    @property
    def layer(self) -> int:
        found = LAYER.search(self.params[0].path)
        assert found is not None
        return int(found[1])


def _stacks(graph: Graph) -> tuple[list[list[_Member]], dict[str, str]]:
    """The groups of parameters to stack, in the order of their layers, and why others stay alone, by path without a
    number."""
    groups: dict[Any, list[_Member]] = {}
    alone: dict[str, str] = {}
    taken: set[str] = set()
    for entry in graph.of_kind("param"):
        if entry.path in taken or not LAYER.search(entry.path):
            continue
        member = _member(graph, entry)
        if isinstance(member, str):
            alone.setdefault(_unnumbered(entry.path), member)
            continue
        taken.update(param.path for param in member.params)
        alike = tuple((_unnumbered(param.path), param.aval.shape, param.aval.dtype.name) for param in member.params)
        calls = tuple((eqn.primitive.name, str(eqn.params)) for eqn in member.readers)
        groups.setdefault((alike, calls), []).append(member)
    for members in groups.values():
        if len(members) == 1:
            alone.setdefault(members[0].params[0].path, "no other layer has one like it")
    stacks = [sorted(members, key=lambda member: member.layer) for members in groups.values() if len(members) > 1]
    return stacks, alone


def _member(graph: Graph, entry: Input) -> _Member | str:
    """The parameters that are stacked with `entry` and who reads them, or why it stays alone."""
    var = graph.var(entry.path)
    readers = tuple(graph.users(var))
    if graph.is_output(var):
        return "it is also an output of the graph"
    if len(entry.aval.shape) == 1 and not any(eqn.primitive.name == QUANTIZED for eqn in readers):
        return _Member((entry,), readers)
    if len(readers) != 1 or readers[0].primitive.name != QUANTIZED:
        return f"read by {', '.join(sorted({eqn.primitive.name for eqn in readers}))}, which takes no layer of a stack"
    (eqn,) = readers
    weight = eqn.invars[1 : 1 + len(eqn.params["format"].fields)]
    params = [graph.input_of(atom) for atom in weight]
    known = tuple(param for param in params if param is not None and param.kind == "param")
    if len(known) < len(params) or any(graph.users(graph.var(param.path)) != [eqn] for param in known):
        return "its matmul shares an array with another"
    if var not in weight:
        return "it is one number, the static scale of an activation"
    return _Member(known, readers)


def _stack(rewriter: Rewriter, members: list[_Member]) -> Iterable[Match]:
    """Stacks what the members have, and gives their readers the stacks."""
    stacked, edits = [], []
    for params in zip(*(member.params for member in members), strict=True):
        first, count = params[0], len(params)
        path = LAYER.sub(f"_{members[0].layer}-{members[-1].layer}", first.path, count=1)
        aval = jax.ShapeDtypeStruct((count, *first.aval.shape), first.aval.dtype)
        stacked.append(rewriter.add_input(Input(path, "param", aval, f"L {first.axes}".rstrip())))
        edits.append(WeightEdit(tuple(param.path for param in params), (path,), _stacked))
    for index, member in enumerate(members):
        own = [rewriter.graph.var(param.path) for param in member.params]
        for eqn in member.readers:
            yield _substitute(rewriter, eqn, dict(zip(own, stacked, strict=True)), index, edits)


def _substitute(
    rewriter: Rewriter, eqn: JaxprEqn, stacks: dict[Var, Var], index: int, edits: list[WeightEdit]
) -> Match:
    """Lets one equation read entry `index` of the stacks in place of the parameters they were made of."""
    is_stacked = [isinstance(atom, Var) and atom in stacks for atom in eqn.invars]
    operands = [stacks[atom] if isinstance(atom, Var) and atom in stacks else atom for atom in eqn.invars]

    def read(*values: jax.Array) -> Any:
        if eqn.primitive.name == QUANTIZED:
            return eqn.primitive.bind(*values, **{**eqn.params, "layer": index})
        pairs = zip(values, is_stacked, strict=True)
        cut = [jax.lax.index_in_dim(value, index, keepdims=False) if stack else value for value, stack in pairs]
        return eqn.primitive.bind(*cut, **eqn.params)

    note = f"layer {index} of {', '.join(str(list(spec_of(stack).shape)) for stack in stacks.values())}"
    match = Match(where(eqn), tuple(eqn.invars), (eqn,), tuple(eqn.outvars), note)
    rewriter.replace(match, read, operands, edits)
    return match


def _unnumbered(path: str) -> str:
    return LAYER.sub("_*", path, count=1)


def _stacked(*values: Value) -> tuple[np.ndarray, ...]:
    return (np.stack([dense(value) for value in values]),)
