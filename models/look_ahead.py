"""A head that foresees the token after the next: what `jaxserve distill --head` trains, a draft of one token.

A step of the target gives the state h of its last layer and the next token; the head reads both and names the token
after it, for a fraction of what a step of the target costs (as Hydra's heads do, Ankner et al. 2024, and the
speculators of Wertheimer et al. 2024). It knows the tokens that are frequent in what it was trained on and no others.
"""

import dataclasses
from pathlib import Path
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float, Int32

from jaxserve.errors import UserError
from jaxserve.models.layers import Embed, Linear, RMSNorm
from jaxserve.npz import read_npz

LOOK_AHEAD = "look_ahead.npz"  # the file in the folder of such a head
FROZEN = "embed_tokens/embedding"  # of the parameters, the one that is the target's own and does not learn
_EPS = 1e-5


class LookAhead(nn.Module):
    """Logits [R, M] of the token after `tokens`, among the M that the head knows.

    With a = norm(h) and e the table's row of the token: (mix(a) + down(silu(gate([a, e])) * up([a, e]))) table^T. The
    table holds what the target gives logits with, of the M tokens.
    """

    vocab: int  # M
    width: int  # D
    mlp: int  # F
    dtype: jnp.dtype = jnp.dtype("float32")

    @nn.compact
    def __call__(
        self, hidden: Float[Array, "R D"], tokens: Int32[Array, "R"], keep: Float[Array, "R E"] | None = None
    ) -> Float[Array, "R M"]:
        """`tokens` are places in the table; M stands for any token that is not in it. Training multiplies [a, e] by
        `keep`, E = 2 D, for dropout."""
        table = Embed(self.vocab, self.width, self.dtype, name="embed_tokens")
        state = RMSNorm(_EPS, self.dtype, name="state_norm")(hidden.astype(self.dtype))
        token = jnp.where((tokens < self.vocab)[:, None], table(tokens), 0)
        both = jnp.concatenate([state, RMSNorm(_EPS, self.dtype, name="token_norm")(token)], axis=-1)
        if keep is not None:
            both = both * keep
        gate, up = (Linear(self.mlp, self.dtype, name=name)(both) for name in ("gate", "up"))
        added = Linear(self.width, self.dtype, name="down")(jax.nn.silu(gate) * up)
        return table.attend(Linear(self.width, self.dtype, name="mix")(state) + added)


@dataclasses.dataclass(frozen=True)
class Head:
    """A trained head: its parameters by path, as LookAhead has them, and the tokens that its places stand for."""

    params: dict[str, np.ndarray]
    tokens: np.ndarray  # [M] int32, rising

    @property
    def module(self) -> LookAhead:
        vocab, width = self.params[FROZEN].shape
        return LookAhead(vocab, width, self.params["gate/kernel"].shape[0])

    def places(self, vocab: int) -> np.ndarray:
        """[V] int32: each token's place in the head's table, M for those that it does not know."""
        places = np.full(vocab, self.tokens.size, np.int32)
        places[self.tokens] = np.arange(self.tokens.size)
        return places

    def save(self, file: Path) -> None:
        """`tokens` [M] int32, and every parameter by its path, in float16."""
        params: dict[str, Any] = {path: value.astype(np.float16) for path, value in self.params.items()}
        np.savez(file, tokens=self.tokens, **params)

    @classmethod
    def load(cls, file: Path, width: int, vocab: int) -> "Head":
        """UserError when the file is damaged, or of a model of another width or with more than `vocab` tokens."""
        arrays = read_npz(file, "look-ahead head")
        tokens = arrays.pop("tokens", np.zeros(0))
        rising = tokens.dtype == np.int32 and tokens.ndim == 1 and tokens.size > 0 and (np.diff(tokens) > 0).all()
        if not (rising and tokens[0] >= 0 and tokens[-1] < vocab):
            raise UserError(f"{file}: a damaged look-ahead head, or one of a model with more than {vocab} tokens")
        gate = arrays.get("gate/kernel", np.zeros((0, 0)))
        specs = param_specs(LookAhead(tokens.size, width, gate.shape[0])) if gate.ndim == 2 and gate.size else {}
        found = {path: value.shape for path, value in arrays.items() if value.dtype == np.float16}
        if found != {path: spec.shape for path, spec in specs.items()}:
            raise UserError(f"{file}: a damaged look-ahead head, or one of a model whose width is not {width}")
        if not all(np.isfinite(value).all() for value in arrays.values()):
            raise UserError(f"{file}: a damaged look-ahead head: some of its numbers are not finite")
        return cls({path: value.astype(np.float32) for path, value in arrays.items()}, tokens)


def param_specs(module: LookAhead) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter by path; nothing is allocated."""
    hidden, tokens = jax.ShapeDtypeStruct((1, module.width), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.int32)
    variables = jax.eval_shape(module.init, jax.eval_shape(lambda: jax.random.key(0)), hidden, tokens)
    return cast(dict[str, jax.ShapeDtypeStruct], flatten_dict(variables["params"], sep="/"))
