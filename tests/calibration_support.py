"""Passes that read statistics, simple enough to be followed by hand, and a model to calibrate."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from jaxserve.calibration import Weights, calibrate
from jaxserve.lowering import trace_model
from jaxserve.models.config import ModelConfig
from jaxserve.passes.graph import Graph
from jaxserve.passes.in_place import LAYERS, edit_weights
from jaxserve.passes.pipeline import Context, Pass, PassResult, PipelineResult, run_pipeline
from jaxserve.passes.recipes import parse_spec
from jaxserve.passes.statistics import StatisticKind
from jaxserve.passes.verify import Verifier
from jaxserve.passes.weights import Source, Value, dense
from jaxserve.reporting import Reporter

DENSE = parse_spec("canonicalize,lower-dense-matmul")
Edit = Callable[[np.ndarray, np.ndarray], np.ndarray]


def shrink(weight: np.ndarray, statistic: np.ndarray) -> np.ndarray:
    """A change that depends on the statistic and on nothing else; it is large, so that later layers see it."""
    return weight * (0.5 + 0.5 / (1 + np.abs(statistic).mean()))


@dataclasses.dataclass(frozen=True)
class Shrink(Pass):
    """Every layer's matmul weight w becomes edit(w, statistic of what it multiplies); `seen` records the statistics."""

    name: ClassVar[str] = "shrink"
    kind: StatisticKind = "absmean"
    edit: Edit = shrink
    seen: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    targets: str = LAYERS

    def __str__(self) -> str:
        return self.name

    def run(self, graph: Graph, context: Context) -> PassResult:
        return edit_weights(graph, self.change, targets=self.targets, kinds=(self.kind,), tolerance=1.0)

    def change(self, path: str, weight: Value, statistic: np.ndarray) -> Value:
        assert path not in self.seen  # each edit runs once
        self.seen[path] = statistic
        return self.edit(dense(weight), statistic)


@dataclasses.dataclass(frozen=True)
class Watch(Shrink):
    """The same without a change."""

    name: ClassVar[str] = "watch"
    keeps_numbers: ClassVar[bool] = True
    edit: Edit = lambda weight, statistic: weight


class Model:
    """A config's graph and random weights."""

    def __init__(self, config: ModelConfig):
        self.config = config
        rng, self.weights = np.random.default_rng(0), dict[str, np.ndarray]()
        for entry in self.trace(2).of_kind("param"):
            shape = entry.aval.shape
            scale = rng.uniform(0.5, 1.5, shape) if len(shape) == 1 else rng.normal(size=shape) / shape[-1] ** 0.5
            self.weights[entry.path] = scale.astype(np.float32)

    def trace(self, tokens: int) -> Graph:
        return trace_model(self.config, tokens, tokens, {})

    def ids(self, sequences: int, length: int) -> np.ndarray:
        return np.random.default_rng(1).integers(0, self.config.vocab, (sequences, length)).astype(np.int32)


def lay_out(model: Model, passes: Sequence[Pass], tokens: int = 8) -> PipelineResult:
    return run_pipeline(model.trace(tokens), passes, Context(), [Verifier()])


def calibrated(
    model: Model, passes: Sequence[Pass], ids: np.ndarray, source: Source, folder: pathlib.Path
) -> dict[str, np.ndarray]:
    """The final parameters by path."""
    weights: Weights = calibrate(model.trace, passes, source, ids, folder, Reporter(quiet=True))
    return dict(weights.plan.materialize(lay_out(model, passes).graph, weights.source))
