"""quantize-norm: a norm that is read by matmuls of quantized activations gives the codes and scales that they want."""

import dataclasses
from typing import ClassVar

import jax

from jaxserve._compat import JaxprEqn
from jaxserve.pallas_kernels import OPS, quantized_norm
from jaxserve.pallas_kernels.quantized_matmul.op import CODES
from jaxserve.passes.graph import Graph, where
from jaxserve.passes.match import Match, NoMatch
from jaxserve.passes.pipeline import Context, Pass, PassResult
from jaxserve.passes.readers import QUANTIZED
from jaxserve.passes.rewrite import Rewriter

NORMS = ("jaxserve.rms_norm", "jaxserve.add_rms_norm")

# Two kernels give norms that differ in the last bit, and a number half way between two codes may get either: some of a
# million do, each of which moves by a code.
TOLERANCE = 2.0**-7


@dataclasses.dataclass(frozen=True)
class QuantizeNorm(Pass):
    """quantized_matmul(rms_norm(x, w), ...) becomes quantized_matmul(*quantized_norm(x, w), ...), to the same numbers.

    All who read the norm must be matmuls that quantize it alike, with a scale a token. The sum of an add_rms_norm is
    left to XLA, which has it in the kernel before. On a GPU the norm's kernel holds its row in registers: it can find
    the largest number and write codes there, where XLA takes two more kernels, which read the row in float32 again. A
    native CPU kernel quantizes what it multiplies on its way in, so that codes would gain it nothing.
    """

    name: ClassVar[str] = "quantize-norm"
    platform: ClassVar[str | None] = "cuda"

    def run(self, graph: Graph, context: Context) -> PassResult:
        del context
        rewriter = Rewriter(graph)
        report = [_quantize(rewriter, eqn) for eqn in graph.eqns if eqn.primitive.name in NORMS]
        return PassResult.of(rewriter, report)


def _quantize(rewriter: Rewriter, norm: JaxprEqn) -> Match | NoMatch:
    readers = rewriter.graph.users(norm.outvars[-1])
    if reason := _refusal(rewriter.graph, norm, readers):
        return NoMatch(where(norm), reason)
    *arrays, weight = norm.invars
    activation = readers[0].params["activation"]
    counts = [len(eqn.invars) - 1 for eqn in readers]

    def quantized(*operands: jax.Array) -> tuple[jax.Array, ...]:
        *given, weight = operands[: len(norm.invars)]
        rest = iter(operands[len(norm.invars) :])
        h = given[0] if len(given) == 1 else given[0] + given[1]
        codes, scale = quantized_norm(h, weight, activation=activation, **norm.params)
        products = [
            OPS[QUANTIZED](codes, *(next(rest) for _ in range(count)), scale, **eqn.params)
            for eqn, count in zip(readers, counts, strict=True)
        ]
        return (*([h] if len(given) > 1 else []), *products)

    operands = (*arrays, weight, *(atom for eqn in readers for atom in eqn.invars[1:]))
    results = (*norm.outvars[:-1], *(eqn.outvars[0] for eqn in readers))
    match = Match(where(norm), operands, (norm, *readers), results, f"gives {activation} codes")
    rewriter.replace(match, quantized, operands, tolerance=TOLERANCE)
    return match


def _refusal(graph: Graph, norm: JaxprEqn, readers: list[JaxprEqn]) -> str:
    """Why the norm stays as it is, if it does."""
    if graph.is_output(norm.outvars[-1]):
        return "its result is an output"
    if others := sorted({eqn.primitive.name for eqn in readers if eqn.primitive.name != QUANTIZED}):
        return f"{', '.join(others)} reads its result as it is"
    wanted = {eqn.params["activation"] or "floats" for eqn in readers}
    if len(wanted) != 1 or not wanted <= CODES.keys():
        return f"its readers want activations in {', '.join(sorted(wanted))}, not in codes with a scale a token"
    return ""
