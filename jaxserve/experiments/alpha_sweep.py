"""SmoothQuant's alpha: how much of the activations' range is moved into the weights, against perplexity.

s_j = max|X_j|^alpha / max|W_j|^(1-alpha) (Xiao et al., arXiv:2211.10438). --alphas are tried one after the other in
the fold-scales pass of --pipeline; the first line is the pipeline without that pass.
"""

import dataclasses
from collections.abc import Sequence

from absl import flags

from jaxserve.charts import Series, line_chart
from jaxserve.errors import UserError
from jaxserve.experiments import common, pipelines, scoring
from jaxserve.experiments.common import Settings
from jaxserve.experiments.scoring import Score, Windows
from jaxserve.passes.pipeline import Pass

ALPHAS = flags.DEFINE_list("alphas", ["0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9"], "values of alpha, or auto")
PIPELINE = flags.DEFINE_string("pipeline", "w8a8-smoothquant", "a recipe or pipeline that has fold-scales in it")
FOLD = "fold-scales"


def with_alpha(passes: Sequence[Pass], alpha: str) -> tuple[Pass, ...]:
    """The pipeline with another alpha in its SmoothQuant folds; UserError when it has none."""
    found = tuple(_replaced(step, alpha) for step in passes)
    if found == tuple(passes) and not any(step.name == FOLD for step in passes):
        raise UserError(f"--pipeline: there is no {FOLD} in it: {','.join(map(str, passes))}")
    return found


def _replaced(step: Pass, alpha: str) -> Pass:
    if step.name != FOLD or getattr(step, "method", "") != "smoothquant":
        return step
    return dataclasses.replace(step, **{"alpha": alpha})


def chart(scores: Sequence[Score], title: str) -> str:
    """Perplexity over alpha, beside the pipeline that folds nothing."""
    plain, *swept = scores
    numbers = [(float(one.name), one.perplexity) for one in swept if one.name != "auto"]
    ends = [(x, plain.perplexity) for x, _ in (numbers[0], numbers[-1])] if numbers else []
    return line_chart(title, [Series("alpha", numbers), Series("nothing folded", ends)], x="alpha", y="perplexity")


def run(settings: Settings) -> None:
    """The command."""
    ((_, passes),) = pipelines.named_pipelines([PIPELINE.value], common.ACTIVATIONS.value or "").items()
    tried = {"none": tuple(step for step in passes if step.name != FOLD)}
    tried |= {alpha: with_alpha(passes, alpha) for alpha in ALPHAS.value}
    windows = Windows.from_flags(settings)
    scores = [scoring.score(name, found, windows, settings) for name, found in tried.items()]
    title = f"SmoothQuant's alpha, {settings.model}, {windows}"
    scoring.deliver("alpha_sweep", scores, windows, settings, chart=chart(scores, title))


if __name__ == "__main__":
    common.run_main(run, scoring)
