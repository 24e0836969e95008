"""Real models and workloads that the `shapes.py` of every op draws from; tests, benchmarks and tuning read those."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Model:
    """Widths of a transformer, by axis letter: D, F, N, K, H, V."""

    name: str
    width: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def linears(self) -> dict[str, tuple[int, int]]:
        """[O, I] of every kind of linear layer, fused as the compiler fuses them."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (queries + 2 * keys, self.width),
            "o": (self.width, queries),
            "gate_up": (2 * self.mlp, self.width),
            "down": (self.width, self.mlp),
            "head": (self.vocab, self.width),
        }


@dataclasses.dataclass(frozen=True)
class Workload:
    """A step: `sequences` rows of `tokens` new tokens each, which end contexts of `context` tokens."""

    name: str
    sequences: int
    tokens: int
    context: int

    @property
    def step_tokens(self) -> int:
        """T: tokens of the whole step."""
        return self.sequences * self.tokens


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of an op: operand specs, parameters, and what it must read, write and compute at least.

    `fill(rng)` makes operands that fit the specs and make sense (block tables without repeats and so on). The first
    `updated` operands are results, too, and given away to be updated in place.
    """

    name: str
    specs: tuple[jax.ShapeDtypeStruct, ...]
    params: dict[str, Any]
    bytes: int
    flops: int
    fill: Callable[[np.random.Generator], tuple[np.ndarray, ...]]
    updated: int = 0


MODELS = (
    Model("smollm2-135m", width=576, mlp=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152),
    Model("llama-3-8b", width=4096, mlp=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256),
)
WORKLOADS = (
    Workload("decode b=1", sequences=1, tokens=1, context=1024),
    Workload("decode b=32", sequences=32, tokens=1, context=1024),
    Workload("prefill 512", sequences=1, tokens=512, context=512),
)
WIDE_HEADS = (
    Model("gemma-2-9b", width=3584, mlp=14336, heads=16, kv_heads=8, head_dim=256, vocab=256000),
    Model("gemma-3-4b", width=2560, mlp=10240, heads=8, kv_heads=4, head_dim=256, vocab=262208),
)
"""For attention alone: other ops see nothing in them that the models above lack."""
WIDE_ROWS = (Model("mistral-large", width=12288, mlp=28672, heads=96, kv_heads=8, head_dim=128, vocab=32768),)
"""For norms alone, whose kernels hold a row in registers."""


def _under_workloads(*models: Model) -> tuple[tuple[str, Model, Workload], ...]:
    return tuple((f"{model.name} {work.name}", model, work) for model in models for work in WORKLOADS)


STEPS = _under_workloads(*MODELS)
"""Every model under every workload, with the name of the pair."""
NORM_STEPS = _under_workloads(*MODELS, *WIDE_ROWS)

PAGE_SIZE = 16


def spec(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    """A ShapeDtypeStruct, dtype first so that shapes read like the docstrings."""
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype))


def size(*specs: jax.ShapeDtypeStruct) -> int:
    """Bytes of some arrays."""
    return sum(int(np.prod(each.shape)) * each.dtype.itemsize for each in specs)


def normal(rng: np.random.Generator, like: jax.ShapeDtypeStruct) -> np.ndarray:
    """Standard normal numbers of the given shape and dtype."""
    return rng.standard_normal(like.shape, dtype=np.float32).astype(like.dtype)
