"""Perplexity of recipes and pipelines on a text, with standard errors paired by window.

Windows differ far more from each other than recipes do, so two recipes are compared by the mean over windows of the
difference in mean negative log-likelihood, and its standard error: here with the first of --recipes, or with --against,
the --json of another run on the same windows.
"""

import json
import pathlib
from collections.abc import Sequence

from absl import flags

from jaxserve.errors import UserError
from jaxserve.experiments import common, pipelines, scoring
from jaxserve.experiments.common import Settings
from jaxserve.experiments.scoring import Windows

AGAINST = flags.DEFINE_string("against", None, "JSON of an earlier run on the same windows to compare with")


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
    windows = Windows.from_flags(settings)
    reference = earlier_run(pathlib.Path(AGAINST.value), windows) if AGAINST.value else None
    scores = [scoring.score(name, passes, windows, settings) for name, passes in chosen.items()]
    scoring.deliver("perplexity", scores, windows, settings, reference)


if __name__ == "__main__":
    common.run_main(run, pipelines, scoring)
