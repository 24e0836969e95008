"""Whole steps of models by their shapes alone, for what is compiled for a card or timed on one without a checkpoint."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxserve.lowering import graph_forward, specs_of, trace_model
from jaxserve.models.config import ModelConfig
from jaxserve.pallas_kernels._shapes import size
from jaxserve.passes.graph import Graph
from jaxserve.passes.pipeline import Context, KvGeometry, for_platform, run_pipeline
from jaxserve.passes.recipes import find_recipe, parse_spec
from jaxserve.serving import state as slot_state
from jaxserve.serving.request import Limits
from jaxserve.serving.step import Bucket, InputLayout, step_function
from jaxserve.targets import Target

PAGE = 16
RECIPES = {"bf16": "bf16", "w8a8": "w8a8-smoothquant", "w4a16": "w4a16", "w4a8kv4": "w4a8kv4-qserve"}
"""Recipes by their short names."""

_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu"}
MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": _LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
    "llama-2-7b": _LLAMA
    | {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
    },
    "tiny": _LLAMA
    | {
        "vocab_size": 256,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "max_position_embeddings": 512,
    },
}
"""What their config.json files say; `tiny` is for trying out the scripts."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of a model under a recipe: its rewritten graph, and the function that a server would call."""

    graph: Graph
    bucket: Bucket
    limits: Limits

    @property
    def function(self) -> Callable[..., Any]:
        """step(params, caches, state, packed), of which caches and state are to be donated."""
        return step_function(graph_forward(self.graph), self.bucket, self.limits)

    @property
    def specs(self) -> tuple[Any, ...]:
        """The shapes of its arguments."""
        return (
            specs_of(self.graph, "param"),
            specs_of(self.graph, "cache"),
            slot_state.state_specs(self.limits),
            InputLayout.of(self.bucket, self.limits).spec,
        )

    @property
    def cache_bytes(self) -> int:
        return size(*specs_of(self.graph, "cache").values())

    def inputs(self, context: int) -> np.ndarray:
        """What the host would send for the bucket's sequences, each with the pages of `context` tokens of its own."""
        layout = InputLayout.of(self.bucket, self.limits)
        packed = np.zeros(layout.size, np.int32)
        fields, seqs, pages = layout.unpack(packed), self.bucket.seqs, -(-context // PAGE)
        fields["tokens"][:] = np.arange(self.bucket.tokens) % self.limits.vocab_size
        fields["slots"][:] = np.arange(seqs)
        fields["query_counts"][:] = self.bucket.tokens // seqs
        fields["samples"][:] = 1
        order = np.random.default_rng(0).permutation(self.limits.num_pages)[: seqs * pages]
        fields["block_tables"][:, :pages] = order.reshape(seqs, pages)
        return packed


def make_step(model: str, recipe: str, tokens: int, seqs: int, context: int, target: Target, layers: int = 0) -> Step:
    """The step of `tokens` tokens of `seqs` sequences, with a cache for contexts of `context` tokens; of the model's
    first `layers` layers if any are named."""
    config = ModelConfig.from_hf(MODELS[model], model)
    config = config.with_layers(layers) if layers else config
    pages = -(-context // PAGE)
    limits = Limits(seqs, context, PAGE, seqs * pages, config.vocab, token_budget=max(tokens, seqs))
    bucket = Bucket("step", tokens, seqs)
    passes = for_platform(parse_spec(find_recipe(RECIPES[recipe]).spec(page=PAGE)), target.platform)
    graph = trace_model(config, bucket.tokens, bucket.logit_rows, {})
    context_of = Context(KvGeometry(limits.num_pages, limits.pages_per_seq, seqs))
    return Step(run_pipeline(graph, passes, context_of).graph, bucket, limits)


def random_arrays(specs: dict[str, jax.ShapeDtypeStruct]) -> Iterator[tuple[str, jax.Array]]:
    """Arrays on the default device: of floats small numbers, of codes any, of scales and zeros small ones."""
    for index, (path, spec) in enumerate(sorted(specs.items())):
        key = jax.random.key(index)
        if spec.dtype in (np.uint8, np.int8):
            most = 128 if "codes" in path else 8
            yield path, jax.random.randint(key, spec.shape, 0, most, np.int32).astype(spec.dtype)
        elif spec.dtype == np.int32:
            yield path, jax.numpy.zeros(spec.shape, spec.dtype)
        else:
            yield path, (jax.random.normal(key, spec.shape, np.float32) * 0.02).astype(spec.dtype)
