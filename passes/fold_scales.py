"""fold-scales: what is hard to quantize in activations moves into the weights that read them, or the other way."""

import dataclasses
import re
from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import numpy as np

from jaxserve._compat import JaxprEqn, Var
from jaxserve.errors import UserError
from jaxserve.passes.choose_scales import Chooser, Method, Reader
from jaxserve.passes.graph import Graph, Input, where
from jaxserve.passes.in_place import LAYERS
from jaxserve.passes.match import Match, NoMatch
from jaxserve.passes.pipeline import Context, Pass, PassResult
from jaxserve.passes.readers import MATMUL, QUANTIZED
from jaxserve.passes.rewrite import Rewriter
from jaxserve.passes.rules import parse_scheme
from jaxserve.passes.scale_flow import Leaf, Spread, origins, shared, spread
from jaxserve.passes.scale_weights import Scaling, absorbed, move_scales
from jaxserve.passes.statistics import Statistic, StatisticKind, statistic_path

READERS = (MATMUL, QUANTIZED, "dot_general")


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Everything that one vector of scales goes into: the weights of the leaves of a spread, in their order."""

    found: Spread
    weights: tuple[Input, ...]

    @property
    def channels(self) -> int:
        return int(self.found.labels.max()) + 1

    @property
    def labels(self) -> dict[str, np.ndarray]:
        """The channel of every input of every weight, by path."""
        pairs = zip(self.weights, self.found.leaves, strict=True)
        return {entry.path: leaf.labels.reshape(-1) for entry, leaf in pairs}


@dataclasses.dataclass(frozen=True)
class FoldScales(Pass):
    """x W^T becomes (x / s)(W s)^T, with one scale for every channel of x: weights are multiplied along their inputs,
    and what makes x is divided along its outputs.

    That is a norm before projections, v_proj before o_proj (with one scale for all query heads that share a KV head's
    channel), up_proj before down_proj, and biases that are added between, in whatever form dataflow finds them
    (`passes.scale_flow`), stacked or not. All that read x take the same s. The regex `targets` selects the weights
    whose inputs to scale. Numbers stay what they were, up to rounding.

    `method` and `alpha` say which s (`passes.choose_scales`); with alpha=auto it is the one that is best for `scheme`,
    which should be what quantize-matmul is going to do. Raises UserError for an alpha that is neither auto nor in
    [0, 1], a scheme that quantizes nothing while alpha=auto, or a regex that cannot be read.
    """

    name: ClassVar[str] = "fold-scales"
    keeps_numbers: ClassVar[bool] = True
    method: Method = "smoothquant"
    alpha: str = "auto"
    scheme: str = "w8a8"
    targets: str = LAYERS

    def __post_init__(self) -> None:
        self._chooser()
        try:
            re.compile(self.targets)
        except re.error as error:
            raise UserError(
                f"pass {self.name}: targets={self.targets!r} is not a regular expression ({error})"
            ) from None

    def _chooser(self) -> Chooser:
        scheme, alpha = parse_scheme(self.scheme), None
        if self.alpha != "auto":
            alpha = _number(self.alpha)
            if alpha is None or not 0 <= alpha <= 1:
                raise UserError(f"pass {self.name}: alpha={self.alpha!r}; allowed: auto, or a number from 0 to 1")
        elif scheme.format is None:
            raise UserError(
                f"pass {self.name}: scheme={self.scheme!r} says nothing about rounding, which alpha=auto needs"
            )
        return Chooser(self.method, alpha, scheme)

    def run(self, graph: Graph, context: Context) -> PassResult:
        del context
        rewriter, statistics, chooser = Rewriter(graph), list[Statistic](), self._chooser()
        report: dict[int, Match | NoMatch] = {}
        for eqn in graph.eqns:
            entry = _weight_of(graph, eqn)
            if entry is None or id(eqn) in report or not re.search(self.targets, entry.path):
                continue
            group = find_group(graph, eqn, entry)
            if isinstance(group, NoMatch):
                report[id(eqn)] = group
                continue
            statistics += _fold(rewriter, group, chooser)
            for leaf, weight in zip(group.found.leaves, group.weights, strict=True):
                report[id(leaf.eqn)] = self._match(group, leaf, weight)
        if not report:
            return PassResult.of(
                rewriter, [NoMatch(f"targets {self.targets}", "selects no weight that a matmul reads", asked=True)]
            )
        return dataclasses.replace(PassResult.of(rewriter, report.values()), statistics=tuple(statistics))

    def _match(self, group: Group, leaf: Leaf, weight: Input) -> Match:
        scale = self.method if self.alpha == "auto" else f"{self.method} alpha={self.alpha}"
        into = " and ".join([group.found.root.entry.path, *(bias.entry.path for bias, _ in group.found.biases)])
        others = [entry.path for entry in group.weights if entry is not weight]
        together = f", one scale with {', '.join(others)}" if others else ""
        note = f"{scale}: inputs times s, 1/s into {into}{together}"
        return Match(weight.path, tuple(leaf.eqn.invars), (leaf.eqn,), tuple(leaf.eqn.outvars), note)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _weight_of(graph: Graph, eqn: JaxprEqn) -> Input | None:
    """The parameter that a matmul multiplies by, or None."""
    return graph.param_of(eqn.invars[1]) if eqn.primitive.name in READERS else None


def find_group(graph: Graph, eqn: JaxprEqn, entry: Input) -> Group | NoMatch:
    """Everything that must take the scale of what a matmul reads, or why it cannot have one."""
    if eqn.primitive.name != MATMUL:
        how = "quantized already" if eqn.primitive.name == QUANTIZED else "in a plain dot_general (lower-dense-matmul)"
        return NoMatch(entry.path, f"it is {how}")
    reasons: dict[str, None] = {}
    for found in origins(graph, eqn.invars[0]):
        if not isinstance(found, str):
            root, rows = found
            used = np.unique(rows)
            labels = np.full(root.rows, -1)
            labels[used] = np.arange(len(used))
            found = spread(graph, root, labels)
        group = found if isinstance(found, str) else _group(graph, found)
        if isinstance(group, Group):
            return group
        reasons[group] = None
    return NoMatch(entry.path, "; ".join(reasons))


def _group(graph: Graph, found: Spread) -> Group | str:
    weights = []
    for leaf in found.leaves:
        entry = graph.param_of(leaf.eqn.invars[1])
        if leaf.eqn.primitive.name == QUANTIZED and entry is not None:
            return f"{entry.path} reads the same activation and is quantized already"
        if leaf.eqn.primitive.name != MATMUL:
            return f"{leaf.eqn.primitive.name.removeprefix('jaxserve.')} at {where(leaf.eqn)} reads it, too"
        if entry is None:
            return f"the weight at {where(leaf.eqn)} is computed"
        if problem := shared(graph, entry, leaf.eqn):
            return problem
        weights.append(entry)
    return Group(found, tuple(weights))


def _fold(rewriter: Rewriter, group: Group, chooser: Chooser) -> list[Statistic]:
    """Adds the edit of a group; gives the statistics that it reads."""
    statistics: list[Statistic] = []
    names: dict[tuple[Var, StatisticKind], str] = {}
    wanted: dict[str, dict[StatisticKind, str]] = {}  # by path of the weight
    for leaf, entry in zip(group.found.leaves, group.weights, strict=True):
        for kind in chooser.kinds:
            key = leaf.activation, kind
            if key not in names:  # q, k and v read one activation
                names[key] = statistic_path(kind, entry.path)
                statistics.append(Statistic(names[key], *key))
            wanted.setdefault(entry.path, {})[kind] = names[key]
    scalings = absorbed(group.found)
    scalings += [Scaling(path, 1, labels, inverse=True) for path, labels in group.labels.items()]
    move_scales(rewriter, [group.found], scalings, statistics, partial(_choose, chooser, group, wanted))
    return statistics


def _choose(
    chooser: Chooser,
    group: Group,
    wanted: Mapping[str, Mapping[StatisticKind, str]],
    values: Mapping[str, np.ndarray],
) -> np.ndarray:
    readers = [
        Reader(path, values[path], labels, {kind: values[name] for kind, name in wanted[path].items()})
        for path, labels in group.labels.items()
    ]
    return chooser(readers, group.channels)
