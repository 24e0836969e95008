"""A stable text form of a graph: what goes into artifacts, `--print-ir-after` and goldens.

Variables are numbered in program order, parameters are sorted, and nothing depends on JAX's own printer.
"""

import enum
import itertools
import re
from collections.abc import Iterator
from typing import Any

from jaxserve._compat import Atom, DropVar, Jaxpr, JaxprEqn, Literal, Var, spec_of
from jaxserve.passes.graph import Graph, where

_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u"}


def print_graph(graph: Graph, places: bool = True) -> str:
    """The graph as text, one line an input, an equation and an output; `places` says where equations come from."""
    names: dict[Var, str] = {}
    numbers = itertools.count()
    lines = ["graph {"]
    for entry, var in zip(graph.inputs, graph.jaxpr.invars, strict=True):
        names[var] = f"@{entry.path}"
        stored = f" stored({entry.stored})" if entry.stored else ""
        axes = f"  # {entry.axes}" if entry.axes else ""
        lines.append(f"  {entry.kind} @{entry.path}: {short(entry.aval)}{stored}{axes}")
    lines += ["", *_body(graph.jaxpr, names, numbers, "  ", show_place=places), ""]
    for output, atom in zip(graph.outputs, graph.jaxpr.outvars, strict=True):
        replaces = f" replaces @{output.replaces}" if output.replaces else ""
        lines.append(f"  return {output.name} = {_atom(atom, names)}: {short(output.aval)}{replaces}")
    return "\n".join([*lines, "}", ""])


def short(aval: Any) -> str:
    """`f32[8,576]` for an array type."""
    if not hasattr(aval, "dtype"):
        return str(aval)
    found = re.fullmatch(r"([a-z]+)(\d+)", str(aval.dtype))
    dtype = f"{_SHORT[found[1]]}{found[2]}" if found and found[1] in _SHORT else str(aval.dtype)
    return f"{dtype}[{','.join(map(str, aval.shape))}]"


def _body(
    jaxpr: Jaxpr, names: dict[Var, str], numbers: Iterator[int], indent: str, show_place: bool = False
) -> list[str]:
    lines, place = [], None
    for eqn in jaxpr.eqns:
        if show_place and where(eqn) != place:
            place = where(eqn)
            lines.append(f"{indent}# {place}")
        lines += _equation(eqn, names, numbers, indent)
    return lines


def _equation(eqn: JaxprEqn, names: dict[Var, str], numbers: Iterator[int], indent: str) -> list[str]:
    operands = ", ".join(_atom(atom, names) for atom in eqn.invars)
    results = []
    for var in eqn.outvars:
        if isinstance(var, DropVar):
            results.append("_")
        else:
            names[var] = f"%{next(numbers)}"
            results.append(f"{names[var]}: {short(spec_of(var))}")
    params, bodies = [], []
    for key in sorted(eqn.params):
        value = eqn.params[key]
        if _is_body(value):
            bodies.append((key, value))
        elif value is not None and value is not False and value != "":
            params.append(f"{key}={_value(value)}")
    suffix = f" {{{', '.join(params)}}}" if params else ""
    lines = [f"{indent}{', '.join(results)} = {eqn.primitive.name}({operands}){suffix}"]
    for key, value in bodies:
        for body in value if isinstance(value, tuple) else (value,):
            inner = {var: f"^{i}" for i, var in enumerate(body.invars)}
            lines.append(
                f"{indent}  {key}({', '.join(f'^{i}: {short(spec_of(v))}' for i, v in enumerate(body.invars))}):"
            )
            lines += _body(body, inner, itertools.count(), indent + "    ")
            lines.append(f"{indent}    yield {', '.join(_atom(out, inner) for out in body.outvars)}")
    return lines


def _is_body(value: Any) -> bool:
    return isinstance(value, Jaxpr) or (isinstance(value, tuple) and bool(value) and isinstance(value[0], Jaxpr))


def _atom(atom: Atom, names: dict[Var, str]) -> str:
    return f"{atom.val}:{short(spec_of(atom))}" if isinstance(atom, Literal) else names[atom]


def _value(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_value, value)))}}}"
    text = " ".join(str(value).split())
    return re.sub(r" at 0x[0-9a-f]+", "", text)
