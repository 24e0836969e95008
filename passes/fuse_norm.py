"""fuse-norm: an RMS norm with the residual addition before it and the rounding after it becomes one op."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxserve._compat import Atom, JaxprEqn, Var, spec_of
from jaxserve.pallas_kernels import add_rms_norm, rms_norm
from jaxserve.passes.graph import Graph, where
from jaxserve.passes.match import Match, NoMatch
from jaxserve.passes.pipeline import Context, Pass, PassResult
from jaxserve.passes.readers import cut_of_stack
from jaxserve.passes.rewrite import Rewriter

NORM = "jaxserve.rms_norm"


@dataclasses.dataclass(frozen=True)
class FuseNorm(Pass):
    """h = x + y; n = bf16(rms_norm(h, w)) becomes h, n = add_rms_norm(x, y, w); a norm without a sum rms_norm(x, w).

    Each part is taken where it is there. The addition: of two arrays of one shape, and no other norm has taken it; h
    stays what all its other readers read. The rounding: every reader of n rounds it to the same dtype. The slice that
    cuts w out of a stack of layers: the op reads its `layer` of the stack. Kernels do in one pass over a row what XLA
    does in several loops, or launches on a GPU, which take longer to start than to run.
    """

    name: ClassVar[str] = "fuse-norm"

    def run(self, graph: Graph, context: Context) -> PassResult:
        del context
        rewriter = Rewriter(graph)
        norms = [eqn for eqn in graph.eqns if eqn.primitive.name == NORM]
        report = [entry for norm in norms for entry in _fuse(rewriter, norm)]
        return PassResult.of(rewriter, report)


def _fuse(rewriter: Rewriter, norm: JaxprEqn) -> list[Match | NoMatch]:
    """Replaces a norm with what belongs to it, and says what does not."""
    graph, (x, weight) = rewriter.graph, norm.invars
    sums, no_sum = _addition(rewriter, x)
    casts, no_cast = _casts(graph, norm.outvars[0])
    cut = cut_of_stack(graph, weight)
    refusals = [NoMatch(where(norm), reason) for reason in (no_sum, no_cast) if reason]
    if not sums and not casts and not cut:
        return [*refusals]
    options, notes = dict(norm.params), ["with the sum that it reads"] if sums else []
    if cut:
        weight, options["layer"] = cut[0].invars[0], cut[0].params["start_indices"][0]
        notes.append(f"layer {options['layer']} of {list(spec_of(weight).shape)}")
    if casts:
        options["out_dtype"] = spec_of(casts[0].outvars[0]).dtype
        notes.append(f"rounded to {options['out_dtype']}")
    operands = [*(sums[0].invars if sums else [x]), weight]
    readable = [eqn.outvars[0] for eqn in casts or [norm]]

    def fused(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        *h, n = add_rms_norm(*arrays, **options) if sums else (rms_norm(*arrays, **options),)
        return (*h, *[n] * len(readable))

    results = [*(eqn.outvars[0] for eqn in sums), *readable]
    match = Match(where(norm), tuple(operands), (*sums, *cut, norm, *casts), tuple(results), ", ".join(notes))
    rewriter.replace(match, fused, operands)
    return [match, *refusals]


def _addition(rewriter: Rewriter, x: Atom) -> tuple[list[JaxprEqn], str]:
    """The sum of two arrays that `x` is, or none and why."""
    eqn = rewriter.graph.producer(x)
    if eqn is None or eqn.primitive.name != "add":
        return (
            [],
            f"it takes no sum, for it reads {'an input' if eqn is None else f'the result of {eqn.primitive.name}'}",
        )
    if any(not isinstance(atom, Var) or spec_of(atom) != spec_of(x) for atom in eqn.invars):
        return [], "it takes no sum, for it reads that of an array and a number"
    if rewriter.is_replaced(eqn.outvars[0]):
        return [], "it takes no sum, for another norm has taken the one that it reads"
    return [eqn], ""


def _casts(graph: Graph, normal: Var) -> tuple[list[JaxprEqn], str]:
    """The equations that round the norm's result, all to one dtype and nobody reads it as it is; or none and why."""
    users = graph.users(normal)
    if graph.is_output(normal):
        return [], "it does not round, for its result is an output"
    if others := [eqn.primitive.name for eqn in users if eqn.primitive.name != "convert_element_type"]:
        return [], f"it does not round, for {others[0]} reads its result as it is"
    dtypes = sorted({str(spec_of(eqn.outvars[0]).dtype) for eqn in users})
    if len(dtypes) != 1 or not jnp.issubdtype(dtypes[0], jnp.floating):
        return [], f"it does not round, for its result is read in {' and in '.join(dtypes)}"
    return users, ""
