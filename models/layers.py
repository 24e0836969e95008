"""Building blocks that every family shares: linear layers, embeddings, norms and activations.

Linear layers are plain `dot_general` on weights stored [O, I], so that a compiler pass can substitute them; norms go
through the anchor op, so that patterns see one eqn. Parameters are cast to the activations' dtype where they are used:
nothing happens when they already have it.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.pallas_kernels import rms_norm

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def rows(table: Float[Array, "V D"], index: Int[Array, "T"]) -> Float[Array, "T D"]:
    """Rows of a table: one gather. An index out of range reads the nearest row, so padding never makes a NaN."""
    return table.at[index].get(mode="clip", wrap_negative_indices=False)


def project(x: Float[Array, "T I"], kernel: Float[Array, "O I"], dtype: jnp.dtype) -> Float[Array, "T O"]:
    """x @ kernel.T as `dot_general` over the last axis of both, accumulated and returned in float32."""
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, kernel.astype(dtype), contract, preferred_element_type=jnp.float32)


class Linear(nn.Module):
    """y = x W^T + b: `kernel` [O, I] and, where asked, `bias` [O]; accumulated in float32, returned in `dtype`."""

    features: int
    dtype: jnp.dtype
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "T I"]) -> Float[Array, "T O"]:
        init = nn.initializers.lecun_normal(in_axis=1, out_axis=0)
        kernel = self.param("kernel", init, (self.features, x.shape[-1]), self.dtype)
        y = project(x, kernel, self.dtype).astype(self.dtype)
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros, (self.features,), self.dtype).astype(self.dtype)
        return y


class Head(nn.Module):
    """Logits = x W^T with `kernel` [V, D]; float32 as accumulated, whatever the activations are."""

    vocab: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "R D"]) -> Float[Array, "R V"]:
        init = nn.initializers.lecun_normal(in_axis=1, out_axis=0)
        return project(x, self.param("kernel", init, (self.vocab, x.shape[-1]), self.dtype), self.dtype)


class Embed(nn.Module):
    """The table `embedding` [V, D]: rows on the way in and, when the model is tied, logits on the way out."""

    vocab: int
    width: int
    dtype: jnp.dtype

    def setup(self) -> None:
        self.embedding = self.param("embedding", nn.initializers.normal(1.0), (self.vocab, self.width), self.dtype)

    def __call__(self, tokens: Int[Array, "T"]) -> Float[Array, "T D"]:
        """The rows of `tokens`."""
        return rows(self.embedding, tokens).astype(self.dtype)

    def attend(self, x: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Logits = x embedding^T in float32."""
        return project(x, self.embedding, self.dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last axis."""

    eps: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.dtype)
        return rms_norm(x, scale, eps=self.eps)
