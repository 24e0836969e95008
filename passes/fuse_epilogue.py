"""fuse-epilogue: the gated activation between the two matmuls of an MLP becomes one op."""

import dataclasses
from functools import partial
from typing import ClassVar

import jax

from jaxserve._compat import JaxprEqn, spec_of
from jaxserve.pallas_kernels import gated_activation
from jaxserve.pallas_kernels.gated_activation.op import ACTIVATIONS, reference
from jaxserve.passes.graph import Graph, where
from jaxserve.passes.match import Match, NoMatch, Pattern
from jaxserve.passes.pipeline import Context, Pass, PassResult
from jaxserve.passes.rewrite import Rewriter


def _pattern(activation: str, out_dtype: str | None) -> Pattern:
    """What the op computes, as models and passes write it."""
    example = jax.ShapeDtypeStruct((2, 8), "float32")
    return Pattern(partial(reference, activation=activation, out_dtype=out_dtype), example)


ROUNDED = {name: _pattern(name, "bfloat16") for name in ACTIVATIONS}
PLAIN = {name: _pattern(name, None) for name in ACTIVATIONS}


@dataclasses.dataclass(frozen=True)
class FuseEpilogue(Pass):
    """bf16(act(g) * u), with g and u the halves of one array (fuse-gate-up makes it), becomes gated_activation.

    Inner values must have no other readers. The native CPU kernel does it in one pass; XLA's loop computes the
    exponentials of SiLU several times as slowly.
    """

    name: ClassVar[str] = "fuse-epilogue"
    platform: ClassVar[str | None] = "cpu"

    def run(self, graph: Graph, context: Context) -> PassResult:
        del context
        rewriter = Rewriter(graph)
        report = [_fuse(rewriter, eqn) for eqn in graph.eqns if _multiplies_a_half(graph, eqn)]
        return PassResult.of(rewriter, report)


def _multiplies_a_half(graph: Graph, eqn: JaxprEqn) -> bool:
    """Whether an equation is the product of something and the second half of an array."""
    factor = graph.producer(eqn.invars[-1]) if eqn.primitive.name == "mul" else None
    if factor is None or factor.primitive.name != "slice":
        return False
    whole, width = spec_of(factor.invars[0]).shape[-1], spec_of(factor.outvars[0]).shape[-1]
    return 2 * width == whole and factor.params["start_indices"][-1] == width


def _fuse(rewriter: Rewriter, eqn: JaxprEqn) -> Match | NoMatch:
    graph, (product,) = rewriter.graph, eqn.outvars
    cast = graph.only_user(product)
    # With the rounding first, which belongs to the product before it.
    tried = [*([(ROUNDED, cast.outvars[0])] if cast is not None else []), (PLAIN, product)]
    reasons: list[str] = []
    for patterns, root in tried:
        reasons = []
        for activation, pattern in patterns.items():
            found = pattern.match(graph, root)
            if isinstance(found, Match):
                return _substitute(rewriter, found, activation)
            reasons.append(f"{activation}: {found.reason}")
    return NoMatch(where(eqn), f"not an activation of one half times the other ({'; '.join(reasons)})")


def _substitute(rewriter: Rewriter, match: Match, activation: str) -> Match:
    given, wanted = spec_of(match.operands[0]).dtype, spec_of(match.results[0]).dtype
    out_dtype = wanted if wanted != given else None
    match = dataclasses.replace(
        match, note=f"{activation} of one half times the other{f', rounded to {wanted}' if out_dtype else ''}"
    )
    rewriter.replace(match, partial(gated_activation, activation=activation, out_dtype=out_dtype), match.operands)
    return match
