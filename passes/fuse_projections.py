"""fuse-qkv and fuse-gate-up: matmuls that read the same activation become one, with their weights stacked along O."""

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import ClassVar

import jax
import numpy as np

from jaxserve._compat import Atom, JaxprEqn, Var, spec_of
from jaxserve.pallas_kernels import QuantizedTensor, dense_matmul
from jaxserve.passes.graph import Graph, Input, Stored, where
from jaxserve.passes.match import Match, NoMatch
from jaxserve.passes.pipeline import Context, Pass, PassResult
from jaxserve.passes.readers import MATMUL
from jaxserve.passes.rewrite import Rewriter
from jaxserve.passes.weights import Value, WeightEdit, dense

# What may stand between a projection and the attention that reads it.
HEADWISE = ("jaxserve.rope", "jaxserve.rms_norm", "reshape", "add", "broadcast_in_dim", "convert_element_type")
# What an activation function is made of.
ELEMENTWISE = (
    *(
        "mul",
        "add",
        "sub",
        "div",
        "neg",
        "max",
        "min",
        "exp",
        "logistic",
        "tanh",
        "erf",
        "erfc",
        "integer_pow",
        "square",
    ),
    *("broadcast_in_dim", "convert_element_type", "copy"),
)


@dataclasses.dataclass(frozen=True)
class FuseQkv(Pass):
    """q, k and v of one attention become one matmul with weight [(N+2K)H, D].

    The projections are found from the attention op backwards, through rotary positions, head norms and biases.
    """

    name: ClassVar[str] = "fuse-qkv"

    def run(self, graph: Graph, context: Context) -> PassResult:
        del context
        rewriter = Rewriter(graph)
        report: list[Match | NoMatch] = []
        for eqn in graph.eqns:
            if eqn.primitive.name != "jaxserve.attention":
                continue
            found = [upstream_matmuls(graph, atom, HEADWISE) for atom in eqn.invars[:3]]
            if any(sources is None or len(sources) != 1 for sources in found):
                report.append(NoMatch(where(eqn), "q, k or v does not come from exactly one dense_matmul"))
            else:
                report.append(stack_matmuls(rewriter, [sources[0] for sources in found if sources], "qkv_proj"))
        return PassResult.of(rewriter, report)


@dataclasses.dataclass(frozen=True)
class FuseGateUp(Pass):
    """The two matmuls of a gated MLP, act(x Wg^T) * (x Wu^T), become one with weight [2F, D]."""

    name: ClassVar[str] = "fuse-gate-up"

    def run(self, graph: Graph, context: Context) -> PassResult:
        del context
        rewriter = Rewriter(graph)
        report: list[Match | NoMatch] = []
        for eqn in graph.eqns:
            if eqn.primitive.name != "mul" or len(spec_of(eqn.outvars[0]).shape) != 2:
                continue
            left, right = (upstream_matmuls(graph, atom, ELEMENTWISE) for atom in eqn.invars)
            if left is None or right is None:
                if len(left or right or ()) == 1:
                    report.append(
                        NoMatch(where(eqn), "one factor is a matmul, the other more than an activation of one")
                    )
            # One matmul on both sides is an activation function such as x * sigmoid(x).
            elif len(left) == len(right) == 1 and left[0] is not right[0]:
                report.append(stack_matmuls(rewriter, [left[0], right[0]], "gate_up_proj"))
        return PassResult.of(rewriter, report)


def upstream_matmuls(graph: Graph, atom: Atom, through: Sequence[str]) -> list[JaxprEqn] | None:
    """The dense matmuls that `atom` is computed from by the ops in `through` alone; None if anything else is met."""
    found: dict[int, JaxprEqn] = {}
    visited: set[int] = set()
    stack = [atom]
    while stack:
        eqn = graph.producer(stack.pop())
        if eqn is None or id(eqn) in visited:  # None for inputs and literals: biases, scales, constants
            continue
        visited.add(id(eqn))
        if eqn.primitive.name == MATMUL:
            found[id(eqn)] = eqn
        elif eqn.primitive.name in through:
            stack.extend(eqn.invars)
        else:
            return None
    return list(found.values())


def stack_matmuls(rewriter: Rewriter, eqns: Sequence[JaxprEqn], name: str) -> Match | NoMatch:
    """Replaces matmuls of one activation by one matmul and slices of its result; the new weight is called `name`."""
    eqns = list({id(eqn): eqn for eqn in eqns}.values())  # k and v may be one matmul
    graph, place = rewriter.graph, where(eqns[0]).rsplit("/", 1)[0]
    entries = [graph.param_of(eqn.invars[1]) for eqn in eqns]
    problem = next(_problems(rewriter, eqns, entries), None)
    if problem:
        return NoMatch(place, problem)
    parts = [entry for entry in entries if entry is not None]
    sizes = [entry.aval.shape[0] for entry in parts]
    path = "/".join([*parts[0].path.split("/")[:-2], name, "kernel"])
    if rewriter.has_input(path):
        return NoMatch(place, f"there is already a parameter called {path}")
    aval = jax.ShapeDtypeStruct((sum(sizes), parts[0].aval.shape[1]), parts[0].aval.dtype)
    letters = [entry.axes.split() for entry in parts]
    axes = f"{'+'.join(pair[0] for pair in letters)} {letters[0][1]}" if all(letters) else ""
    weight = rewriter.add_input(Input(path, "param", aval, axes, _stacked_form(parts)))
    results: tuple[Var, ...] = tuple(eqn.outvars[0] for eqn in eqns)
    operands = (eqns[0].invars[0], *(eqn.invars[1] for eqn in eqns))
    match = Match(place, operands, tuple(eqns), results, f"{len(eqns)} matmuls stacked into {path} {list(aval.shape)}")
    out_dtype, starts = eqns[0].params["out_dtype"], np.cumsum([0, *sizes]).tolist()

    def fused(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        y = dense_matmul(x, w, out_dtype=out_dtype)
        return tuple(jax.lax.slice_in_dim(y, *bounds, axis=y.ndim - 1) for bounds in pairwise(starts))

    edit = WeightEdit(tuple(entry.path for entry in parts), (path,), stack)
    rewriter.replace(match, fused, [eqns[0].invars[0], weight], [edit])
    return match


def stack(*values: Value) -> tuple[Value, ...]:
    """Weights stacked along their outputs; quantized blocks of one format stay as they are."""
    quantized = [value for value in values if isinstance(value, QuantizedTensor)]
    if len(quantized) == len(values) and len({value.format for value in quantized}) == 1:
        return (QuantizedTensor.concatenate(quantized),)
    return (np.concatenate([dense(value) for value in values]),)


def _problems(rewriter: Rewriter, eqns: Sequence[JaxprEqn], entries: Sequence[Input | None]) -> Iterator[str]:
    """Every reason not to stack, most telling first."""
    graph = rewriter.graph
    if len(eqns) == 1:
        yield "they are one matmul already"
    if any(rewriter.is_replaced(eqn.outvars[0]) for eqn in eqns):
        yield "one of the matmuls is part of another stack already"
    if any(entry is None for entry in entries):
        yield "a weight is computed, not a parameter"
        return
    parts = [entry for entry in entries if entry is not None]
    if len({eqn.invars[0] for eqn in eqns}) != 1:
        yield f"{', '.join(entry.path for entry in parts)} read different activations"
    for eqn, entry in zip(eqns, parts, strict=True):
        if graph.only_user(graph.var(entry.path)) is not eqn:
            yield f"{entry.path} has other readers (tied weights stay as they are)"
    if len({eqn.params["out_dtype"] for eqn in eqns}) != 1:
        yield "their results have different dtypes"
    forms = {str(entry.stored) for entry in parts if entry.stored} | {"dense" for entry in parts if not entry.stored}
    if len(forms) != 1:
        yield f"the checkpoint stores them in different forms ({', '.join(sorted(forms))}), which stacking would lose"
    if any(entry.stored and entry.stored.format.ordered for entry in parts):
        yield "the checkpoint stores each with an input order of its own, which stacking would lose"
    if any(entry.stored and entry.stored.activation == "int8-static" for entry in parts):
        yield "the checkpoint has a static scale of the activations for each, which stacking would lose"


def _stacked_form(parts: Sequence[Input]) -> Stored | None:
    """The form of weights that are stored in the same one, under the names that any of them has."""
    forms = [entry.stored for entry in parts if entry.stored]
    names = dict.fromkeys(form.name for form in forms)
    return dataclasses.replace(forms[0], name=" and ".join(names)) if forms else None
