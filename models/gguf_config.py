"""Configs and tensor names of the GGUF architectures that are Llama-like."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

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
from jaxserve.models.errors import CheckpointError
from jaxserve.models.family import Source, Sources
from jaxserve.models.llama import linears, norms
from jaxserve.models.store import StoredTensor
from jaxserve.pallas_kernels import LinearScaling, Llama3Scaling, RopeSpec

Shapes = Mapping[str, tuple[int, ...]]

_STEMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn/q_norm": "attn_q_norm",
    "self_attn/k_norm": "attn_k_norm",
    "self_attn/q_proj": "attn_q",
    "self_attn/k_proj": "attn_k",
    "self_attn/v_proj": "attn_v",
    "self_attn/o_proj": "attn_output",
    "mlp/gate_proj": "ffn_gate",
    "mlp/up_proj": "ffn_up",
    "mlp/down_proj": "ffn_down",
}


def base_config(fields: Fields, tensors: Shapes, *, family: str, **flags: Any) -> ModelConfig:
    """The fields all these architectures share. Ties and biases are not in the metadata: the tensors tell."""
    layers = fields.integer("block_count", high=MAX_LAYERS)
    width = fields.integer("embedding_length", high=MAX_WIDTH)
    heads = fields.integer("attention.head_count", high=MAX_HEADS)
    groups = fields.integer("attention.head_count_kv", heads, high=MAX_HEADS)
    if heads % groups:
        fields.fail("attention.head_count_kv", f"is {groups}, which does not divide attention.head_count {heads}")
    if fields.integer("expert_count", 0, low=0, high=MAX_MLP):
        fields.fail("expert_count", "is set: mixtures of experts are not supported in GGUF files")
    head_dim = fields.integer("attention.key_length", width // heads, high=MAX_HEAD_DIM)
    if fields.integer("attention.value_length", head_dim, high=MAX_HEAD_DIM) != head_dim:
        fields.fail("attention.value_length", f"must equal attention.key_length {head_dim}")
    window = fields.integer("attention.sliding_window", None, high=MAX_POSITIONS)
    return ModelConfig(
        family=family,
        vocab=_vocab(fields, tensors),
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=groups,
        head_dim=head_dim,
        mlp=fields.integer("feed_forward_length", high=MAX_MLP),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=_rope_spec(fields, head_dim),
        tied="output.weight" not in tensors,
        max_positions=fields.integer("context_length", high=MAX_POSITIONS),
        windows=(window,) * layers,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        **flags,
    )


def _vocab(fields: Fields, tensors: Shapes) -> int:
    """The embedding's rows: some files lack `vocab_size`, and some pad the table past their tokenizer."""
    embedding = tensors.get("token_embd.weight", ())
    vocab = embedding[0] if len(embedding) == 2 else fields.integer("vocab_size", high=MAX_VOCAB)
    if not 1 <= vocab <= MAX_VOCAB:
        raise CheckpointError(
            f"{fields.source}: tensor 'token_embd.weight' has {vocab} rows, outside the allowed 1 to {MAX_VOCAB}"
        )
    return vocab


def _rope_spec(fields: Fields, head_dim: int) -> RopeSpec:
    dim = fields.integer("rope.dimension_count", head_dim, high=MAX_HEAD_DIM)
    if dim % 2 or dim > head_dim:
        fields.fail("rope.dimension_count", f"is {dim}; it must be even and at most the head's {head_dim} channels")
    theta = fields.number("rope.freq_base", 10000.0)
    kind = fields.text("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        fields.fail("rope.scaling.type", f"is '{kind}'; supported: none, linear")
    return RopeSpec(dim, theta, LinearScaling(fields.number("rope.scaling.factor")) if kind == "linear" else None)


def with_rope_factors(config: ModelConfig, tensor: StoredTensor, factors: np.ndarray) -> ModelConfig:
    """The config with the Llama 3 scaling that a file's `rope_freqs.weight` [H/2] came from.

    GGUF keeps the divisor of every frequency and not the formula. Llama 3.1 and later use the factors 1 and 4 of the
    original context, a power of two; that leaves few candidates, and the right one reproduces all divisors.
    """
    spec = config.rope
    if tensor.shape == (spec.dim // 2,) and np.all((factors > 0) & np.isfinite(factors)):
        plain = spec.inv_freq()
        for log_length in range(5, 21):
            candidate = Llama3Scaling(float(factors.max()), 1.0, 4.0, 2**log_length)
            scaled = dataclasses.replace(spec, scaling=candidate)
            if np.allclose(plain / scaled.inv_freq(), factors, rtol=1e-4, atol=0.0):
                return dataclasses.replace(config, rope=scaled)
    raise CheckpointError(
        f"{tensor.file}: tensor 'rope_freqs.weight' is no Llama 3 rotary scaling; no other is supported"
    )


def sources(config: ModelConfig, *, paired: bool = False) -> Sources:
    """Names in GGUF files; `paired` for the architecture whose q and k rows are stored as rotary pairs."""
    found = {"embed_tokens/embedding": Source("token_embd.weight"), "norm/scale": Source("output_norm.weight")}
    if not config.tied:
        found["lm_head/kernel"] = Source("output.weight")
    heads = {"self_attn/q_proj": config.heads, "self_attn/k_proj": config.kv_heads} if paired else {}
    for layer in range(config.layers):
        for path in norms(config):
            found[f"layers_{layer}/{path}/scale"] = Source(f"blk.{layer}.{_STEMS[path]}.weight")
        for path, bias in linears(config).items():
            stem, paired_heads = f"blk.{layer}.{_STEMS[path]}", heads.get(path)
            found[f"layers_{layer}/{path}/kernel"] = Source(f"{stem}.weight", paired_heads)
            if bias:
                found[f"layers_{layer}/{path}/bias"] = Source(f"{stem}.bias", paired_heads)
    return found
