"""jaxserve passes."""

import argparse
import dataclasses
import inspect as inspection
import typing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="a pass, to read all about it, or a recipe, for its pipeline")


def run(options: argparse.Namespace) -> int:
    from jaxserve.errors import UserError
    from jaxserve.passes.recipes import PASSES, RECIPES

    if options.name in RECIPES:
        print(RECIPES[options.name].spec())
        return 0
    if options.name:
        if options.name not in PASSES:
            raise UserError(
                f"no pass and no recipe {options.name!r}; passes: {', '.join(PASSES)}; recipes: {', '.join(RECIPES)}"
            )
        cls = PASSES[options.name]
        fields = [f"  {_describe(field)}" for field in dataclasses.fields(cls)]
        print("\n".join([cls.name, "", inspection.getdoc(cls) or "", "", "options:", *(fields or ["  none"])]))
        return 0
    for name, cls in PASSES.items():
        print(f"{name:<20} {(inspection.getdoc(cls) or '').splitlines()[0]}")
    print()
    for name, recipe in RECIPES.items():
        print(f"{name:<20} {recipe.spec()}")
    return 0


def _describe(field: dataclasses.Field) -> str:
    """An option as a pipeline spells it, and what else it can be."""
    from jaxserve.passes.pipeline import option_name, option_text

    choices = ", ".join(map(option_text, typing.get_args(field.type)))
    return f"{option_name(field.name)}={option_text(field.default)}" + (f"  (one of {choices})" if choices else "")
