"""Moving scales between weights: one edit that divides what absorbs a scale and multiplies what undoes it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jaxserve._compat import Var, spec_of, vars_of
from jaxserve.passes.graph import Graph, where
from jaxserve.passes.match import Match
from jaxserve.passes.rewrite import Rewriter
from jaxserve.passes.scale_flow import Labels, Spread
from jaxserve.passes.statistics import Statistic
from jaxserve.passes.weights import Value, WeightEdit, dense

# Weights divided and multiplied by s are rounded once more; so are scaled activations, to 4 of their dtype's steps.
TOLERANCE, STEPS = 1e-5, 4


@dataclasses.dataclass(frozen=True, eq=False)
class Scaling:
    """The parameter at `path` divided along `axis` by the scales of its `labels`, or multiplied when `inverse`.

    What multiplies by 1 + w (a norm with `plus_one`) gets w' with 1 + w' = (1 + w) / s.
    """

    path: str
    axis: int
    labels: Labels
    inverse: bool = False
    plus_one: bool = False

    def __call__(self, value: np.ndarray, scales: np.ndarray) -> np.ndarray:
        factors = spread_scales(scales, self.labels)
        factors = (factors if self.inverse else 1 / factors).reshape(
            [-1 if i == self.axis else 1 for i in range(value.ndim)]
        )
        return value * factors + (factors - 1) if self.plus_one else value * factors


def spread_scales(scales: np.ndarray, labels: Labels) -> np.ndarray:
    """The scale of every label, 1 for the label -1; float32."""
    return np.where(labels < 0, 1, scales[np.maximum(labels, 0)]).astype(np.float32)


def absorbed(found: Spread, inverse: bool = False) -> list[Scaling]:
    """What takes the scale of a spread: its root and the biases that are added on the way."""
    plus_one = bool(found.root.eqn.params.get("plus_one"))
    root = Scaling(found.root.entry.path, 0, found.labels, inverse, plus_one)
    return [root, *(Scaling(bias.entry.path, 0, labels, inverse) for bias, labels in found.biases)]


def move_scales(
    rewriter: Rewriter,
    spreads: Sequence[Spread],
    scalings: Sequence[Scaling],
    statistics: Sequence[Statistic],
    choose: Callable[[Mapping[str, np.ndarray]], np.ndarray],
) -> None:
    """One edit that applies all scalings, with the scales that `choose` makes of the values by path: the parameters
    concerned as float32, and the statistics."""
    paths = tuple(dict.fromkeys(scaling.path for scaling in scalings))
    reads = (*paths, *(statistic.path for statistic in statistics))

    def apply(*values: Value) -> tuple[Value, ...]:
        known = {path: dense(value).astype(np.float32) for path, value in zip(reads, values, strict=True)}
        scales = choose(known)
        for scaling in scalings:
            known[scaling.path] = scaling(known[scaling.path], scales)
        return tuple(known[path] for path in paths)

    dtypes = {spec_of(var).dtype for found in spreads for var in found.scaled}
    tolerance = max(TOLERANCE, *(STEPS * float(jnp.finfo(dtype).eps) for dtype in dtypes))
    rewriter.change_weights(_region(rewriter.graph, spreads), [WeightEdit(reads, paths, apply)], tolerance)


def _region(graph: Graph, spreads: Sequence[Spread]) -> Match:
    """All equations that the spreads pass through; they give what the leaves give, and what no scale is on."""
    inside = {id(eqn) for found in spreads for eqn in found.eqns}
    eqns = tuple(eqn for eqn in graph.eqns if id(eqn) in inside)
    made = {var for eqn in eqns for var in eqn.outvars}
    operands = dict.fromkeys(var for eqn in eqns for var in vars_of(eqn.invars) if var not in made)
    scaled = frozenset[Var]().union(*(found.scaled for found in spreads))
    results = [leaf.eqn.outvars[0] for found in spreads for leaf in found.leaves]
    results += [var for found in spreads for var in found.rest if var not in scaled]
    return Match(where(spreads[0].root.eqn), tuple(operands), eqns, tuple(dict.fromkeys(results)))
