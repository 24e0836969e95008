"""What AWQ's salient channels are worth (Lin et al., arXiv:2306.00978, tables 1 and 2), as perplexity.

Weights are rounded to nearest, but a fraction of each weight's input channels is treated better:

- kept: they stay as they are, chosen by their mean |activation|, by the norm of their weights, or at random;
- scaled: the ones with the largest activations are multiplied by s before rounding and divided by it afterwards, which
  is what folding a scale does, and costs no mixed formats.

Rounded weights are multiplied dense here, so that only the numbers change.
"""

import dataclasses
import math
import zlib
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from absl import flags

from jaxserve.errors import UserError
from jaxserve.experiments import common, pipelines, scoring
from jaxserve.experiments.common import Settings
from jaxserve.experiments.scoring import Windows
from jaxserve.pallas_kernels import quantize_rtn
from jaxserve.passes.graph import Graph
from jaxserve.passes.in_place import edit_weights
from jaxserve.passes.pipeline import Context, Pass, PassResult
from jaxserve.passes.recipes import parse_spec
from jaxserve.passes.rules import parse_scheme
from jaxserve.passes.weights import Value, dense

SCHEME = flags.DEFINE_string("scheme", "w3a16:g64", "how weights are rounded, as in quantization rules")
FRACTION = flags.DEFINE_float("fraction", 0.01, "of the input channels that are salient", lower_bound=0, upper_bound=1)
SCALES = flags.DEFINE_list("scales", ["1.25", "1.5", "2", "4"], "factors for the salient channels")

By = Literal["activation", "weight", "random"]


@dataclasses.dataclass(frozen=True)
class RoundWithSalient(Pass):
    """Every layer's weight is rounded in `scheme`, its salient input channels kept (`scale` = 0) or scaled up."""

    name: ClassVar[str] = "round-with-salient"
    scheme: str = "w3a16:g64"
    by: By = "activation"
    fraction: float = 0.01
    scale: float = 0.0

    def run(self, graph: Graph, context: Context) -> PassResult:
        del context
        return edit_weights(graph, self._round, kinds=("absmean",), tolerance=0.5, note="rounded")

    def _round(self, path: str, value: Value, absmean: np.ndarray) -> Value:
        form = parse_scheme(self.scheme).format
        assert form is not None
        weight = np.asarray(dense(value), np.float32)
        chosen = salient(weight, absmean, self.by, self.fraction, path)
        factor = np.where(chosen, self.scale or 1.0, 1.0).astype(np.float32)
        rounded = quantize_rtn(weight * factor, form).dequantize() / factor
        return np.where(chosen, weight, rounded) if self.scale == 0 else rounded


def salient(weight: np.ndarray, absmean: np.ndarray, by: By, fraction: float, seed: str) -> np.ndarray:
    """Which of the I input channels of a weight [O, I] are salient: round(fraction I) of them, as booleans [I].

    At least one is, unless the fraction is 0. `seed` decides the random ones.
    """
    inputs = weight.shape[1]
    count = min(inputs, max(1, round(fraction * inputs))) if fraction else 0
    if by == "random":
        order = np.random.default_rng(zlib.crc32(seed.encode())).permutation(inputs)
    else:
        order = np.argsort(-(absmean if by == "activation" else np.linalg.norm(weight, axis=0)), kind="stable")
    return np.isin(np.arange(inputs), order[:count])


def variants(scheme: str, fraction: float, scales: list[float]) -> dict[str, RoundWithSalient | None]:
    """What is compared, by label; None rounds nothing."""
    part = f"{fraction:.3g}"
    kept = {f"kept {part} by {by}": RoundWithSalient(scheme, by, fraction) for by in ("activation", "weight", "random")}
    scaled = {f"scaled {part} by {s:g}": RoundWithSalient(scheme, "activation", fraction, s) for s in scales}
    plain = {"f32": None, scheme: RoundWithSalient(scheme, fraction=0.0, scale=1.0)}
    return {**plain, **kept, **scaled}


def parse_scales(texts: Sequence[str]) -> list[float]:
    """The factors of --scales; UserError for what is no positive number."""
    try:
        scales = [float(text) for text in texts]
    except ValueError:
        scales = [math.nan]
    if not all(0 < scale < math.inf for scale in scales):
        raise UserError(f"--scales {','.join(texts)}: must be positive numbers")
    return scales


def run(settings: Settings) -> None:
    """The command."""
    scales = parse_scales(SCALES.value)
    *layout, paged = parse_spec(pipelines.recipe_spec("f32", common.ACTIVATIONS.value or ""))
    windows = Windows.from_flags(settings)
    scores = []
    for name, step in variants(SCHEME.value, FRACTION.value, scales).items():
        scores.append(scoring.score(name, [*layout, *([step] if step else []), paged], windows, settings))
    scoring.deliver("salient", scores, windows, settings)


if __name__ == "__main__":
    common.run_main(run, scoring)
