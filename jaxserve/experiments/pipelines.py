"""--recipes: the pipelines that an experiment compares."""

import re
from collections.abc import Sequence

from absl import flags

from jaxserve.errors import UserError
from jaxserve.experiments import common
from jaxserve.passes.pipeline import Pass
from jaxserve.passes.recipes import RECIPES, find_recipe, parse_spec

PIPELINES = flags.DEFINE_multi_string(
    "recipes", None, "names separated by commas, or LABEL:PIPELINE, or a pipeline; may be repeated"
)


def chosen_pipelines(default: str) -> dict[str, tuple[Pass, ...]]:
    """What --recipes and --activations say, by label; `default` when --recipes is not given."""
    return named_pipelines(PIPELINES.value or [default], common.ACTIVATIONS.value or "")


def named_pipelines(values: Sequence[str], activations: str = "") -> dict[str, tuple[Pass, ...]]:
    """Pipelines by label; UserError for what is neither a recipe nor a pipeline, or a label that is given twice."""
    found: dict[str, tuple[Pass, ...]] = {}
    for value in values:
        if not value.strip():
            raise UserError("--recipes is empty: name recipes, or leave it out")
        for label, spec in _labelled(value, activations):
            if label in found:
                raise UserError(f"--recipes: {label!r} is given twice; write LABEL:PIPELINE to tell them apart")
            try:
                found[label] = parse_spec(spec)
            except UserError as error:
                raise UserError(f"pipeline {value!r}: {error}; recipes: {', '.join(RECIPES)}") from None
    return found


def _labelled(value: str, activations: str) -> list[tuple[str, str]]:
    names = [name.strip() for name in value.split(",") if name.strip()]
    if names and all(name in RECIPES for name in names):
        return [(name, recipe_spec(name, activations)) for name in names]
    label = re.match(r"([\w.+-]+):", value)
    return [(label[1], value[label.end() :])] if label else [(value, value)]


def recipe_spec(name: str, activations: str = "") -> str:
    """The pipeline of a recipe as experiments run it: one long sequence, large pages, layers written out."""
    return find_recipe(name).spec(page=128, activations=activations, loops=False)
