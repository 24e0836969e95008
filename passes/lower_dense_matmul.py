"""lower-dense-matmul: plain dots with a weight become the `dense_matmul` op, which has kernels of our own."""

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxserve._compat import Atom, JaxprEqn, Var, spec_of
from jaxserve.pallas_kernels import dense_matmul
from jaxserve.passes.graph import Graph, where
from jaxserve.passes.match import Match, NoMatch, Pattern
from jaxserve.passes.pipeline import Context, Pass, PassResult
from jaxserve.passes.rewrite import Rewriter


def linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """y = x w^T accumulated in float32, kept in float32: how heads are written."""
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def linear_cast(x: jax.Array, w: jax.Array) -> jax.Array:
    """The same, rounded to the dtype of x: how every other linear layer is written."""
    return linear(x, w).astype(x.dtype)


def linear_plain(x: jax.Array, w: jax.Array) -> jax.Array:
    """`x @ w.T` without asking for an accumulator."""
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))


def _examples(dtype: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    return jax.ShapeDtypeStruct((2, 3), dtype), jax.ShapeDtypeStruct((4, 3), dtype)


# Longest first: a cast belongs to the matmul before it.
PATTERNS = (
    (Pattern(linear_cast, *_examples("bfloat16")), None),
    (Pattern(linear_cast, *_examples("float16")), None),
    (Pattern(linear, *_examples("bfloat16")), jnp.dtype("float32")),
    (Pattern(linear, *_examples("float32")), None),
    (Pattern(linear_plain, *_examples("bfloat16")), None),
    (Pattern(linear_plain, *_examples("float32")), None),
)


RELAYOUT = ("convert_element_type", "transpose", "reshape", "copy")


@dataclasses.dataclass(frozen=True)
class LowerDenseMatmul(Pass):
    """y = x w^T with w [O, I] a parameter becomes dense_matmul(x, w), with the cast that follows it."""

    name: ClassVar[str] = "lower-dense-matmul"

    def run(self, graph: Graph, context: Context) -> PassResult:
        del context
        rewriter = Rewriter(graph)
        report: list[Match | NoMatch] = []
        for eqn in graph.eqns:
            if eqn.primitive.name != "dot_general":
                continue
            if not any(graph.param_of(atom) for atom in eqn.invars):
                source = _computed_weight(graph, eqn)
                if source is not None:  # else a dot of two activations
                    report.append(NoMatch(where(eqn), f"its right operand is computed from {source}, not a parameter"))
                continue
            found, out_dtype = _best(graph, eqn)
            if found:
                assert isinstance(found, Match)
                entry = graph.param_of(found.operands[1])
                found = dataclasses.replace(found, note=entry.path if entry else "")
                op = functools.partial(dense_matmul, out_dtype=out_dtype)
                rewriter.replace(found, op, found.operands, tolerance=_tolerance(found.operands[1]))
            report.append(found)
        return PassResult.of(rewriter, report)


def _tolerance(weight: Atom) -> float:
    """Relative error that another order of summation may bring for w [O, I]. A sum of I float32 products, added one
    after the other as XLA does for a single row, was seen to be off by eps sqrt(I) / 20; twice that is allowed."""
    return float(jnp.finfo(jnp.float32).eps) * math.sqrt(spec_of(weight).shape[1]) / 10


def _computed_weight(graph: Graph, eqn: JaxprEqn) -> str | None:
    """Path of the parameter that the right operand is a cast, transpose or reshape of, or None."""
    atom = eqn.invars[1]
    while (producer := graph.producer(atom)) and producer.primitive.name in RELAYOUT:
        atom = producer.invars[0]
    entry = graph.param_of(atom)
    return None if entry is None else entry.path


def _best(graph: Graph, eqn: JaxprEqn) -> tuple[Match | NoMatch, jnp.dtype | None]:
    """The first pattern that matches at the dot, or at the cast that alone reads it; else why the last one failed."""
    (result,) = eqn.outvars
    cast = graph.only_user(result)
    roots: list[Var] = [result]
    if cast is not None and cast.primitive.name == "convert_element_type":
        roots.insert(0, cast.outvars[0])
    reason: Match | NoMatch = NoMatch(where(eqn), "not written as x w^T")
    for root in roots:
        for pattern, out_dtype in PATTERNS:
            found = pattern.match(graph, root)
            if found and isinstance(found, Match):
                if graph.param_of(found.operands[1]) is None:
                    found = NoMatch(where(eqn), "its right operand is not a parameter")
                else:
                    return found, out_dtype
            reason = found
    return reason, None
