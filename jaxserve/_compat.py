"""The only file that touches JAX's unstable modules (`jax.extend`, `jax.interpreters`); a test enforces it.

`jax.extend` promises nothing between minor versions, so everything the project needs from there is named here once, and
moving to a new JAX means reading this one page.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
from jax.extend import core as _core
from jax.interpreters import ad, batching, mlir

Jaxpr = _core.Jaxpr
JaxprEqn = _core.JaxprEqn
Var = _core.Var
DropVar = _core.DropVar
Literal = _core.Literal
Primitive = _core.Primitive
Atom = Var | Literal

check_jaxpr = _core.check_jaxpr
new_eqn = _core.new_jaxpr_eqn
jaxpr_as_fun = _core.jaxpr_as_fun
jaxprs_in_params = _core.jaxprs_in_params

__all__ = [
    "Atom",
    "DropVar",
    "Jaxpr",
    "JaxprEqn",
    "Literal",
    "Primitive",
    "Var",
    "ad",
    "batching",
    "check_jaxpr",
    "fresh_outvars",
    "fresh_var",
    "jaxpr_as_fun",
    "jaxprs_in_params",
    "mlir",
    "new_eqn",
    "spec_of",
    "trace",
    "vars_of",
]


def trace(function: Callable, *specs: Any, **static: Any) -> Jaxpr:
    """The jaxpr of `function` at the given shapes; arguments may be trees of `jax.ShapeDtypeStruct`."""
    return jax.jit(lambda *args: function(*args, **static)).trace(*specs).jaxpr


def fresh_var(spec: jax.ShapeDtypeStruct) -> Var:
    """A new variable of the given shape and dtype, different from every other variable."""
    return Var(jax.core.ShapedArray(spec.shape, spec.dtype))


def fresh_outvars(eqn: JaxprEqn) -> list[Var]:
    """New variables for the results of a copy of `eqn`; results that nobody reads stay dropped."""
    return [var if isinstance(var, DropVar) else fresh_var(spec_of(var)) for var in eqn.outvars]


def spec_of(atom: Atom) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a variable or literal."""
    aval: Any = atom.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def vars_of(atoms: Sequence[Atom]) -> list[Var]:
    """The variables among some atoms, literals left out."""
    return [atom for atom in atoms if isinstance(atom, Var)]
