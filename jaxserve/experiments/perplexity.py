"""Perplexity of recipes and pipelines on a text, with standard errors paired by window.

Windows differ far more from each other than recipes do, so two recipes are compared by the mean over windows of the
difference in mean negative log-likelihood, and its standard error: here with the first of --recipes, or with --against,
the --json of another run on the same windows.

With --references each is compared with itself: our kernels with the references that define what they compute. Recipes
that round activations or caches to few bits answer to any change, so a third line has our kernels again, with
parameters moved by a millionth: what such a change does.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Sequence

import jax
import numpy as np
from absl import flags

from jaxserve.errors import UserError
from jaxserve.experiments import common, pipelines, scoring
from jaxserve.experiments.common import Settings
from jaxserve.experiments.scoring import Score, Windows
from jaxserve.rewritten import Rewritten

AGAINST = flags.DEFINE_string("against", None, "JSON of an earlier run on the same windows to compare with")
REFERENCES = flags.DEFINE_bool(
    "references", False, "score each pipeline also by XLA's references of our ops, and compare its kernels with them"
)


def moved(model: Rewritten) -> Rewritten:
    """The model with each number of its float32 parameters a millionth larger or smaller."""
    rng = np.random.default_rng(0)

    def move(value: jax.Array) -> jax.Array:
        return value * (1 + 1e-6 * rng.choice([-1, 1], value.shape)).astype("float32")

    params = {path: move(value) if value.dtype == "float32" else value for path, value in model.params.items()}
    return dataclasses.replace(model, params=params)


VARIANTS = {
    "": lambda model: model.window_logits,
    " (XLA)": lambda model: functools.partial(model.window_logits, references=True),
    " (moved)": lambda model: moved(model).window_logits,
}


def earlier_run(path: pathlib.Path, windows: Windows) -> dict[str, Sequence[float]]:
    """nll by name from another run's JSON; UserError when it is not one, or was measured on other windows."""
    try:
        data = json.loads(path.read_text())
        found = {row["name"]: row["nll"] for row in data["rows"]}
        theirs = dict(data["windows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--against {path}: not the JSON of a perplexity run ({error!r:.80})") from None
    ours = windows.to_json()
    if theirs != {name: value for name, value in ours.items() if name in theirs or name != "sha256"}:
        raise UserError(f"--against {path}: it was measured on {theirs}, this run on {ours}")
    return found


def run(settings: Settings) -> None:
    """The command."""
    chosen = pipelines.chosen_pipelines("f32,bf16,w8a16,w4a16")
    if AGAINST.value and REFERENCES.value:
        raise UserError("--against and --references: a pipeline is compared with one thing; leave one out")
    windows = Windows.from_flags(settings)
    reference = earlier_run(pathlib.Path(AGAINST.value), windows) if AGAINST.value else {}
    scores: list[Score] = []
    for name, passes in chosen.items():
        if not REFERENCES.value:
            scores.append(scoring.score(name, passes, windows, settings))
            continue
        variants = {f"{name}{what}": variant for what, variant in VARIANTS.items()}
        found = scoring.score_variants(variants, passes, windows, settings)
        scores += found
        reference |= {found[0].name: found[1].nll, found[2].name: found[0].nll}
    scoring.deliver("perplexity", scores, windows, settings, reference)


if __name__ == "__main__":
    common.run_main(run, pipelines, scoring)
