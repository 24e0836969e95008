"""Which scale each channel of an activation gets: the formulas of SmoothQuant and AWQ, a search for their exponent.

With x the activation, W [O, I] a weight that reads it and s the scales, x / s and W s are going to be quantized.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from jax.scipy.special import erf

from jaxserve.errors import UserError
from jaxserve.pallas_kernels import QuantFormat, quantize_rtn
from jaxserve.passes.rules import Scheme
from jaxserve.passes.scale_flow import Labels
from jaxserve.passes.scale_weights import spread_scales
from jaxserve.passes.statistics import NOT_FINITE, StatisticKind

Method = Literal["smoothquant", "awq", "awq-duo"]
STEPS = 20  # exponents that a search tries: 0, 1/20, ... 19/20, as AWQ does
ROWS = 512  # outputs of a weight that a search looks at
LIMIT = math.log(1e4)  # scales are kept within 1e-4 and 1e4


@dataclasses.dataclass(frozen=True, eq=False)
class Reader:
    """A matmul that reads the activation: its weight [O, I] float32 and the `path` of that, the `labels` [I] of its
    inputs (which channel each is; several may be one), and statistics of those inputs by kind."""

    path: str
    weight: np.ndarray
    labels: Labels
    statistics: Mapping[StatisticKind, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Chooser:
    """Scales by `method`, with the exponent `alpha` or, if that is None, the best of a search.

    - smoothquant (Xiao et al., arXiv:2211.10438): s_j = max|x_j|^alpha / max_o|W_oj|^(1 - alpha);
    - awq (Lin et al., arXiv:2306.00978): s_j = (mean|x_j|)^alpha;
    - awq-duo (as llm-compressor has it): s_j = (mean|x_j|)^alpha / (mean_o|W_oj|)^(1 - alpha).

    Maxima and means are over everything that shares a scale: all readers, and the inputs of one channel. The last two
    are divided by sqrt(max_j s_j min_j s_j), which keeps numbers moderate. A channel that is never active, or that
    nothing reads, gets 1. The search minimizes `expected_error` with weights and activations quantized by `scheme`, and
    has s = 1 among what it tries.
    """

    method: Method
    alpha: float | None
    scheme: Scheme

    @property
    def kinds(self) -> tuple[StatisticKind, ...]:
        """The statistics that a choice needs."""
        formula: StatisticKind = "absmax" if self.method == "smoothquant" else "absmean"
        searched: tuple[StatisticKind, ...] = ()
        if self.alpha is None:
            searched = ("gram", "absmax") if self.scheme.activation == "int8-static" else ("gram",)
        return tuple(dict.fromkeys((formula, *searched)))

    def __call__(self, readers: Sequence[Reader], channels: int) -> np.ndarray:
        """The scales [channels], float32. UserError when a statistic or weight is not finite."""
        for reader in readers:
            if not np.isfinite(reader.weight).all():
                raise UserError(f"{reader.path}: its weights hold infinities or NaN, so no scales can be chosen")
            if not all(np.isfinite(statistic).all() for statistic in reader.statistics.values()):
                raise UserError(f"{reader.path}: {NOT_FINITE}")
        if self.alpha is not None:
            return self.formula(readers, channels, self.alpha)
        tried = [np.ones(channels, np.float32)]
        tried += [self.formula(readers, channels, step / STEPS) for step in range(STEPS)]
        errors = [sum(self.expected_error(reader, scales) for reader in readers) for scales in tried]
        return tried[int(np.argmin(errors))]

    def formula(self, readers: Sequence[Reader], channels: int, alpha: float) -> np.ndarray:
        """The scales for one exponent."""
        smooth = self.method == "smoothquant"
        combine, reduce = (_largest, np.max) if smooth else (_average, np.mean)
        active = combine(
            [reader.statistics["absmax" if smooth else "absmean"] for reader in readers], readers, channels
        )
        weight = combine([reduce(np.abs(reader.weight), axis=0) for reader in readers], readers, channels)
        live = (active > 0) & (weight > 0)
        logs = alpha * np.log(active, where=live, out=np.zeros(channels))
        if self.method != "awq":
            logs -= (1 - alpha) * np.log(weight, where=live, out=np.zeros(channels))
        logs = np.clip(logs, -LIMIT, LIMIT)
        if not smooth and live.any():
            logs -= (logs[live].max() + logs[live].min()) / 2
        return np.where(live, np.exp(logs), 1).astype(np.float32)

    def expected_error(self, reader: Reader, scales: np.ndarray) -> float:
        """The mean squared error of a reader's outputs, summed over them, after quantization with these scales.

        Rounding weights to W s + D changes outputs by x D^T / s, which is trace(E gram E^T) with E = D / s. Rounding
        activations x / s to int8 in steps of d adds noise of variance d^2 / 12 to each, which the weights sum up to
        d^2 / 12 sum_oj (W_oj s_j)^2. The step is max_j |x_j / s_j| / 127, of the text if it is static; that of a token
        is taken for what it would be if channels were independent and gaussian. Rounding to e4m3 follows each number's
        own size, so that no scale helps, and is left out. Of more than ROWS outputs an even part is looked at.
        """
        weight, factors, gram = reader.weight, spread_scales(scales, reader.labels), reader.statistics["gram"]
        part = weight[np.linspace(0, len(weight) - 1, min(len(weight), ROWS)).astype(int)]
        rounded = _rounded(part * factors, self.scheme.format)
        if rounded is None:
            return math.inf
        change = rounded / factors - part
        error = float(np.sum((change @ gram) * change, dtype=np.float64))
        if self.scheme.activation in ("int8", "int8-static"):
            if self.scheme.activation == "int8":
                peak = expected_peak(np.diag(gram) / factors**2)
            else:
                peak = float(np.max(reader.statistics["absmax"] / factors)) ** 2
            error += peak / 127**2 / 12 * float(np.sum(np.square(rounded, dtype=np.float64)))
        return error * len(weight) / len(part)


def expected_peak(variances: np.ndarray) -> float:
    """The mean of max_j z_j^2 for independent gaussian z_j of these variances [I]."""
    deviations = np.sqrt(np.maximum(variances, 1e-30))
    # P(max |z_j| <= m) is the product of erf(m / (d_j sqrt 2)), and the mean the integral of 2 m (1 - P).
    points = np.linspace(0, 6 * deviations.max(), 129)[:, None]
    below = np.prod(np.asarray(erf(points / (deviations * math.sqrt(2)))), axis=1)
    return float(np.trapezoid(2 * points[:, 0] * (1 - below), points[:, 0]))


def _rounded(weight: np.ndarray, format: QuantFormat | None) -> np.ndarray | None:
    """A weight after quantization; None when the format cannot hold its scales."""
    if format is None:
        return weight
    try:
        return quantize_rtn(weight, format).dequantize()
    except ValueError:
        return None


def _largest(values: Sequence[np.ndarray], readers: Sequence[Reader], channels: int) -> np.ndarray:
    """The largest of the values [I] of all readers' inputs that are one channel: [channels]."""
    found = np.zeros(channels)
    for value, labels, known in _labelled(values, readers):
        np.maximum.at(found, labels[known], value[known])
    return found


def _average(values: Sequence[np.ndarray], readers: Sequence[Reader], channels: int) -> np.ndarray:
    """Their mean, in which an input counts once for every output of its reader."""
    total, count = np.zeros(channels), np.zeros(channels)
    for (value, labels, known), reader in zip(_labelled(values, readers), readers, strict=True):
        total += len(reader.weight) * np.bincount(labels[known], value[known], channels)
        count += len(reader.weight) * np.bincount(labels[known], minlength=channels)
    return total / np.maximum(count, 1)


def _labelled(values: Sequence[np.ndarray], readers: Sequence[Reader]) -> list[tuple[np.ndarray, Labels, np.ndarray]]:
    return [(value, reader.labels, reader.labels >= 0) for value, reader in zip(values, readers, strict=True)]
