"""Recipes: named pipelines, as data. `recipe(name, ...)` gives the textual spec; users compose their own."""

import dataclasses

from jaxserve.errors import UserError
from jaxserve.passes.canonicalize import Canonicalize
from jaxserve.passes.choose_layout import ChooseLayout
from jaxserve.passes.fold_scales import FoldScales
from jaxserve.passes.fuse_epilogue import FuseEpilogue
from jaxserve.passes.fuse_norm import FuseNorm
from jaxserve.passes.fuse_projections import FuseGateUp, FuseQkv
from jaxserve.passes.fuse_rope import FuseRope
from jaxserve.passes.insert_paged_kv import InsertPagedKv
from jaxserve.passes.lower_dense_matmul import LowerDenseMatmul
from jaxserve.passes.narrow_matmul import NarrowMatmul
from jaxserve.passes.pipeline import Pass, parse_pipeline
from jaxserve.passes.prune import Prune
from jaxserve.passes.quantize_matmul import QuantizeMatmul
from jaxserve.passes.quantize_norm import QuantizeNorm
from jaxserve.passes.roll_layers import RollLayers
from jaxserve.passes.smooth_attention import SmoothAttention
from jaxserve.passes.stack_layers import StackLayers

PASSES: dict[str, type[Pass]] = {
    cls.name: cls
    for cls in (
        *(Canonicalize, LowerDenseMatmul, Prune, FoldScales, SmoothAttention, FuseQkv, FuseGateUp, QuantizeMatmul),
        *(NarrowMatmul, ChooseLayout, StackLayers, FuseNorm, QuantizeNorm, FuseEpilogue, FuseRope),
        *(InsertPagedKv, RollLayers),
    )
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """`scheme` is applied to the weights that `selects` matches; None quantizes nothing.

    `activations` is the dtype in which matmuls read them: f32, or bf16 by `narrow-matmul`. `folds` are passes that move
    scales before anything is quantized, as format strings in which `{scheme}` stands for the scheme; `method` holds the
    options of `quantize-matmul` beside the rules; `kv` is what the cache is kept in, that of the activations if empty.
    """

    name: str
    activations: str
    scheme: str | None = None
    selects: str = r"^layers_\d+/"
    folds: tuple[str, ...] = ()
    method: str = ""
    kv: str = ""

    @property
    def grouped(self) -> bool:
        """Whether the scheme takes the size of a group, and whether it is symmetric."""
        return (self.scheme or "").startswith(("w4a16", "w3a16"))

    def spec(
        self,
        *,
        rules: str = "",
        group: str = "",
        page: int = 16,
        activations: str = "",
        kv: str = "",
        loops: bool = True,
    ) -> str:
        """The pipeline as text. `rules` go before the recipe's own rule; `group` is added to the scheme; `activations`
        and `kv` are the recipe's unless given. Without `loops` layers are not rolled."""
        activations = activations or self.activations
        scheme = f"{self.scheme}{group}" if self.scheme else ""
        all_rules = ";".join(filter(None, (rules, scheme and f"{self.selects}={scheme}")))
        steps = ["canonicalize", "lower-dense-matmul", *(fold.format(scheme=scheme) for fold in self.folds)]
        steps += ["fuse-qkv", "fuse-gate-up"]
        if all_rules:
            quoted = "'" + all_rules.replace("'", "''") + "'"
            steps.append(f"quantize-matmul{{{','.join(filter(None, (f'rules={quoted}', self.method)))}}}")
        if activations == "bf16":
            steps.append("narrow-matmul")
        if all_rules:
            steps.append("choose-layout")
        steps += ["stack-layers", "fuse-norm"]
        if all_rules:
            steps.append("quantize-norm")
        steps += ["fuse-epilogue", "fuse-rope"]
        steps.append(f"insert-paged-kv{{page={page},kv={kv or self.kv or activations}}}")
        if loops:
            steps.append("roll-layers")
        return ",".join(steps)


AWQ = ("fold-scales{{method=awq,scheme='{scheme}'}}",)
SMOOTHQUANT = ("fold-scales{{method=smoothquant,scheme='{scheme}'}}",)
GPTQ = "method=gptq,act-order=static"

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("f32", activations="f32"),
        Recipe("bf16", activations="bf16"),
        Recipe("native", activations="bf16", scheme="native", selects=".*"),
        Recipe("w8a16", activations="bf16", scheme="w8a16"),
        Recipe("w4a16", activations="bf16", scheme="w4a16"),
        Recipe("w4a16-awq", activations="bf16", scheme="w4a16", folds=AWQ, method="method=clip"),
        Recipe("w4a16-gptq", activations="bf16", scheme="w4a16", method=GPTQ),
        Recipe("w3a16-awq", activations="bf16", scheme="w3a16", folds=AWQ, method="method=clip"),
        Recipe("w3a16-gptq", activations="bf16", scheme="w3a16", method=GPTQ),
        Recipe("w8a8-smoothquant", activations="bf16", scheme="w8a8", folds=SMOOTHQUANT),
        Recipe(
            "w4a8kv4-qserve", activations="bf16", scheme="w4a8", folds=("smooth-attention",), method=GPTQ, kv="int4"
        ),
        Recipe("fp8", activations="bf16", scheme="fp8"),
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
