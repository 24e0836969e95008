"""SmoothQuant's alpha: how much of the activations' range is moved into the weights, against perplexity.

s_j = max|X_j|^alpha / max|W_j|^(1-alpha) (Xiao et al., arXiv:2211.10438). --alphas are tried one after the other in
the fold-scales pass of --pipeline (which may be one of AWQ's, too); the first line is the pipeline without that pass.
"""

import dataclasses
from collections.abc import Sequence

from absl import flags

from jaxserve.charts import Series, line_chart
from jaxserve.errors import UserError
from jaxserve.experiments import common, pipelines, scoring
from jaxserve.experiments.common import Settings
from jaxserve.experiments.scoring import Score, Windows
from jaxserve.passes.fold_scales import FoldScales
from jaxserve.passes.pipeline import Pass

ALPHAS = flags.DEFINE_list("alphas", ["0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9"], "values of alpha, or auto")
PIPELINE = flags.DEFINE_string("pipeline", "w8a8-smoothquant", "a recipe or pipeline that has fold-scales in it")


def with_alpha(passes: Sequence[Pass], alpha: str) -> tuple[Pass, ...]:
    """The pipeline with another alpha in its folds; UserError when it has none, or alpha is not one."""
    if not any(isinstance(step, FoldScales) for step in passes):
        raise UserError(f"--pipeline: there is no {FoldScales.name} in it: {','.join(map(str, passes))}")
    return tuple(dataclasses.replace(step, alpha=alpha) if isinstance(step, FoldScales) else step for step in passes)


def chart(scores: Sequence[Score], title: str) -> str:
    """Perplexity over alpha, beside the pipeline that folds nothing."""
    plain, *swept = scores
    numbers = [(float(one.name), one.perplexity) for one in swept if one.name != "auto"]
    ends = [(x, plain.perplexity) for x, _ in (numbers[0], numbers[-1])] if numbers else []
    return line_chart(title, [Series("alpha", numbers), Series("nothing folded", ends)], x="alpha", y="perplexity")


def run(settings: Settings) -> None:
    """The command."""
    passes = pipelines.one_pipeline(PIPELINE.value, common.ACTIVATIONS.value or "")
    tried = {"none": tuple(step for step in passes if not isinstance(step, FoldScales))}
    tried |= {alpha: with_alpha(passes, alpha) for alpha in ALPHAS.value}
    windows = Windows.from_flags(settings)
    scores = [scoring.score(name, found, windows, settings) for name, found in tried.items()]
    title = f"SmoothQuant's alpha, {settings.model}, {windows}"
    scoring.deliver("alpha_sweep", scores, windows, settings, chart=chart(scores, title))


if __name__ == "__main__":
    common.run_main(run, scoring)
