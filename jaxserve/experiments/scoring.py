"""Perplexity of pipelines on windows of a text, and comparing two of them in pairs.

The text is tokenized whole and cut into windows of --context tokens; every position but a window's first is scored.
"""

import dataclasses
import hashlib
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from jaxserve.calibration import open_tokenizer
from jaxserve.charts import bar_chart
from jaxserve.errors import UserError
from jaxserve.evaluate import DEFAULT_CONTEXT, perplexity_of, read_text, text_windows
from jaxserve.experiments import common
from jaxserve.experiments.common import Settings
from jaxserve.models.resolve import resolve
from jaxserve.passes.pipeline import Pass
from jaxserve.reporting import Reporter, print_table
from jaxserve.rewritten import Rewritten, rewritten_model

TEXT = flags.DEFINE_string("text", None, "UTF-8 text to measure on, used as it is")
CONTEXT = flags.DEFINE_integer(
    "context", None, f"tokens a window of it (default {DEFAULT_CONTEXT}, or as many as the model takes)", lower_bound=2
)
WINDOWS = flags.DEFINE_integer("windows", 8, "score only the first N windows; 0 means all", lower_bound=0)


@dataclasses.dataclass(frozen=True)
class Windows:
    """What is scored: token ids of windows of `context` tokens of `text`."""

    text: str
    context: int
    ids: tuple[tuple[int, ...], ...]

    @staticmethod
    def from_flags(settings: Settings) -> "Windows":
        """The windows of --text; UserError when it is not given or too short, or --context too long."""
        if not TEXT.value:
            raise UserError("--text: say which UTF-8 text to measure on")
        path = pathlib.Path(TEXT.value)
        checkpoint = resolve(settings.model)
        longest, vocab = checkpoint.config.max_positions, checkpoint.config.vocab
        context = CONTEXT.value or min(DEFAULT_CONTEXT, longest)
        if context > longest:
            raise UserError(f"--context {context} is more than {longest}, the model's own limit")
        tokenizer = open_tokenizer(checkpoint)
        found = text_windows(tokenizer, vocab, read_text(path), context, WINDOWS.value, Reporter())
        return Windows(path.name, context, tuple(found))

    def to_json(self) -> dict[str, Any]:
        """What must agree for two runs to be compared; other tools leave out the hash of the ids."""
        digest = hashlib.sha256(np.asarray(self.ids, np.int32).tobytes()).hexdigest()
        return {"text": self.text, "context": self.context, "windows": len(self.ids), "sha256": digest}

    def __str__(self) -> str:
        return f"{self.text}, {len(self.ids)} windows of {self.context} tokens"


@dataclasses.dataclass(frozen=True)
class Score:
    """One pipeline on the windows: `nll[i]` is the mean of -log p over the scored positions of window i."""

    name: str
    spec: str
    nll: tuple[float, ...]
    weight_bytes: int
    seconds: float

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood over all windows, which have the same length."""
        return perplexity_of(math.fsum(self.nll) / len(self.nll))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**dataclasses.asdict(self), "perplexity": self.perplexity}


def score(name: str, passes: Sequence[Pass], windows: Windows, settings: Settings) -> Score:
    """Builds the model that the passes make of the settings' model, and scores the windows with it."""
    return score_variants({name: lambda model: model.window_logits}, passes, windows, settings)[0]


def score_variants(
    variants: Mapping[str, Callable[[Rewritten], Callable[[np.ndarray], jax.Array]]],
    passes: Sequence[Pass],
    windows: Windows,
    settings: Settings,
) -> list[Score]:
    """`score` by name of what computes the logits of a window, each made of the one model."""
    report, start = Reporter(), time.perf_counter()
    model = rewritten_model(settings.model, passes, windows.context, settings.calibration, report)
    size = sum(np.asarray(value).nbytes for value in model.params.values())
    scores = []
    for name, variant in variants.items():
        nll, logits = list[float](), variant(model)
        with report.stage("score", name, total=len(windows.ids)) as stage:
            for window in windows.ids:
                ids = np.asarray(window, np.int32)
                nll.append(float(window_nll(logits(ids), ids)))
                stage.advance(f"window {nll[-1]:.4f}")
            scores.append(Score(name, ",".join(map(str, passes)), tuple(nll), size, time.perf_counter() - start))
            stage.done(f"{name}: perplexity {scores[-1].perplexity:.3f}")
        start = time.perf_counter()
    return scores


@jax.jit
def window_nll(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Mean over t = 1..T-1 of -log softmax(logits[t-1])[ids[t]]; logits [T, V] float32, ids [T] int32."""
    chosen = jnp.take_along_axis(logits[:-1], ids[1:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits[:-1], axis=1) - chosen)


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Mean of ours - theirs over windows, and its standard error (NaN for a single window)."""
    difference = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    count = len(difference)
    return float(difference.mean()), float(difference.std(ddof=1) / math.sqrt(count)) if count > 1 else math.nan


def deliver(
    experiment: str,
    scores: Sequence[Score],
    windows: Windows,
    settings: Settings,
    reference: Mapping[str, Sequence[float]] | None = None,
    chart: str | None = None,
) -> None:
    """Prints the table and writes what was asked for.

    Each score is compared with the nll of its name in `reference`, or with the only one that is there; without a
    reference with the first score. `chart` replaces the bars of --plot.
    """
    reference = reference or {scores[0].name: scores[0].nll}
    rows = []
    for one in scores:
        theirs = reference.get(one.name, next(iter(reference.values())) if len(reference) == 1 else None)
        mean, error = paired(one.nll, theirs) if theirs is not None else (None, None)
        percent = 100 * (perplexity_of(mean) - 1) if mean is not None else None
        rows.append([one.name, one.perplexity, mean, error, percent, one.weight_bytes / 1e6, round(one.seconds, 1)])
    title = f"{settings.model}, {windows}"
    print_table(title, ["pipeline", "perplexity", "Δ nll", "± error", "Δ %", "weights, MB", "seconds"], rows)
    data = {
        "experiment": experiment,
        "settings": settings.to_json(),
        "windows": windows.to_json(),
        "rows": [one.to_json() for one in scores],
    }
    common.write_outputs(data, chart or bars(f"Perplexity, {title}", scores))


def bars(title: str, scores: Sequence[Score]) -> str:
    """Perplexities as bars, by logarithm when one is far above the others."""
    values = [one.perplexity for one in scores if math.isfinite(one.perplexity)]
    spread = bool(values) and max(values) > 8 * min(values)
    return bar_chart(title, [(one.name, one.perplexity) for one in scores], log=spread)
