"""`jaxserve plan`: what a model needs on a GPU and how fast the card could run it, one row a recipe, before compiling.

Every time here is predicted from counted bytes and operations and the ceilings of a data sheet; nothing is measured.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import UserError
from jaxserve.lowering import specs_of, stored_forms, trace_model
from jaxserve.models.config import ModelConfig
from jaxserve.models.resolve import resolve
from jaxserve.pallas_kernels._shapes import size
from jaxserve.passes.graph import Graph, Stored
from jaxserve.passes.pipeline import Context, KvGeometry, Pass, for_platform, run_pipeline
from jaxserve.passes.recipes import find_recipe, parse_spec
from jaxserve.roofline import ROWS, TOKENS, Roofline, count, decode_load, prefill_load, roofline
from jaxserve.targets import Gpu

RECIPES = ("bf16", "w8a16", "w4a16", "w8a8-smoothquant", "w4a8kv4-qserve", "fp8")
USABLE = 0.9
"""The share of a card's memory that weights and cache may fill; activations and the driver take the rest."""

_PAGE = 16


@dataclasses.dataclass(frozen=True)
class Decode:
    """A decode step of `batch` sequences; `cost` is that of a million generated tokens, if a price was given."""

    batch: int
    fits: bool
    step: Roofline
    cost: float | None

    @property
    def tokens_per_second(self) -> float:
        return self.batch / self.step.seconds


@dataclasses.dataclass(frozen=True)
class Sizing:
    """One recipe on one card. `largest_batch` is how many sequences of the context's length fit beside the weights."""

    recipe: str
    weight_bytes: int
    kv_bytes_per_token: int
    largest_batch: int
    decode: tuple[Decode, ...]
    prefill: Roofline


def size_model(
    config: ModelConfig,
    stored: dict[str, Stored],
    recipes: Sequence[str],
    gpu: Gpu,
    batches: Sequence[int],
    context: int,
    price: float | None = None,
) -> list[Sizing]:
    """A `Sizing` for each recipe that the card has units for; `price` is for an hour of the card."""
    found = []
    for recipe in recipes:
        graph = rewritten_graph(config, stored, recipe)
        costs = count(graph)
        if {cost.unit for cost in costs} - gpu.rates.keys():
            continue
        weights, per_token = weight_bytes(graph), kv_bytes_per_token(graph)
        largest = max(0, int(gpu.memory_bytes * USABLE - weights) // (per_token * context))
        decode = []
        for batch in batches:
            step = roofline(costs, decode_load(batch, context), gpu)
            cost = None if price is None else price / 3600 * step.seconds / batch * 1e6
            decode.append(Decode(batch, batch <= largest, step, cost))
        prefill = roofline(costs, prefill_load(context), gpu)
        found.append(Sizing(recipe, weights, per_token, largest, tuple(decode), prefill))
    return found


def recommend(sizings: Sequence[Sizing]) -> Decode | None:
    """The decode of the largest batch asked for that any recipe fits, by the recipe that is fastest there."""
    fitting = [decode for sizing in sizings for decode in sizing.decode if decode.fits]
    return max(fitting, key=lambda decode: (decode.batch, decode.tokens_per_second), default=None)


def rewritten_graph(config: ModelConfig, stored: dict[str, Stored], recipe: str) -> Graph:
    """The graph that a recipe makes of a model, at the sizes that `count` wants."""
    return small_graph(config, stored, parse_spec(find_recipe(recipe).spec(page=_PAGE)))


def small_graph(config: ModelConfig, stored: Mapping[str, Stored], passes: Sequence[Pass]) -> Graph:
    """The graph that passes make of a model, at the sizes that `count` wants."""
    graph = trace_model(config, TOKENS, ROWS, stored)
    return run_pipeline(
        graph, for_platform(passes, "cuda"), Context(KvGeometry(num_pages=8, pages_per_seq=4, seqs=ROWS))
    ).graph


def pool_tokens(graph: Graph, gpu: Gpu) -> int:
    """Tokens whose keys and values fit beside the weights. UserError when not even the weights fit."""
    weights, usable = weight_bytes(graph), int(gpu.memory_bytes * USABLE)
    if weights >= usable:
        raise UserError(f"{weights / 1e9:.1f} GB of weights do not fit the {usable / 1e9:.1f} GB usable of {gpu.name}")
    return (usable - weights) // kv_bytes_per_token(graph)


def weight_bytes(graph: Graph) -> int:
    """Bytes of all parameters."""
    return size(*specs_of(graph, "param").values())


def kv_bytes_per_token(graph: Graph) -> int:
    """Bytes that one token takes in the caches of all layers, [L, pages, B, ...]."""
    return sum(size(spec) // (spec.shape[1] * spec.shape[2]) for spec in specs_of(graph, "cache").values())


def read_model(name: str) -> tuple[ModelConfig, dict[str, Stored]]:
    """The config of a model, and the quantized forms in which its checkpoint keeps weights.

    `name` is what `jaxserve compile` takes, or a config.json alone: weights are not needed. UserError if it is neither.
    """
    path = pathlib.Path(name)
    if path.suffix == ".json" and path.is_file():
        try:
            values = json.loads(path.read_text())
        except ValueError as error:
            raise UserError(f"{path}: is not JSON ({error})") from error
        return ModelConfig.from_hf(values, str(path)), {}
    checkpoint = resolve(name)
    return checkpoint.config, stored_forms(checkpoint)


def to_json(sizings: Sequence[Sizing], gpu: Gpu, context: int) -> dict[str, Any]:
    """Plain JSON values: bytes, seconds, and the price's currency."""
    best = recommend(sizings)
    return {
        "target": gpu.name,
        "context": context,
        "recommended": next((s.recipe for s in sizings if best in s.decode), None),
        "recipes": [
            {
                "recipe": sizing.recipe,
                "weight_bytes": sizing.weight_bytes,
                "kv_bytes_per_token": sizing.kv_bytes_per_token,
                "largest_batch": sizing.largest_batch,
                "decode": [
                    {"batch": d.batch, "fits": d.fits, "cost_per_million_tokens": d.cost, **_step(d.step)}
                    for d in sizing.decode
                ],
                "prefill": _step(sizing.prefill),
            }
            for sizing in sizings
        ],
    }


def _step(step: Roofline) -> dict[str, Any]:
    return {"seconds": step.seconds, "bound": step.bound, "bytes": step.bytes, "operations": step.ops}
