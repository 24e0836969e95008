"""Checks after every pass: the structure of the graph, and the numbers of each replaced region."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve._compat import Atom, JaxprEqn, Literal, Var, check_jaxpr, jaxpr_as_fun, spec_of
from jaxserve.passes import statistics
from jaxserve.passes.graph import Graph
from jaxserve.passes.loops import params_of_any_layer
from jaxserve.passes.pipeline import Stage
from jaxserve.passes.rewrite import Replaced, Values
from jaxserve.passes.statistics import Statistic
from jaxserve.passes.weights import dense


class VerifyError(AssertionError):
    """A pass broke an invariant or changed the numbers; the message names the pass and the place."""


def verify_structure(before: Graph, stage: Stage) -> None:
    """Raises `VerifyError` unless the pass's graph is well formed and keeps its outputs."""
    graph, name = stage.result.graph, stage.step.name
    try:
        check_jaxpr(graph.jaxpr)
    except Exception as error:  # check_jaxpr raises several private types; every one of them is a broken graph
        raise VerifyError(f"after {name}: {error}") from error
    paths = [entry.path for entry in graph.inputs]
    if len(set(paths)) != len(paths):
        raise VerifyError(f"after {name}: two inputs share a path: {sorted({p for p in paths if paths.count(p) > 1})}")
    for entry, var in zip(graph.inputs, graph.jaxpr.invars, strict=True):
        if entry.aval != spec_of(var):
            raise VerifyError(f"after {name}: input {entry.path} is declared {entry.aval} and used as {var.aval}")
    kept = graph.outputs[: len(before.outputs)]
    if kept != before.outputs:
        raise VerifyError(f"after {name}: outputs changed from {before.outputs} to {kept}")
    if len(graph.outputs) > len(before.outputs) and not stage.step.adds_outputs:
        raise VerifyError(f"after {name}: outputs were added but the pass does not declare it")
    _verify_edits(before, stage)
    _verify_caches(graph, name)


def _verify_edits(before: Graph, stage: Stage) -> None:
    """The weight edits read what exists, and write every parameter that the pass added or reshaped."""
    graph, name = stage.result.graph, stage.step.name
    known = {entry.path: entry.aval for entry in before.of_kind("param")}
    measured = {statistic.path for statistic in stage.result.statistics}
    for statistic in stage.result.statistics:
        if before.input_of(statistic.var) is None and before.producer(statistic.var) is None:
            raise VerifyError(f"after {name}: {statistic.path} is of a value that the graph before the pass lacks")
        if not statistics.is_statistic(statistic.path):
            raise VerifyError(f"after {name}: the statistic {statistic.path!r} could be taken for a parameter")
    written: set[str] = set()
    for edit in stage.result.edits:
        there = known.keys() | written | measured | before.input_scales
        unknown = [path for path in edit.reads if path not in there]
        if unknown:
            raise VerifyError(
                f"after {name}: the edit of {', '.join(edit.writes)} reads {unknown[0]}, which is not there"
            )
        written.update(edit.writes)
    for entry in graph.of_kind("param"):
        if known.get(entry.path) != entry.aval and entry.path not in written:
            raise VerifyError(f"after {name}: no weight edit writes {entry.path}, which the pass added or changed")


def _verify_caches(graph: Graph, name: str) -> None:
    """Each cache is read and written by one chain, and returned exactly once, at the end of that chain."""
    replaced = list(graph.donated)
    buffers = {entry.path: entry.aval for kind in ("cache", "state") for entry in graph.of_kind(kind)}
    for output in graph.outputs:
        if output.replaces is not None and buffers.get(output.replaces) != output.aval:
            raise VerifyError(f"after {name}: {output.name} replaces {output.replaces}, which is no input of its shape")
    for entry in graph.of_kind("cache"):
        if replaced.count(entry.path) != 1:
            raise VerifyError(
                f"after {name}: cache {entry.path} is returned {replaced.count(entry.path)} times, not once"
            )
        index = next(i for i, output in enumerate(graph.outputs) if output.replaces == entry.path)
        var, result = graph.var(entry.path), graph.jaxpr.outvars[index]
        written = _next_version(graph, var)
        while written is not None and written is not result:
            written = _next_version(graph, var := written)
        if written is None:
            raise VerifyError(
                f"after {name}: cache {entry.path} is not written by one chain of ops that gives its output: {var} is "
                f"read by {', '.join(user.primitive.name for user in graph.users(var)) or 'nothing'}"
            )


def _next_version(graph: Graph, var: Var) -> Var | None:
    """What the one op that writes the cache `var` makes of it; None unless there is such an op and it comes after all
    others that read `var`, so that it can write in place. Such ops take and give their caches in one order."""
    users = graph.users(var)
    writers = [user for user in users if any(out.aval == var.aval for out in user.outvars)]
    if len(writers) != 1 or users[-1] is not writers[0] or graph.is_output(var):
        return None
    index = writers[0].invars.index(var)
    return writers[0].outvars[index] if index < len(writers[0].outvars) else None


class NumberCheck:
    """Runs each replaced region and its replacement on the same random numbers, once per distinct shape."""

    def __init__(self, seed: int = 0):
        self._rng = np.random.default_rng(seed)
        self._seen: set[str] = set()
        self.checked = 0

    def __call__(self, before: Graph, stage: Stage) -> None:
        """Raises `VerifyError` when a region moved by more than the pass's tolerance."""
        for replaced in stage.result.replaced:
            signature = _signature(before, stage, replaced)
            if signature not in self._seen and self._check(before, stage, replaced):
                self._seen.add(signature)
                self.checked += 1

    def _check(self, before: Graph, stage: Stage, replaced: Replaced) -> bool:
        """False when no numbers can be made for the region."""
        values = {atom: self._random(atom) for atom in replaced.match.operands if isinstance(atom, Var)}
        old_values, new_values = values, {**values, **self._edited(before, stage, replaced, values)}
        if replaced.examples is not None:
            extra = replaced.examples(self._rng, values)
            if extra is None:
                return False
            old_values, new_values = {**values, **extra[0]}, {**new_values, **extra[1]}
        missing = [atom for atom in replaced.new_operands if isinstance(atom, Var) and atom not in new_values]
        if missing:
            entry = stage.result.graph.input_of(missing[0])
            what = entry.path if entry is not None else "a value from outside the match"
            raise VerifyError(f"after {stage.step.name}: {replaced.match.where} reads {what}, which no edit writes")
        old = _run(replaced.match.eqns, replaced.match.operands, replaced.match.results, before, old_values)
        new = jax.jit(replaced.new)(*(_cast(new_values, atom) for atom in replaced.new_operands))
        new = new if isinstance(new, tuple | list) else (new,)
        for want, have in zip(old, new, strict=False):
            allowed = replaced.tolerance + _rounding(want.dtype)
            moved = relative_error(have, want)
            if not moved <= allowed:
                raise VerifyError(
                    f"after {stage.step.name}: {replaced.match.where} moved by {moved:.3g} (relative norm), "
                    f"{allowed:.3g} is allowed"
                )
        return True

    def _edited(self, before: Graph, stage: Stage, replaced: Replaced, values: Values) -> Values:
        """The parameters that the replacement's edits write, from those in `values` (or random ones)."""
        graph, written = stage.result.graph, dict[str, np.ndarray]()
        measured = {statistic.path: statistic for statistic in stage.result.statistics}
        for edit in replaced.edits:
            reads = []
            for path in edit.reads:
                if path in measured and path not in written:
                    written[path] = self._statistic(before, measured[path], replaced, values)
                elif path in before.input_scales:
                    written[path] = _input_scale(before, replaced, values)
                elif path not in written:
                    var = before.var(path)
                    written[path] = values[var] if var in values else self._elsewhere(var)
                reads.append(_readable(written[path]))
            results = [dense(value) for value in edit.function(*reads)]
            if len(results) != len(edit.writes):
                raise VerifyError(
                    f"after {stage.step.name}: the edit of {', '.join(edit.writes)} gives {len(results)} values"
                )
            for path, value in zip(edit.writes, results, strict=True):
                if graph.has_input(path) and value.shape != spec_of(graph.var(path)).shape:
                    raise VerifyError(
                        f"after {stage.step.name}: the edit of {path} gives {list(value.shape)}, the graph declares "
                        f"{list(spec_of(graph.var(path)).shape)}"
                    )
                written[path] = value
        return {graph.var(path): value for path, value in written.items() if graph.has_input(path)}

    def _statistic(self, before: Graph, statistic: Statistic, replaced: Replaced, values: Values) -> np.ndarray:
        """A statistic of the numbers that the region is run on; of random ones for an activation elsewhere."""
        match, var = replaced.match, statistic.var
        if var not in values and any(var in eqn.outvars for eqn in match.eqns):
            (inner,) = _run(match.eqns, match.operands, (var,), before, values)
            return statistics.compute(statistic.kind, inner)
        return statistics.compute(statistic.kind, values[var] if var in values else self._random(var))

    def _random(self, atom: Atom) -> np.ndarray:
        return self._numbers(spec_of(atom).shape, spec_of(atom).dtype)

    def _elsewhere(self, var: Var) -> np.ndarray:
        """For a parameter that the region does not read: one row again and again, which takes no memory. An edit may
        read one of every layer, and the model need not fit into memory."""
        shape = spec_of(var).shape
        return np.broadcast_to(_readable(self._numbers(shape[-1:], spec_of(var).dtype)), shape)

    def _numbers(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        if jnp.issubdtype(dtype, jnp.floating):
            return self._rng.standard_normal(shape, np.float32).astype(dtype)
        return self._rng.integers(0, 2, shape, np.uint8).astype(dtype)


def _readable(array: np.ndarray) -> np.ndarray:
    """As edits are given it: in float32, but codes of a byte as they are, since a stack has those of every layer."""
    return array if array.dtype.itemsize == 1 else np.asarray(array, np.float32)


def _input_scale(before: Graph, replaced: Replaced, values: Values) -> np.ndarray:
    """A static scale that fits the numbers a region is run on: that of int8 codes for its first operand that is no
    parameter."""
    x = next(atom for atom in replaced.match.operands if atom in values and not before.param_of(atom))
    return np.asarray(statistics.compute("absmax", values[x]).max() / 127, np.float32)


def relative_error(have: jax.Array | np.ndarray, want: jax.Array | np.ndarray) -> float:
    """||have - want|| / ||want|| in float64; inf when either is not finite."""
    a, b = np.asarray(have, np.float64), np.asarray(want, np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30))


def _rounding(dtype: np.dtype) -> float:
    """Relative error that the order of summation may bring."""
    return 4 * float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.floating) else 0.0


def _signature(before: Graph, stage: Stage, replaced: Replaced) -> str:
    """Equal for regions that differ only in which layer they are in."""
    names: dict[Var, str] = {}

    def name(atom: Atom) -> str:
        if isinstance(atom, Literal):
            return f"{atom.val}:{atom.aval}"
        return names.setdefault(atom, f"%{len(names)}:{atom.aval}")

    lines = [str(stage.step), str(replaced.tolerance), ",".join(map(name, replaced.match.operands))]
    for eqn in _in_order(before, replaced.match.eqns):
        params = params_of_any_layer(before, eqn)
        lines.append(f"{list(map(name, eqn.outvars))} = {eqn.primitive.name} {list(map(name, eqn.invars))} {params}")
    return "\n".join([*lines, ",".join(map(name, replaced.new_operands))])


def _in_order(graph: Graph, eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    inside = {id(eqn) for eqn in eqns}
    return [eqn for eqn in graph.eqns if id(eqn) in inside]


def _run(
    eqns: tuple[JaxprEqn, ...], operands: tuple[Atom, ...], results: tuple[Var, ...], graph: Graph, values: dict
) -> list[jax.Array]:
    free = [atom for atom in dict.fromkeys(a for a in operands if isinstance(a, Var))]
    region = graph.jaxpr.replace(
        invars=free,
        outvars=list(results),
        eqns=_in_order(graph, eqns),
        debug_info=graph.jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )
    return jax.jit(jaxpr_as_fun(region))(*(_cast(values, atom) for atom in free))


def _cast(values: dict, atom: Atom) -> jax.Array:
    if isinstance(atom, Literal):
        return jnp.asarray(atom.val, spec_of(atom).dtype)
    return jnp.asarray(np.asarray(values[atom]).astype(spec_of(atom).dtype, copy=False))  # never twice as float32


@dataclasses.dataclass(frozen=True)
class Verifier:
    """The hook for `run_pipeline`: structure always, numbers once per distinct region."""

    numbers: NumberCheck | None = None

    def __call__(self, before: Graph, stage: Stage) -> None:
        verify_structure(before, stage)
        if self.numbers is not None:
            self.numbers(before, stage)
