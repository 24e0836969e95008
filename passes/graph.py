"""The IR: one flat jaxpr whose inputs have names, kinds and axis letters.

Invariants, checked by `passes.verify` after every pass:

- the jaxpr has no constants; every array a graph needs is a named `Input`;
- layers are unrolled, and calls (`jit`, `closed_call`, `custom_jvp_call`) are inlined;
- every `cache` input is replaced by exactly one output (`Output.replaces`), written by one chain of ops, and donated.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any
from typing import Literal as Choice

import jax
import numpy as np

from jaxserve._compat import Atom, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jaxserve.pallas_kernels import OPS, QuantFormat

Kind = Choice["param", "cache", "state", "arg"]
KINDS = ("param", "cache", "state", "arg")  # also the order in which a rewritten graph lists its inputs

Values = dict[Var, Any]


@dataclasses.dataclass(frozen=True)
class Stored:
    """How a checkpoint keeps a quantized parameter.

    `format` holds it bit for bit if `exact`, else it is the nearest there is. `name` is what the checkpoint calls the
    form (`Q4_K`, `GPTQ`), empty if it does not matter. `activation` is what whatever the weight multiplies is to be
    quantized to, in the words of `quantized_matmul`. The scale of `int8-static` is the checkpoint's, too: no parameter
    of the graph, but weight edits may read it at `input_scale_path`.
    """

    format: QuantFormat
    name: str = ""
    exact: bool = True
    activation: str | None = None

    def __str__(self) -> str:
        activation = f", activations {self.activation}" if self.activation else ""
        return f"{self.format}{'' if self.exact else ', rounded'}{activation}"

    @property
    def note(self) -> str:
        """What keeping it in this form means, for people."""
        if not self.exact:
            return f"no form holds {self.name} exactly, {self.format} is the nearest"
        return f"{self.name} kept exactly as {self}" if self.name else f"kept exactly as {self}"


def input_scale_path(path: str) -> str:
    """Where a checkpoint keeps the static scale of what the weight at `path` multiplies, float32 []."""
    return f"{path}/input_scale"


@dataclasses.dataclass(frozen=True)
class Input:
    """One argument of a graph.

    `path` names it (a parameter's path in the model's tree, `kv/0/k`, `tokens`); `axes` holds one letter or word an
    axis, separated by spaces; `stored` is the quantized form in which the checkpoint keeps a parameter, if it does.
    """

    path: str
    kind: Kind
    aval: jax.ShapeDtypeStruct
    axes: str = ""
    stored: Stored | None = None


@dataclasses.dataclass(frozen=True)
class Output:
    """One result of a graph; `replaces` is the path of the cache or state input whose buffer it takes over."""

    name: str
    aval: jax.ShapeDtypeStruct
    replaces: str | None = None


@dataclasses.dataclass(frozen=True)
class Graph:
    """A program: `jaxpr.invars` correspond to `inputs`, `jaxpr.outvars` to `outputs`."""

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    jaxpr: Jaxpr

    @property
    def eqns(self) -> Sequence[JaxprEqn]:
        return self.jaxpr.eqns

    @property
    def donated(self) -> tuple[str, ...]:
        """Paths of the inputs whose buffers the outputs take over."""
        return tuple(output.replaces for output in self.outputs if output.replaces is not None)

    @cached_property
    def input_scales(self) -> frozenset[str]:
        """Paths of the static scales that the checkpoint has beside its weights."""
        forms = {entry.path: entry.stored for entry in self.inputs if entry.stored}
        return frozenset(input_scale_path(path) for path, form in forms.items() if form.activation == "int8-static")

    @cached_property
    def _input_of_var(self) -> dict[Var, Input]:
        return dict(zip(self.jaxpr.invars, self.inputs, strict=True))

    @cached_property
    def _var_of_path(self) -> dict[str, Var]:
        return {entry.path: var for var, entry in self._input_of_var.items()}

    @cached_property
    def _producers(self) -> dict[Var, JaxprEqn]:
        return {out: eqn for eqn in self.eqns for out in eqn.outvars}

    @cached_property
    def _users(self) -> dict[Var, list[JaxprEqn]]:
        users: dict[Var, list[JaxprEqn]] = {}
        for eqn in self.eqns:
            for atom in dict.fromkeys(a for a in eqn.invars if isinstance(a, Var)):
                users.setdefault(atom, []).append(eqn)
        return users

    def input_of(self, atom: Atom) -> Input | None:
        """The input that `atom` is, or None when an equation computes it."""
        return None if isinstance(atom, Literal) else self._input_of_var.get(atom)

    def param_of(self, atom: Atom) -> Input | None:
        """The parameter that `atom` is, or None."""
        entry = self.input_of(atom)
        return entry if entry is not None and entry.kind == "param" else None

    def var(self, path: str) -> Var:
        """The variable of the input at `path`; KeyError when there is none."""
        return self._var_of_path[path]

    def has_input(self, path: str) -> bool:
        return path in self._var_of_path

    def producer(self, atom: Atom) -> JaxprEqn | None:
        """The equation that computes `atom`, or None for inputs and literals."""
        return None if isinstance(atom, Literal) else self._producers.get(atom)

    def users(self, var: Var) -> list[JaxprEqn]:
        """The equations that read `var`, in program order, each once."""
        return self._users.get(var, [])

    def is_output(self, var: Var) -> bool:
        return any(var is out for out in self.jaxpr.outvars)

    def only_user(self, var: Var) -> JaxprEqn | None:
        """The single equation that reads `var`, or None when there are several or `var` is also an output."""
        users = self.users(var)
        return users[0] if len(users) == 1 and not self.is_output(var) else None

    def of_kind(self, kind: Kind) -> tuple[Input, ...]:
        return tuple(entry for entry in self.inputs if entry.kind == kind)

    def call(self, values: Mapping[str, jax.Array | np.ndarray]) -> dict[str, jax.Array]:
        """Runs the graph on inputs by path (others are ignored); gives outputs by name. Traceable by jit."""
        results = jaxpr_as_fun(self.jaxpr)(*(values[entry.path] for entry in self.inputs))
        return {output.name: value for output, value in zip(self.outputs, results, strict=True)}

    def call_references(self, values: Mapping[str, jax.Array | np.ndarray]) -> dict[str, jax.Array]:
        """What `call` computes, by the references of our ops alone: no kernel takes part."""
        known: Values = {var: values[entry.path] for var, entry in self._input_of_var.items()}
        for eqn in self.eqns:
            op = OPS.get(eqn.primitive.name)
            run_eqn(eqn, known, partial(op.reference if op else eqn.primitive.bind, **eqn.params))
        return self.results(known)

    def results(self, known: Values) -> dict[str, jax.Array]:
        """The outputs by name, of the values of all variables."""
        ends = zip(self.outputs, self.jaxpr.outvars, strict=True)
        return {output.name: value_of(atom, known) for output, atom in ends}


def value_of(atom: Atom, known: Values) -> Any:
    """The value of a variable that is known, or of a literal."""
    return atom.val if isinstance(atom, Literal) else known[atom]


def run_eqn(eqn: JaxprEqn, known: Values, compute: Callable[..., Any]) -> None:
    """Adds what `compute` makes of an equation's operands to the values known."""
    found = compute(*(value_of(atom, known) for atom in eqn.invars))
    known.update(zip(eqn.outvars, found if eqn.primitive.multiple_results else [found], strict=True))


def where(eqn: JaxprEqn) -> str:
    """The place in the model that an equation comes from, for people (`layers_0/self_attn/q_proj`)."""
    stack = str(eqn.source_info.name_stack)
    return stack.split("/", 1)[1] if "/" in stack else stack or eqn.primitive.name
