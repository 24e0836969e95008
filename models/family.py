"""What the project knows about one model family, and how a parameter is found among a checkpoint's tensors."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxserve.models.config import Fields, ModelConfig


@dataclasses.dataclass(frozen=True)
class Source:
    """The stored tensor that a parameter comes from.

    `paired_heads` says that the rows of each of that many heads are stored with the two channels of a rotary pair side
    by side (0, H/2, 1, H/2 + 1, ...), as llama.cpp keeps q and k of its `llama` architecture.
    """

    name: str
    paired_heads: int | None = None

    def row_order(self, shape: tuple[int, ...]) -> np.ndarray | None:
        """Which stored row each row of a parameter of that shape is; None when they are the same."""
        if self.paired_heads is None:
            return None
        return np.arange(shape[0]).reshape(self.paired_heads, -1, 2).swapaxes(1, 2).reshape(-1)


Sources = dict[str, Source]


@dataclasses.dataclass(frozen=True)
class Family:
    """One family: `name` is what a `config.json` calls it in `model_type`.

    `module(config, dtype)` is the flax module; `from_hf` reads a `config.json`; `hf_sources` names the tensor that each
    parameter path comes from. `ignored` are patterns of stored tensors that mean nothing to a model (constants).
    """

    name: str
    module: Callable[[ModelConfig, jnp.dtype], nn.Module]
    from_hf: Callable[[Fields], ModelConfig]
    hf_sources: Callable[[ModelConfig], Sources]
    ignored: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)


@dataclasses.dataclass(frozen=True)
class GGUFArchitecture:
    """What one value of `general.architecture` in a GGUF file means, and the family that it is.

    `from_gguf` gets the fields that start with the architecture's name, without it, and the shapes of the file's
    tensors by name. `sources` names the tensor that each parameter path comes from.
    """

    family: Family
    from_gguf: Callable[[Fields, Mapping[str, tuple[int, ...]]], ModelConfig]
    sources: Callable[[ModelConfig], Sources]


def param_specs(module: nn.Module) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter by path (`layers_0/mlp/up_proj/kernel`); nothing is allocated."""
    index = jax.ShapeDtypeStruct((1,), jnp.int32)
    variables = jax.eval_shape(module.init, jax.eval_shape(lambda: jax.random.key(0)), index, index, index, index)
    return cast(dict[str, jax.ShapeDtypeStruct], flatten_dict(variables["params"], sep="/"))


def apply_params(module: nn.Module, params: Mapping[str, jax.Array], *inputs: jax.Array) -> jax.Array:
    """The logits alone of `logits_and_hidden`, with the same inputs."""
    return logits_and_hidden(module, params, *inputs)[0]


def logits_and_hidden(
    module: nn.Module,
    params: Mapping[str, jax.Array],
    tokens: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    logit_rows: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The module's logits [R, V] with parameters given by path, the form that passes trace, and what they are made of:
    the output of the last norm, [R, D]."""
    variables = {"params": unflatten_dict(dict(params), sep="/")}
    logits, kept = module.apply(
        variables,
        *(tokens, positions, segments, logit_rows),
        capture_intermediates=lambda inner, _: inner.name == "norm",
        mutable=["intermediates"],
    )
    return cast(jax.Array, logits), cast(Any, kept)["intermediates"]["norm"]["__call__"][0]
