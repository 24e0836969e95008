"""narrow-matmul: the operands of matmuls are rounded to bf16; everything between matmuls stays float32."""

import dataclasses
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from jaxserve._compat import JaxprEqn, Var, spec_of
from jaxserve.pallas_kernels import OPS, dense_matmul
from jaxserve.passes.graph import Graph, Input, where
from jaxserve.passes.match import Match, NoMatch
from jaxserve.passes.pipeline import Context, Pass, PassResult
from jaxserve.passes.readers import MATMUL, QUANTIZED, take_rows, weight_readers
from jaxserve.passes.rewrite import Rewriter
from jaxserve.passes.weights import Value, WeightEdit

# Rounding one operand to 8 bits of mantissa moves it by at most 2^-9; two operands, and some room.
TOLERANCE = 2.0**-7


@dataclasses.dataclass(frozen=True)
class NarrowMatmul(Pass):
    """dense_matmul(x, w) becomes dense_matmul(bf16(x), bf16(w)), quantized_matmul(x, ...) takes bf16(x).

    A quantized_matmul that quantizes its activation does so from float32: rounding it twice would gain nothing.

    Results keep their dtype and products accumulate in float32, so the residual stream, norms, rotations and softmax
    are as exact as before; w is stored in bf16, and a tied embedding's lookup reads the same rows, widened again.
    Rounding the residual stream as well would triple the error of the logits and save little: one row of D a token.
    A quantized matmul that gives the logits themselves reads float32: it is one of hundreds, and rounding its
    activation makes nearly half of the near ties that flip.
    """

    name: ClassVar[str] = "narrow-matmul"
    dtype: Literal["bf16"] = "bf16"

    def run(self, graph: Graph, context: Context) -> PassResult:
        del context
        rewriter = Rewriter(graph)
        report: list[Match | NoMatch] = []
        for entry in graph.of_kind("param"):
            if any(user.primitive.name == MATMUL for user in graph.users(graph.var(entry.path))):
                report += _narrow_weight(rewriter, entry)
        for eqn in graph.eqns:
            if eqn.primitive.name == QUANTIZED:
                report.append(_narrow_activation(rewriter, eqn))
        return PassResult.of(rewriter, report)


def _narrow_weight(rewriter: Rewriter, entry: Input) -> list[Match | NoMatch]:
    """Every reader of a weight takes it in bf16, or none does."""
    readers = weight_readers(rewriter.graph, entry)
    if isinstance(readers, NoMatch):
        return [readers]
    narrow = dataclasses.replace(entry, aval=jax.ShapeDtypeStruct(entry.aval.shape, jnp.bfloat16))
    weight = rewriter.add_input(narrow)
    edit = WeightEdit((entry.path,), (entry.path,), _same)
    for found in readers:
        _substitute(rewriter, found, weight, edit)
    return list(readers)


def _substitute(rewriter: Rewriter, match: Match, weight: Var, edit: WeightEdit) -> None:
    eqn, (result,) = match.eqns[-1], match.results
    if eqn.primitive.name == MATMUL:
        out_dtype = eqn.params["out_dtype"]

        def narrow(x: jax.Array, w: jax.Array) -> jax.Array:
            return dense_matmul(x.astype(w.dtype), w, out_dtype=out_dtype)

        rewriter.replace(match, narrow, [match.operands[0], weight], [edit], tolerance=TOLERANCE)
    else:
        widen = spec_of(result).dtype
        rewriter.replace(
            match,
            lambda w, ids: take_rows(w, ids).astype(widen),
            [weight, match.operands[1]],
            [edit],
            tolerance=TOLERANCE,
        )


def _narrow_activation(rewriter: Rewriter, eqn: JaxprEqn) -> Match | NoMatch:
    if rewriter.graph.is_output(eqn.outvars[0]):
        return NoMatch(where(eqn), "its result is an output of the graph: it reads float32")
    if eqn.params["activation"] is not None:
        return NoMatch(where(eqn), f"its activation becomes {eqn.params['activation']}, from float32")
    bind = partial(OPS[QUANTIZED], **eqn.params)
    match = Match(where(eqn), tuple(eqn.invars), (eqn,), tuple(eqn.outvars), "reads its activation in bf16")
    rewriter.replace(
        match, lambda x, *arrays: bind(x.astype(jnp.bfloat16), *arrays), list(eqn.invars), tolerance=TOLERANCE
    )
    return match


def _same(value: Value) -> tuple[Value, ...]:
    return (value,)
