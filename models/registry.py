"""Every family there is. A new one is a file with a `Family` (and perhaps a `GGUFArchitecture`), and a line here."""

from collections.abc import Mapping
from functools import partial

import flax.linen as nn
import jax.numpy as jnp

from jaxserve.errors import UserError
from jaxserve.models import gguf_config
from jaxserve.models.config import Fields, ModelConfig
from jaxserve.models.family import Family, GGUFArchitecture
from jaxserve.models.llama import LLAMA
from jaxserve.models.mistral import MISTRAL
from jaxserve.models.qwen import QWEN2, QWEN3

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}
"""By `model_type` of config.json."""

GGUF_ARCHITECTURES: dict[str, GGUFArchitecture] = {
    # Mistral files say `llama` too.
    "llama": GGUFArchitecture(
        LLAMA, partial(gguf_config.base_config, family="llama"), partial(gguf_config.sources, paired=True)
    ),
    "qwen2": GGUFArchitecture(QWEN2, partial(gguf_config.base_config, family="qwen2"), gguf_config.sources),
    "qwen3": GGUFArchitecture(
        QWEN3, partial(gguf_config.base_config, family="qwen3", qk_norm=True), gguf_config.sources
    ),
}
"""By `general.architecture`."""


def make_module(config: ModelConfig, dtype: jnp.dtype) -> nn.Module:
    """The flax module of a config, with activations in `dtype`."""
    return FAMILIES[config.family].module(config, jnp.dtype(dtype))


def config_from_hf(fields: Fields) -> ModelConfig:
    """See ModelConfig.from_hf."""
    return _known(FAMILIES, fields.text("model_type"), fields.source, "model_type").from_hf(fields)


def config_from_gguf(fields: Fields, tensors: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """See ModelConfig.from_gguf."""
    name = fields.text("general.architecture")
    architecture = gguf_architecture(name, fields.source)
    return architecture.from_gguf(fields.under(f"{name}."), tensors)


def gguf_architecture(name: str, source: str) -> GGUFArchitecture:
    """The architecture of that name; UserError naming the file and what is supported otherwise."""
    return _known(GGUF_ARCHITECTURES, name, source, "general.architecture")


def _known[T](table: dict[str, T], name: str, source: str, field: str) -> T:
    if name not in table:
        raise UserError(f"{source}: {field} is '{name}', which is not supported; supported: {', '.join(table)}")
    return table[name]
