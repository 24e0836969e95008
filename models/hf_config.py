"""What the `config.json` files of the Llama-like families have in common, in both spellings."""

from collections.abc import Callable
from typing import Any

from jaxserve.models.config import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_MLP,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    Fields,
    ModelConfig,
)
from jaxserve.models.layers import ACTIVATIONS
from jaxserve.pallas_kernels import LinearScaling, Llama3Scaling, RopeSpec

Windows = Callable[[Fields, int], tuple[int | None, ...]]


def base_config(
    fields: Fields,
    *,
    family: str,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    tied: bool = False,
    windows: Windows = lambda fields, layers: (None,) * layers,
    **flags: Any,
) -> ModelConfig:
    """The fields that all these families share; `kv_heads`, `head_dim` and `tied` are what an absent field means.

    None means for kv_heads as many as query heads, for head_dim D / N. `flags` go to ModelConfig as they are.
    """
    layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    width = fields.integer("hidden_size", high=MAX_WIDTH)
    heads = fields.integer("num_attention_heads", high=MAX_HEADS)
    groups = fields.integer("num_key_value_heads", kv_heads or heads, high=MAX_HEADS)
    if heads % groups:
        fields.fail("num_key_value_heads", f"is {groups}, which does not divide num_attention_heads {heads}")
    size = fields.integer("head_dim", head_dim, high=MAX_HEAD_DIM)
    if size is None:
        if width % heads:
            fields.fail("head_dim", f"is missing, and hidden_size {width} is no multiple of the {heads} heads")
        size = width // heads
    activation = fields.text("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        fields.fail("hidden_act", f"is '{activation}'; supported: {', '.join(sorted(ACTIVATIONS))}")
    return ModelConfig(
        family=family,
        vocab=fields.integer("vocab_size", high=MAX_VOCAB),
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=groups,
        head_dim=size,
        mlp=fields.integer("intermediate_size", high=MAX_MLP),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope_spec(fields, size),
        tied=fields.flag("tie_word_embeddings", tied),
        max_positions=fields.integer("max_position_embeddings", 2048, high=MAX_POSITIONS),
        windows=windows(fields, layers),
        activation=activation,
        **flags,
    )


def rope_spec(fields: Fields, head_dim: int) -> RopeSpec:
    """The rotation: `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (4)."""
    name = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    scaling = fields.section(name)
    theta, fraction = fields.number("rope_theta", 10000.0), fields.number("partial_rotary_factor", 1.0)
    if scaling is not None:
        theta = scaling.number("rope_theta", theta)
        fraction = scaling.number("partial_rotary_factor", fraction)
    dim = int(head_dim * fraction)
    if dim % 2 or not 0 < dim <= head_dim:
        fields.fail("head_dim", f"is {head_dim}, of which {dim} channels would rotate; they must be even in number")
    return RopeSpec(dim, theta, None if scaling is None else _scaling(scaling, fields))


def _scaling(scaling: Fields, fields: Fields) -> LinearScaling | Llama3Scaling | None:
    kind_field = "rope_type" if scaling.get("rope_type") is not None else "type"  # `type` is the oldest spelling
    kind = scaling.text(kind_field, "default")
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(scaling.number("factor"))
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if high <= low:
            scaling.fail("high_freq_factor", f"is {high}; it must be greater than low_freq_factor {low}")
        original = scaling.integer("original_max_position_embeddings", high=MAX_POSITIONS)
        return Llama3Scaling(scaling.number("factor"), low, high, original)
    return scaling.fail(kind_field, f"is '{kind}'; supported: default, linear, llama3")


def layer_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Windows of models that mix windowed and full layers (Qwen2, Qwen3): `layer_types`, else `max_window_layers`."""
    if not fields.flag("use_sliding_window", False):
        return (None,) * layers
    window = fields.integer("sliding_window", 4096, high=MAX_POSITIONS)
    kinds = fields.get("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers", 28, low=0, high=MAX_LAYERS)
        return tuple(window if index >= first else None for index in range(layers))
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in known for kind in kinds):
        fields.fail("layer_types", f"must list {layers} of {', '.join(known)}")
    return tuple(known[kind] for kind in kinds)
