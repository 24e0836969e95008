"""Relative output error of every matmul, for several recipes: ||X W^T - X Q^T|| / ||X W^T|| on the calibration text.

X are the activations of the original model, W its weights, and Q the pipeline's in the same coordinates: scales that
were folded are folded back. The table shows the mean over layers for each projection; --json has every layer.
"""

import re
import statistics
from collections.abc import Mapping, Sequence

from jaxserve.charts import Series, line_chart, percent
from jaxserve.experiments import common, pipelines
from jaxserve.experiments.common import Settings
from jaxserve.experiments.output_errors import LAYOUT, Original, original_model, output_errors
from jaxserve.passes.pipeline import Pass
from jaxserve.reporting import print_table

Errors = Mapping[str, Mapping[str, float]]  # by pipeline and by path of the projection's weight


def measure(chosen: Mapping[str, Sequence[Pass]], settings: Settings) -> Errors:
    """The errors of each pipeline; those that lay the model out in one way share what is known of the original."""
    originals: dict[tuple[Pass, ...], Original] = {}
    found = {}
    for name, passes in chosen.items():
        layout = tuple(step for step in passes if step.name in LAYOUT)
        if layout not in originals:
            originals[layout] = original_model(passes, settings)
        found[name] = output_errors(passes, originals[layout], settings)
    return found


def layer_of(path: str) -> int:
    """The layer of a weight."""
    found = re.match(r"layers_(\d+)/", path)
    assert found is not None
    return int(found[1])


def kind_of(path: str) -> str:
    """Which weight of a layer it is (`q_proj`)."""
    return path.removesuffix("/kernel").rsplit("/", 1)[-1]


def by_kind(errors: Mapping[str, float]) -> dict[str, float]:
    """Means over layers."""
    kinds = dict.fromkeys(map(kind_of, errors))
    return {kind: statistics.fmean(e for path, e in errors.items() if kind_of(path) == kind) for kind in kinds}


def by_layer(errors: Mapping[str, float]) -> list[tuple[float, float | None]]:
    """Means over a layer's projections, by layer."""
    layers = sorted(set(map(layer_of, errors)))
    return [(n, statistics.fmean(e for path, e in errors.items() if layer_of(path) == n)) for n in layers]


def run(settings: Settings) -> None:
    """The command."""
    errors = measure(pipelines.chosen_pipelines("w8a16,w4a16"), settings)
    means = {name: by_kind(found) for name, found in errors.items()}
    kinds = list(next(iter(means.values())))
    rows = [[name, *(found[kind] for kind in kinds), statistics.fmean(found.values())] for name, found in means.items()]
    print_table(f"{settings.model}: relative output error, mean over layers", ["pipeline", *kinds, "mean"], rows)
    data = {
        "experiment": "layer_error",
        "settings": settings.to_json(),
        "rows": [
            {"name": name, "layer": layer_of(path), "kind": kind_of(path), "path": path, "error": error}
            for name, found in errors.items()
            for path, error in found.items()
        ],
    }
    lines = [Series(name, by_layer(found)) for name, found in errors.items()]
    common.write_outputs(
        data, line_chart("Relative output error, mean over projections", lines, x="layer", text=percent)
    )


if __name__ == "__main__":
    common.run_main(run, pipelines)
