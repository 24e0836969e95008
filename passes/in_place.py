"""Passes that change weights and leave the computation as it is: pruning, and experiments with rounding."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from functools import partial

from jaxserve._compat import Var
from jaxserve.pallas_kernels import dense_matmul
from jaxserve.passes.graph import Graph, Input
from jaxserve.passes.match import Match, NoMatch
from jaxserve.passes.pipeline import PassResult
from jaxserve.passes.readers import MATMUL, weight_readers
from jaxserve.passes.rewrite import Rewriter
from jaxserve.passes.statistics import Statistic, StatisticKind, statistic_path
from jaxserve.passes.weights import Value, WeightEdit

LAYERS = r"^layers_\d+/"


def edit_weights(
    graph: Graph,
    function: Callable[..., Value],
    *,
    targets: str = LAYERS,
    kinds: Sequence[StatisticKind] = (),
    refuse: Callable[[Input], str] = lambda entry: "",
    tolerance: float = 0.0,
    note: str = "",
) -> PassResult:
    """Every weight [O, I] that the regex `targets` selects becomes `function(path, weight, *statistics)`.

    The statistics are of what its matmul multiplies, one for each of `kinds`. A weight with other readers beside one
    matmul is refused, and one that `refuse` says why about. The checkpoint's quantized form, if it has one, is no
    longer the weight's.
    """
    rewriter, statistics = Rewriter(graph), list[Statistic]()
    report: list[Match | NoMatch] = []
    for entry in graph.of_kind("param"):
        if len(entry.aval.shape) != 2 or not re.search(targets, entry.path):
            continue
        found = _only_matmul(graph, entry)
        if found and (reason := refuse(entry)):
            found = NoMatch(entry.path, reason)
        if isinstance(found, Match):
            activation = found.operands[0]
            assert isinstance(activation, Var)
            asked = [Statistic(statistic_path(kind, entry.path), activation, kind) for kind in kinds]
            reads = (entry.path, *(statistic.path for statistic in asked))
            _edit_weight(
                rewriter,
                found,
                entry,
                WeightEdit(reads, (entry.path,), partial(_call, function, entry.path)),
                tolerance,
            )
            statistics += asked
            found = dataclasses.replace(found, note=f"{found.note}: {note}")
        report.append(found)
    if not report:
        report.append(NoMatch(f"targets {targets}", "selects no weight", asked=True))
    return dataclasses.replace(PassResult.of(rewriter, report), statistics=tuple(statistics))


def _call(function: Callable[..., Value], path: str, *values: Value) -> tuple[Value, ...]:
    return (function(path, *values),)


def _only_matmul(graph: Graph, entry: Input) -> Match | NoMatch:
    """The one dense_matmul that reads a weight, with operands (x, w), or why there is not just one.

    What is chosen by the activations of one reader would be wrong for another (a tied embedding's rows).
    """
    readers = weight_readers(graph, entry)
    if isinstance(readers, NoMatch):
        return readers
    lookups = sum(reader.eqns[-1].primitive.name != MATMUL for reader in readers)
    if len(readers) != 1 or lookups:
        return NoMatch(
            entry.path, f"{len(readers) - lookups} matmuls and {lookups} lookups read it, where one matmul is wanted"
        )
    return readers[0]


def _edit_weight(rewriter: Rewriter, match: Match, entry: Input, edit: WeightEdit, tolerance: float) -> None:
    weight = rewriter.add_input(dataclasses.replace(entry, stored=None))
    out_dtype = match.eqns[-1].params["out_dtype"]
    rewriter.replace(
        match,
        lambda x, w: dense_matmul(x, w, out_dtype=out_dtype),
        [match.operands[0], weight],
        [edit],
        tolerance=tolerance,
    )
