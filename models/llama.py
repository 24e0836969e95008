"""The Llama family in flax: grouped-query attention, rotary positions, gated MLP, RMSNorm before each half.

Mistral, Qwen2 and Qwen3 are this module with other flags in their ModelConfig. All tokens of a step are packed along
one axis: `positions` says where each stands in its own sequence, `segments` which sequence it belongs to.
"""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxserve.models.config import Fields, ModelConfig
from jaxserve.models.family import Family, Source, Sources
from jaxserve.models.hf_config import base_config
from jaxserve.models.layers import ACTIVATIONS, Embed, Head, Linear, RMSNorm, rows
from jaxserve.pallas_kernels import attention, rope


class Attention(nn.Module):
    """o_proj(attention(rope(q), rope(k), v)): N query heads share K key/value heads of H channels."""

    config: ModelConfig
    layer: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self, x: Float[Array, "T D"], positions: Int32[Array, "T"], segments: Int32[Array, "T"]
    ) -> Float[Array, "T D"]:
        config = self.config

        def heads(name: str, count: int) -> Float[Array, "T n H"]:
            y = Linear(count * config.head_dim, self.dtype, config.qkv_bias, name=name)(x)
            return y.reshape(-1, count, config.head_dim)

        q = heads("q_proj", config.heads)
        k = heads("k_proj", config.kv_heads)
        v = heads("v_proj", config.kv_heads)
        if config.qk_norm:
            q = RMSNorm(config.norm_eps, self.dtype, name="q_norm")(q)
            k = RMSNorm(config.norm_eps, self.dtype, name="k_norm")(k)
        q = rope(q, positions, spec=config.rope)
        k = rope(k, positions, spec=config.rope)
        scale, window = config.head_dim**-0.5, config.windows[self.layer]
        mixed = attention(q, k, v, positions, segments, scale=scale, window=window)
        flat = mixed.reshape(-1, config.heads * config.head_dim)
        return Linear(config.width, self.dtype, config.o_bias, name="o_proj")(flat)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)) with F hidden channels."""

    config: ModelConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        config = self.config
        gate = Linear(config.mlp, self.dtype, config.mlp_bias, name="gate_proj")(x)
        up = Linear(config.mlp, self.dtype, config.mlp_bias, name="up_proj")(x)
        hidden = ACTIVATIONS[config.activation](gate) * up
        return Linear(config.width, self.dtype, config.mlp_bias, name="down_proj")(hidden)


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    config: ModelConfig
    layer: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self, x: Float[Array, "T D"], positions: Int32[Array, "T"], segments: Int32[Array, "T"]
    ) -> Float[Array, "T D"]:
        config = self.config
        normed = RMSNorm(config.norm_eps, self.dtype, name="input_layernorm")(x)
        x = x + Attention(config, self.layer, self.dtype, name="self_attn")(normed, positions, segments)
        normed = RMSNorm(config.norm_eps, self.dtype, name="post_attention_layernorm")(x)
        return x + MLP(config, self.dtype, name="mlp")(normed)


class Llama(nn.Module):
    """Tokens in, logits of chosen rows out; `dtype` is that of activations and of fresh parameters.

    Layers are unrolled. Only the R rows in `logit_rows` pass the last norm and the head. Logits are float32.
    """

    config: ModelConfig
    dtype: jnp.dtype = jnp.dtype("float32")

    @nn.compact
    def __call__(
        self,
        tokens: Int32[Array, "T"],
        positions: Int32[Array, "T"],
        segments: Int32[Array, "T"],
        logit_rows: Int32[Array, "R"],
    ) -> Float[Array, "R V"]:
        config = self.config
        embed = Embed(config.vocab, config.width, self.dtype, name="embed_tokens")
        x = embed(tokens)
        for layer in range(config.layers):
            x = DecoderLayer(config, layer, self.dtype, name=f"layers_{layer}")(x, positions, segments)
        x = RMSNorm(config.norm_eps, self.dtype, name="norm")(rows(x, logit_rows))
        if config.tied:
            return embed.attend(x)
        return Head(config.vocab, self.dtype, name="lm_head")(x)


def linears(config: ModelConfig) -> dict[str, bool]:
    """The linear layers of a decoder layer by path, and whether each has a bias."""
    qkv = {f"self_attn/{name}_proj": config.qkv_bias for name in "qkv"}
    mlp = {f"mlp/{name}_proj": config.mlp_bias for name in ("gate", "up", "down")}
    return {**qkv, "self_attn/o_proj": config.o_bias, **mlp}


def norms(config: ModelConfig) -> list[str]:
    """The norms of a decoder layer by path."""
    heads = ["self_attn/q_norm", "self_attn/k_norm"] if config.qk_norm else []
    return ["input_layernorm", "post_attention_layernorm", *heads]


def hf_sources(config: ModelConfig) -> Sources:
    """Names in Hugging Face checkpoints: our paths with dots, `weight` for kernel, scale and embedding."""
    sources = {
        "embed_tokens/embedding": Source("model.embed_tokens.weight"),
        "norm/scale": Source("model.norm.weight"),
    }
    if not config.tied:
        sources["lm_head/kernel"] = Source("lm_head.weight")
    for layer in range(config.layers):
        ours, theirs = f"layers_{layer}", f"model.layers.{layer}"
        for path in norms(config):
            sources[f"{ours}/{path}/scale"] = Source(f"{theirs}.{path.replace('/', '.')}.weight")
        for path, bias in linears(config).items():
            sources[f"{ours}/{path}/kernel"] = Source(f"{theirs}.{path.replace('/', '.')}.weight")
            if bias:
                sources[f"{ours}/{path}/bias"] = Source(f"{theirs}.{path.replace('/', '.')}.bias")
    return sources


def config_from_hf(fields: Fields) -> ModelConfig:
    """Llama 1 to 3: `attention_bias` puts a bias on all four projections, `mlp_bias` on the MLP's three."""
    bias = fields.flag("attention_bias", False)
    return base_config(
        fields, family="llama", qkv_bias=bias, o_bias=bias, mlp_bias=fields.flag("mlp_bias", False), tied=False
    )


LLAMA = Family("llama", Llama, config_from_hf, hf_sources)
