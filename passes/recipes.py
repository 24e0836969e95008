"""Recipes: named pipelines, as data. `recipe(name, ...)` gives the textual spec; users compose their own."""

import dataclasses

from jaxserve.errors import UserError
from jaxserve.passes.canonicalize import Canonicalize
from jaxserve.passes.fuse_projections import FuseGateUp, FuseQkv
from jaxserve.passes.insert_paged_kv import InsertPagedKv
from jaxserve.passes.lower_dense_matmul import LowerDenseMatmul
from jaxserve.passes.narrow_matmul import NarrowMatmul
from jaxserve.passes.pipeline import Pass, parse_pipeline
from jaxserve.passes.prune import Prune
from jaxserve.passes.quantize_matmul import QuantizeMatmul

PASSES: dict[str, type[Pass]] = {
    cls.name: cls
    for cls in (Canonicalize, LowerDenseMatmul, Prune, FuseQkv, FuseGateUp, QuantizeMatmul, NarrowMatmul, InsertPagedKv)
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """`scheme` is applied to the weights that `selects` matches; None quantizes nothing.

    `activations` is the dtype in which matmuls read them: f32, or bf16 by `narrow-matmul`.
    """

    name: str
    activations: str
    scheme: str | None = None
    selects: str = r"^layers_\d+/"

    def spec(self, *, rules: str = "", group: str = "", page: int = 16, activations: str = "", kv: str = "") -> str:
        """The pipeline as text. `rules` go before the recipe's own rule; `group` is added to a 4-bit scheme; empty
        `activations` are the recipe's, and `kv` is that of the activations unless given."""
        activations = activations or self.activations
        own = f"{self.selects}={self.scheme}{group}" if self.scheme else ""
        all_rules = ";".join(filter(None, (rules, own)))
        steps = ["canonicalize", "lower-dense-matmul", "fuse-qkv", "fuse-gate-up"]
        if all_rules:
            steps.append(f"quantize-matmul{{rules='{all_rules}'}}")
        if activations == "bf16":
            steps.append("narrow-matmul")
        steps.append(f"insert-paged-kv{{page={page},kv={kv or activations}}}")
        return ",".join(steps)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("f32", activations="f32"),
        Recipe("bf16", activations="bf16"),
        Recipe("w8a16", activations="bf16", scheme="w8a16"),
        Recipe("w4a16", activations="bf16", scheme="w4a16"),
        Recipe("native", activations="bf16", scheme="native", selects=".*"),
    )
}


def find_recipe(name: str) -> Recipe:
    """The recipe called `name`; UserError with the list otherwise."""
    if name not in RECIPES:
        raise UserError(f"unknown recipe {name!r}; recipes: {', '.join(RECIPES)}")
    return RECIPES[name]


def parse_spec(text: str) -> tuple[Pass, ...]:
    """The passes that a textual pipeline names."""
    return parse_pipeline(text, PASSES)
