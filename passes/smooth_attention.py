"""smooth-attention: the loud channels of keys become as loud as the others, so that few bits hold them."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import numpy as np

from jaxserve._compat import Atom, JaxprEqn, Var
from jaxserve.errors import UserError
from jaxserve.passes.graph import Graph, where
from jaxserve.passes.match import Match, NoMatch
from jaxserve.passes.pipeline import Context, Pass, PassResult
from jaxserve.passes.rewrite import Rewriter
from jaxserve.passes.scale_flow import (
    ATTENTION,
    KEYS,
    QUERIES,
    ROPE,
    Labels,
    Root,
    Spread,
    origins,
    rotary_pairs,
    spread,
)
from jaxserve.passes.scale_weights import absorbed, move_scales
from jaxserve.passes.statistics import Statistic, statistic_path


@dataclasses.dataclass(frozen=True, eq=False)
class Sides:
    """Keys and queries that share the scales of `labels` [K, H], the scale of each channel of each KV head."""

    keys: Spread
    queries: Spread
    labels: Labels

    def scales(self, absmax: np.ndarray, alpha: float) -> np.ndarray:
        """max|k|^alpha over the channels that share a scale, from absmax [K, H]; 1 for keys that are always 0."""
        if not np.isfinite(absmax).all():
            raise UserError(f"{self.keys.root.entry.path}: its keys hold infinities or NaN on the calibration text")
        largest = np.zeros(int(self.labels.max()) + 1, np.float32)
        np.maximum.at(largest, self.labels, absmax)
        return np.where(largest > 0, largest, 1) ** np.float32(alpha)


@dataclasses.dataclass(frozen=True)
class SmoothAttention(Pass):
    """q . k becomes (q l) . (k / l), with one l for every channel of a KV head: SmoothAttention (Lin et al., QServe,
    arXiv:2405.04532), l = max|k|^alpha over the keys of the calibration text after rotary positions.

    It goes into q_proj and k_proj and their biases, or into the norms of heads where a model has them. A rotary
    embedding turns pairs of channels into each other, so a pair has one l; so have all channels that are scaled by one
    parameter (a head norm is shared by all heads). Queries take the l of the KV head that their group reads. Numbers
    stay what they were, up to rounding. Raises UserError for an alpha outside [0, 1].
    """

    name: ClassVar[str] = "smooth-attention"
    keeps_numbers: ClassVar[bool] = True
    alpha: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise UserError(f"pass {self.name}: alpha={self.alpha:g} is not in [0, 1]")

    def run(self, graph: Graph, context: Context) -> PassResult:
        del context
        rewriter, statistics = Rewriter(graph), list[Statistic]()
        report: list[Match | NoMatch] = []
        for eqn in graph.eqns:
            if eqn.primitive.name != ATTENTION:
                continue
            sides = find_sides(graph, eqn)
            if isinstance(sides, str):
                report.append(NoMatch(where(eqn), sides))
                continue
            keys = eqn.invars[KEYS]
            assert isinstance(keys, Var)
            path = statistic_path("absmax", f"{sides.keys.root.entry.path}/keys")
            statistics.append(Statistic(path, keys, "absmax"))
            scalings = [*absorbed(sides.keys), *absorbed(sides.queries, inverse=True)]
            choose = partial(_choose, sides, path, self.alpha)
            move_scales(rewriter, [sides.keys, sides.queries], scalings, statistics[-1:], choose)
            into = [" and ".join(dict.fromkeys(s.path for s in absorbed(side))) for side in (sides.keys, sides.queries)]
            note = f"keys divided in {into[0]}, queries multiplied in {into[1]}"
            report.append(Match(where(eqn), tuple(eqn.invars), (eqn,), tuple(eqn.outvars), note))
        report = report or [NoMatch("graph", "there is no attention op")]
        return dataclasses.replace(PassResult.of(rewriter, report), statistics=tuple(statistics))


def _choose(sides: Sides, path: str, alpha: float, values: Mapping[str, np.ndarray]) -> np.ndarray:
    return sides.scales(values[path], alpha)


def find_sides(graph: Graph, eqn: JaxprEqn) -> Sides | str:
    """The parameters that the keys and queries of an attention can be scaled by, or why there are none."""
    roots: list[tuple[Root, Labels]] = []
    for index in (KEYS, QUERIES):
        found = list(origins(graph, eqn.invars[index]))
        usable = [one for one in found if not isinstance(one, str)]
        if not usable:
            return f"its {'keys' if index == KEYS else 'queries'}: {'; '.join(map(str, found))}"
        roots.append(usable[0])
    (key_root, key_rows), (query_root, query_rows) = roots
    shared = _shared_scales(graph, eqn, key_rows, query_rows + key_root.rows, key_root.rows + query_root.rows)
    used, labels = np.unique(shared[key_rows], return_inverse=True)
    numbers = np.full(len(shared), -1)
    numbers[used] = np.arange(len(used))
    spreads = []
    for index, root, rows, start in ((KEYS, key_root, key_rows, 0), (QUERIES, query_root, query_rows, key_root.rows)):
        own = np.full(root.rows, -1)
        own[rows] = numbers[shared[rows + start]]
        found = spread(graph, root, own)
        if isinstance(found, str):
            return found
        others = [leaf.eqn for leaf in found.leaves if not (leaf.eqn is eqn and leaf.index == index)]
        if others:
            name = others[0].primitive.name.removeprefix("jaxserve.")
            return f"the result of {where(root.eqn)} is also read by {name} at {where(others[0])}"
        spreads.append(found)
    return Sides(spreads[0], spreads[1], labels.reshape(key_rows.shape))


def _shared_scales(graph: Graph, eqn: JaxprEqn, keys: Labels, queries: Labels, count: int) -> np.ndarray:
    """For each of `count` rows, the first of all rows that must have the same scale.

    `keys` [K, H] and `queries` [N, H] are the rows that the channels are made by, both numbered in one sequence.
    """
    group = len(queries) // len(keys)
    pairs = [(queries, np.repeat(keys, group, axis=0))]
    for index, rows in ((KEYS, keys), (QUERIES, queries)):
        rope = _rope_before(graph, eqn.invars[index])
        pairs += [] if rope is None else [rotary_pairs(rope, rows)]
    first = np.arange(count)
    while True:
        before = first.copy()
        for left, right in pairs:
            least = np.minimum(first[left], first[right])
            np.minimum.at(first, left, least)
            np.minimum.at(first, right, least)
        if (first == before).all():
            return first


def _rope_before(graph: Graph, atom: Atom) -> JaxprEqn | None:
    """The rotary embedding that an operand of an attention comes from."""
    eqn = graph.producer(atom)
    while eqn is not None and eqn.primitive.name == "convert_element_type":
        eqn = graph.producer(eqn.invars[0])
    return eqn if eqn is not None and eqn.primitive.name == ROPE else None
