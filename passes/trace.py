"""From a function of named parameters and arguments to a `Graph`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxserve import _compat
from jaxserve._compat import Atom, Jaxpr, JaxprEqn, Var
from jaxserve.pallas_kernels import OPS
from jaxserve.passes.graph import Graph, Input, Output

# Calls whose body takes the place of the call; the parameter that holds the body.
INLINED_CALLS = {"jit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}


class TraceError(ValueError):
    """The function cannot become a Graph; the message names the equation or the constant."""


def trace_graph(function: Callable[..., Any], inputs: Mapping[str, Input] | tuple[Input, ...]) -> Graph:
    """Traces `function(values)`, where `values` maps every input's path to an array, into a Graph.

    The function returns one array (named `out`) or a dict of arrays. Raises `TraceError` when it captures an array
    constant, or hides something a pass would match inside control flow.
    """
    entries = tuple(inputs.values()) if isinstance(inputs, Mapping) else inputs
    names: list[str] = []

    def flat(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        result = function({entry.path: array for entry, array in zip(entries, arrays, strict=True)})
        result = result if isinstance(result, dict) else {"out": result}
        names[:] = result
        return tuple(result.values())

    flattened = inline(_compat.trace(flat, *(entry.aval for entry in entries)))
    _refuse_hidden_ops(flattened)
    outputs = tuple(Output(name, _compat.spec_of(var)) for name, var in zip(names, flattened.outvars, strict=True))
    return Graph(entries, outputs, flattened)


def inline(jaxpr: Jaxpr) -> Jaxpr:
    """The same program with every call replaced by its body. Raises `TraceError` when it captures an array."""
    _refuse_constants(jaxpr)
    env: dict[Var, Atom] = {}
    eqns = list(_inlined(jaxpr, env, None))
    return jaxpr.replace(eqns=eqns, outvars=[resolve(env, out) for out in jaxpr.outvars])


def resolve(env: Mapping[Var, Atom], atom: Atom) -> Atom:
    """What `atom` is called after a substitution; chains are followed."""
    while isinstance(atom, Var) and atom in env:
        atom = env[atom]
    return atom


def _inlined(jaxpr: Jaxpr, env: dict[Var, Atom], outer: JaxprEqn | None) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        invars = [resolve(env, atom) for atom in eqn.invars]
        body_name = INLINED_CALLS.get(eqn.primitive.name)
        source = eqn.source_info
        if outer is not None:
            source = source.replace(name_stack=outer.source_info.name_stack + source.name_stack)
        if body_name is None:
            outvars = list(eqn.outvars)
            if outer is not None:  # a body may be called twice: each call needs its own variables
                outvars = _compat.fresh_outvars(eqn)
                env.update(zip(eqn.outvars, outvars, strict=True))
            yield eqn.replace(invars=invars, outvars=outvars, source_info=source)
            continue
        body = eqn.params[body_name]
        _refuse_constants(body)
        inner: dict[Var, Atom] = dict(zip(body.invars, invars, strict=True))
        yield from _inlined(body, inner, eqn.replace(source_info=source))
        env.update({out: resolve(inner, res) for out, res in zip(eqn.outvars, body.outvars, strict=True)})


def _refuse_constants(jaxpr: Jaxpr) -> None:
    for const in jaxpr.consts:
        if np.ndim(const) == 0:
            raise TraceError(f"a scalar constant {const!r} was captured as an array: write it as a Python number")
        raise TraceError(
            f"the traced function captures a constant of shape {np.shape(const)}: make it a parameter, a static "
            "parameter of an op, or compute it inside the function"
        )


def _refuse_hidden_ops(jaxpr: Jaxpr) -> None:
    """Whatever still has a body after inlining (control flow, remat, custom derivatives) is not looked into."""
    for eqn in jaxpr.eqns:
        hidden = {inner.primitive.name for inner in _all_eqns(eqn)}
        matched = sorted(name for name in hidden if name == "dot_general" or name in OPS)
        if matched:
            raise TraceError(
                f"{', '.join(matched)} inside {eqn.primitive.name!r} at {eqn.source_info.name_stack}: passes do not "
                "look into it; unroll it (layers are a Python loop here)"
            )


def _all_eqns(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    for body in _compat.jaxprs_in_params(eqn.params):
        for inner in body.eqns:
            yield inner
            yield from _all_eqns(inner)
