"""Relative output error of every matmul of a pipeline on the calibration text.

With W the model's own weight [O, I], Q what the pipeline made of it, in the coordinates of the original model, and X
the activations of the original model, the error is ||X W^T - X Q^T|| / ||X W^T||. X itself is not needed: with G the
mean of x x^T over the text, ||X E^T||^2 = T trace(E G E^T). What a pipeline does to activations (int8 inputs) is not in
it.

Weights, and G for every matmul, are held in memory: this is for models of some hundred million parameters.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np

from jaxserve.error_meter import energy
from jaxserve.experiments.common import Settings
from jaxserve.pallas_kernels import QuantizedTensor
from jaxserve.passes.choose_layout import ChooseLayout
from jaxserve.passes.graph import Graph
from jaxserve.passes.in_place import edit_weights
from jaxserve.passes.pipeline import Context, Pass, PassResult
from jaxserve.passes.stack_layers import StackLayers
from jaxserve.passes.weights import Value, WeightPlan, dense
from jaxserve.reporting import Reporter
from jaxserve.rewritten import Rewritten, rewritten_model

LAYOUT = ("canonicalize", "lower-dense-matmul", "fuse-qkv", "fuse-gate-up")  # passes that keep every number
AFTER_FOLDING = ("quantize-matmul", "narrow-matmul", "insert-paged-kv")
SHORT = 8  # tokens of a model that is built for its weights and never run

See = Callable[[str, np.ndarray, np.ndarray | None], None]


@dataclasses.dataclass(frozen=True)
class Probe(Pass):
    """Hands every layer's weights [O, I] to `see(path, weight, gram)` while they pass by, and changes nothing.

    `gram` is the statistic of that name of what the weight multiplies, or None unless `grams`.
    """

    name: ClassVar[str] = "probe"
    keeps_numbers: ClassVar[bool] = True
    see: See = lambda path, weight, gram: None
    grams: bool = False

    def __str__(self) -> str:
        return self.name

    def run(self, graph: Graph, context: Context) -> PassResult:
        del context
        return edit_weights(graph, self._watch, kinds=("gram",) if self.grams else (), note="watched")

    def _watch(self, path: str, weight: Value, gram: np.ndarray | None = None) -> Value:
        self.see(path, np.asarray(dense(weight), np.float32), gram)
        return weight


@dataclasses.dataclass(frozen=True)
class Original:
    """The original model: weights [O, I] and grams [I, I] by path, and the rows of each projection in a weight."""

    weights: Mapping[str, np.ndarray]
    grams: Mapping[str, np.ndarray]
    parts: Mapping[str, Mapping[str, slice]]


def original_model(passes: Sequence[Pass], settings: Settings) -> Original:
    """The model as the passes lay it out, without what they do to its numbers."""
    weights: dict[str, np.ndarray] = {}
    grams: dict[str, np.ndarray] = {}

    def see(path: str, weight: np.ndarray, gram: np.ndarray | None) -> None:
        assert gram is not None
        weights[path], grams[path] = weight, gram

    layout = [step for step in passes if step.name in LAYOUT]
    model = _build([*layout, Probe(see, grams=True)], settings)
    return Original(weights, grams, _parts(model, weights))


def _build(passes: Sequence[Pass], settings: Settings) -> Rewritten:
    return rewritten_model(settings.model, passes, SHORT, settings.calibration, Reporter())


def _parts(model: Rewritten, weights: Mapping[str, np.ndarray]) -> dict[str, dict[str, slice]]:
    """Which rows of a fused weight are which projection's."""
    plan = WeightPlan([edit for stage in model.stages[:-1] for edit in stage.result.edits])
    heights = {
        entry.path: entry.aval.shape[0] for stage in model.stages for entry in stage.result.graph.of_kind("param")
    }
    found = {}
    for path in weights:
        names, start, found[path] = plan.originals(path), 0, {}
        for name in names:
            found[path][name] = slice(start, start + heights[name])
            start += heights[name]
    return found


def output_errors(passes: Sequence[Pass], original: Original, settings: Settings) -> dict[str, float]:
    """The relative output error of every projection by the path of its weight in the checkpoint."""
    scales = {path: tuple(map(np.ones, weight.shape)) for path, weight in original.weights.items()}

    def see(path: str, weight: np.ndarray, gram: np.ndarray | None) -> None:
        scales[path] = scaling(original.weights[path], weight)

    # Weights are wanted one by one, and row after row.
    passes = [step for step in passes if not isinstance(step, StackLayers | ChooseLayout)]
    place = next((i for i, step in enumerate(passes) if step.name in AFTER_FOLDING), len(passes))
    folded = any(step.name not in LAYOUT for step in passes[:place])
    # A probe would make `native` forget the stored form of what it looks at; folds have done so already.
    model = _build([*passes[:place], *([Probe(see)] if folded else []), *passes[place:]], settings)
    errors = {}
    for path, weight in final_weights(model).items():
        outputs, inputs = scales[path]
        change = weight / outputs[:, None] / inputs - original.weights[path]
        for name, rows in original.parts[path].items():
            errors[name] = relative_error(change[rows], original.weights[path][rows], original.grams[path])
    return errors


def relative_error(change: np.ndarray, weight: np.ndarray, gram: np.ndarray) -> float:
    """||X E^T|| / ||X W^T|| of a change E of a weight W [O, I]; where W gives nothing, 0 if E does not either."""
    error, whole = energy(change, gram), energy(weight, gram)
    if whole <= 0:
        return math.inf if error > 0 else 0.0
    return (error / whole) ** 0.5


def final_weights(model: Rewritten) -> dict[str, np.ndarray]:
    """What every layer's matmul multiplies by at last, dequantized, float32 [O, I] by path."""
    graph, found = model.stages[-1].result.graph, {}
    for eqn in graph.eqns:
        entries = [entry for entry in map(graph.param_of, eqn.invars) if entry is not None]
        if not entries or not entries[0].path.startswith("layers_") or not eqn.primitive.name.endswith("_matmul"):
            continue
        path, form = entries[0].path, eqn.params.get("format")
        if form is None:
            found[path] = np.asarray(model.params[path], np.float32)
        else:
            path = path.rsplit("/", 1)[0]
            arrays = {name: np.asarray(model.params[f"{path}/{name}"]) for name in form.fields}
            found[path] = QuantizedTensor(form, eqn.params["shape"], arrays).dequantize()
    return found


def scaling(before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a [O] and b [I] with after[o, i] = a[o] before[o, i] b[i]: what scale folds did to a weight.

    Elements that are 0 in either (pruned ones) say nothing. ValueError when there are no such positive numbers.
    """
    known = (before != 0) & (after != 0)
    ratio = np.divide(after, before, out=np.ones(before.shape, np.float64), where=known)
    if not (ratio > 0).all():
        raise ValueError("a folded weight changed its sign, so it is not the original one scaled")
    logs = np.where(known, np.log(ratio), 0.0)
    rows, columns = np.zeros(before.shape[0]), np.zeros(before.shape[1])
    for _ in range(100):  # exact after one round when no element is 0, and quick when half of them are
        old = columns
        rows = _mean(logs - np.where(known, columns, 0), known, 1)
        columns = _mean(logs - np.where(known, rows[:, None], 0), known, 0)
        if np.abs(columns - old).max() < 1e-9:
            break
    if np.abs(np.where(known, logs - rows[:, None] - columns, 0)).max() > 1e-3:
        raise ValueError("a folded weight is not the original one with scaled inputs and outputs")
    return np.exp(rows).astype(np.float32), np.exp(columns).astype(np.float32)


def _mean(values: np.ndarray, known: np.ndarray, axis: int) -> np.ndarray:
    return values.sum(axis=axis) / np.maximum(known.sum(axis=axis), 1)
