"""--recipes: the pipelines that an experiment compares."""

import re
from collections.abc import Sequence

from absl import flags

from jaxserve.errors import UserError
from jaxserve.experiments import common
from jaxserve.passes.pipeline import Pass
from jaxserve.passes.recipes import PASSES, RECIPES, find_recipe, parse_spec

PIPELINES = flags.DEFINE_multi_string(
    "recipes", None, "names separated by commas, or LABEL:PIPELINE, or a pipeline; may be repeated"
)


def chosen_pipelines(default: str) -> dict[str, tuple[Pass, ...]]:
    """What --recipes and --activations say, by label; `default` when --recipes is not given."""
    return named_pipelines(PIPELINES.value or [default], common.ACTIVATIONS.value or "")


def one_pipeline(value: str, activations: str = "", flag: str = "--pipeline") -> tuple[Pass, ...]:
    """The pipeline that a flag names; UserError for what is none, or several."""
    found = named_pipelines([value], activations, flag)
    if len(found) > 1:
        raise UserError(f"{flag} {value}: one recipe or pipeline is wanted, not {len(found)}")
    return next(iter(found.values()))


def named_pipelines(
    values: Sequence[str], activations: str = "", flag: str = "--recipes"
) -> dict[str, tuple[Pass, ...]]:
    """Pipelines by label; UserError for what is neither a recipe nor a pipeline, or a label that is given twice."""
    found: dict[str, tuple[Pass, ...]] = {}
    for value in values:
        if not value.strip():
            raise UserError(f"{flag} is empty: name recipes, or leave it out")
        for label, spec in _labelled(value, activations, flag):
            if label in found:
                raise UserError(f"{flag}: {label!r} is given twice; write LABEL:PIPELINE to tell them apart")
            try:
                found[label] = parse_spec(spec)
            except UserError as error:
                raise UserError(f"{flag} {value}: {error}") from None
    return found


def _labelled(value: str, activations: str, flag: str) -> list[tuple[str, str]]:
    """(label, pipeline) of each name, if names of recipes are what is meant: something is one, or nothing is a pass."""
    names = [name.strip() for name in value.split(",") if name.strip()]
    unknown = [name for name in names if name not in RECIPES]
    if not unknown:
        return [(name, recipe_spec(name, activations)) for name in names]
    if len(unknown) < len(names) or not PASSES.keys() & set(re.findall(r"[\w-]+", value)):
        raise UserError(
            f"{flag} {value}: {unknown[0]!r} is no recipe; recipes: {', '.join(RECIPES)}. A pipeline of your own goes "
            f"into a {flag} of its own; `jaxserve passes` lists the passes"
        )
    label = re.match(r"([\w.+-]+):", value)
    return [(label[1], value[label.end() :])] if label else [(value, value)]


def recipe_spec(name: str, activations: str = "") -> str:
    """The pipeline of a recipe as experiments run it: one long sequence, large pages, layers written out."""
    return find_recipe(name).spec(page=128, activations=activations, loops=False)
