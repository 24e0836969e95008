"""Output errors of quantized matmuls, taken while a calibrated pass quantizes: its statistics are gone afterwards.

With G the mean of x x^T over the calibration text, the mean of ||x E^T||^2 is trace(E G E^T); so the relative output
error ||X W^T - X Q^T|| / ||X W^T|| needs W, Q and G at one time, and no activations.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from jaxserve.pallas_kernels import QuantFormat, QuantizedTensor, quantize_rtn
from jaxserve.passes.graph import Graph
from jaxserve.passes.pipeline import PipelineResult, Stage
from jaxserve.passes.stack_layers import unstacked
from jaxserve.passes.statistics import statistic_path
from jaxserve.passes.weights import Value, WeightEdit, WeightPlan, dense


@dataclasses.dataclass(frozen=True)
class OutputError:
    """||X W^T - X Q^T|| / ||X W^T|| of one matmul on the calibration text X.

    `before` is that of rounding the original weight to nearest in the same format, `after` that of what the artifact
    holds; None where nobody measured it.
    """

    before: float | None = None
    after: float | None = None


def energy(weight: np.ndarray, gram: np.ndarray) -> float:
    """trace(W G W^T) of a weight [O, I] and a gram [I, I]: the mean squared length of its outputs."""
    return float(np.sum((weight @ gram) * weight, dtype=np.float64))


@dataclasses.dataclass
class _Sum:
    """Energies of an error and of the outputs that it is relative to."""

    error: float = 0.0
    whole: float = 0.0

    def add(self, change: np.ndarray, weight: np.ndarray, gram: np.ndarray) -> None:
        self.error += energy(change, gram)
        self.whole += energy(weight, gram)

    def relative(self) -> float | None:
        return (self.error / self.whole) ** 0.5 if self.whole > 0 else None


class ErrorMeter:
    """Watches weight edits as they are applied (`passes.weights.Pull`), and measures where one reads a gram.

    The first edit that reads a weight and its gram, be it one that folds scales, sees the weight as it was: there
    rounding to nearest is measured. The one that writes codes gives the error of the result, of which the scales that
    were folded are a part on both sides.
    """

    def __init__(self, result: PipelineResult):
        self._forms = quantized_weights(unstacked(result))
        plan = fusion_plan(result.stages)
        self._whole = {part: path for path in self._forms for part in (path, *plan.originals(path))}
        self._parts = {path: set(plan.originals(path)) for path in self._forms}
        self._before: dict[str, _Sum] = {}
        self._after: dict[str, _Sum] = {}
        self._seen: dict[str, set[str]] = {}

    def __call__(self, edit: WeightEdit, reads: Sequence[Value], results: Sequence[Value]) -> None:
        """To be called with the values that an edit read and wrote."""
        read = dict(zip(edit.reads, reads, strict=True))
        written = dict(zip(edit.writes, results, strict=True))
        for part, value in read.items():
            path = self._whole.get(part)
            gram = None if path is None else self._gram(path, part, read)
            if path is None or gram is None:
                continue
            weight, gram = np.asarray(dense(value), np.float32), np.asarray(dense(gram), np.float32)
            self._round(path, part, weight, gram)
            form = self._forms[path]
            if f"{path}/codes" in written:
                arrays = {field: np.asarray(written[f"{path}/{field}"]) for field in form.fields}
                quantized = QuantizedTensor(form, (weight.shape[0], weight.shape[1]), arrays).dequantize()
                self._after.setdefault(path, _Sum()).add(quantized - weight, weight, gram)

    def _gram(self, path: str, part: str, read: Mapping[str, Value]) -> Value | None:
        """The gram of what a part of a weight multiplies: its own, or that of another part, which reads the same."""
        names = [part, *(self._parts[path] if part != path else ())]
        return next((read[name] for name in map(partial(statistic_path, "gram"), names) if name in read), None)

    def _round(self, path: str, part: str, weight: np.ndarray, gram: np.ndarray) -> None:
        """Measures rounding to nearest: once for each part of a weight, or for the whole when parts are missing."""
        seen = self._seen.setdefault(path, set())
        if part in seen or seen == self._parts[path]:
            return
        if part == path:
            seen.clear()
            self._before.pop(path, None)
            seen |= self._parts[path]
        else:
            seen.add(part)
        change = quantize_rtn(weight, self._forms[path]).dequantize() - weight
        self._before.setdefault(path, _Sum()).add(change, weight, gram)

    def errors(self) -> dict[str, OutputError]:
        """What was measured, by the path of the final weight."""
        found = {}
        for path in self._forms:
            complete = self._seen.get(path) == self._parts[path]
            before = self._before[path].relative() if complete else None
            after = self._after[path].relative() if path in self._after else None
            if before is not None or after is not None:
                found[path] = OutputError(before, after)
        return found


def quantized_weights(graph: Graph) -> dict[str, QuantFormat]:
    """The quantized weights of a graph by path."""
    found = {}
    for eqn in graph.eqns:
        entries = [entry for entry in map(graph.param_of, eqn.invars) if entry is not None]
        if entries and eqn.params.get("format") is not None:
            found[entries[0].path.rsplit("/", 1)[0]] = eqn.params["format"]
    return found


def fusion_plan(stages: Sequence[Stage]) -> WeightPlan:
    """The edits of passes that fuse weights: `originals` of it are a weight's parts, in order."""
    fusing = [stage for stage in stages if stage.step.name.startswith("fuse-")]
    return WeightPlan([edit for stage in fusing for edit in stage.result.edits])
