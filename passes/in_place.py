"""Passes that change weights and leave the computation as it is: pruning, and experiments with rounding."""

import dataclasses
from collections.abc import Sequence

from jaxserve.pallas_kernels import dense_matmul
from jaxserve.passes.graph import Graph, Input
from jaxserve.passes.match import Match, NoMatch
from jaxserve.passes.readers import MATMUL, weight_readers
from jaxserve.passes.rewrite import Rewriter
from jaxserve.passes.weights import WeightEdit


def only_matmul(graph: Graph, entry: Input) -> Match | NoMatch:
    """The one dense_matmul that reads the weight `entry` [O, I], with operands (x, w), or why there is not just one.

    What is chosen by the activations of one reader would be wrong for another (a tied embedding's rows).
    """
    readers = weight_readers(graph, entry)
    if isinstance(readers, NoMatch):
        return readers
    if len(readers) != 1 or readers[0].eqns[-1].primitive.name != MATMUL:
        kinds = "matmul and lookup" if any(reader.eqns[-1].primitive.name != MATMUL for reader in readers) else "matmul"
        return NoMatch(entry.path, f"it has {len(readers)} readers ({kinds}), where one matmul is wanted")
    return readers[0]


def edit_weight(rewriter: Rewriter, match: Match, entry: Input, edits: Sequence[WeightEdit], tolerance: float) -> None:
    """The matmul of `only_matmul` reads what `edits` write at its weight's path.

    The checkpoint's quantized form, if it has one, is no longer the weight's.
    """
    weight = rewriter.add_input(dataclasses.replace(entry, stored=None))
    out_dtype = match.eqns[-1].params["out_dtype"]
    rewriter.replace(
        match,
        lambda x, w: dense_matmul(x, w, out_dtype=out_dtype),
        [match.operands[0], weight],
        edits,
        tolerance=tolerance,
    )
