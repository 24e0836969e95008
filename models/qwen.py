"""Qwen2 (biases on q, k and v) and Qwen3 (norms on every head of q and k)."""

from jaxserve.models.config import Fields, ModelConfig
from jaxserve.models.family import Family
from jaxserve.models.hf_config import base_config, layer_windows
from jaxserve.models.llama import Llama, hf_sources


def qwen2_config(fields: Fields) -> ModelConfig:
    """The biases are part of the architecture; no field of the config says so."""
    return base_config(fields, family="qwen2", windows=layer_windows, qkv_bias=True)


def qwen3_config(fields: Fields) -> ModelConfig:
    """`attention_bias` puts a bias on all four projections; heads have 128 channels when the config does not say."""
    bias = fields.flag("attention_bias", False)
    return base_config(
        fields, family="qwen3", windows=layer_windows, head_dim=128, qkv_bias=bias, o_bias=bias, qk_norm=True
    )


QWEN2 = Family("qwen2", Llama, qwen2_config, hf_sources)
QWEN3 = Family("qwen3", Llama, qwen3_config, hf_sources)
