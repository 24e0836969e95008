"""Mistral: Llama with a sliding window in every layer, where the config gives one."""

from jaxserve.models.config import MAX_POSITIONS, Fields, ModelConfig
from jaxserve.models.family import Family
from jaxserve.models.hf_config import base_config
from jaxserve.models.llama import Llama, hf_sources


def windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """The same window everywhere: 4096 in configs too old to say, none where the field is null."""
    default = None if "sliding_window" in fields else 4096
    return (fields.integer("sliding_window", default, high=MAX_POSITIONS),) * layers


def config_from_hf(fields: Fields) -> ModelConfig:
    """Mistral never has biases; old configs mean 8 key/value heads when they do not say."""
    return base_config(fields, family="mistral", kv_heads=8, windows=windows)


MISTRAL = Family("mistral", Llama, config_from_hf, hf_sources)
