"""A head as a student (models/look_ahead.py): it learns to say what its teacher says one token later.

Where the teacher's distribution after token r is wanted, the head reads token r and the teacher's state before it. The
loss is the divergence from the teacher's distribution of the M tokens that the head knows, and of no others. Of the
teacher nothing but its states is needed, so it is run over all rows once and not at every step.
"""

import dataclasses
import pathlib
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Bool, Float

from jaxserve.distill_rows import Rows
from jaxserve.models.checkpoint import Checkpoint
from jaxserve.models.config import ModelConfig
from jaxserve.models.family import logits_and_hidden
from jaxserve.models.look_ahead import FROZEN, LOOK_AHEAD, Head, LookAhead
from jaxserve.models.registry import make_module
from jaxserve.reporting import Reporter
from jaxserve.student import Fixed, Params, divergence

EARLY = 0.5  # the weight of a position in a prompt; the head is asked about answers, which count 1
MIX = 0.3  # of the identity, at the beginning: the state is a weak guess at the next one
DROPOUT = 0.1
_PADDING = 128  # positions, to which rows are padded where the model is run


class HeadBatch(NamedTuple):
    """R positions: the states before them and at them [R, D], and the places of their tokens, and weights [R]."""

    before: np.ndarray
    at: np.ndarray
    tokens: np.ndarray
    weights: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class HeadStudent:
    """A head of the model that had `states` [S, T, D] at the rows' positions."""

    module: LookAhead
    tokens: np.ndarray  # [M] int32, rising
    places: np.ndarray  # [V] int32, as Head has them
    states: np.ndarray

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, rows: Rows, states: np.ndarray, vocab: int, mlp: int, seed: int
    ) -> tuple["HeadStudent", Fixed, Params]:
        """A head of `vocab` tokens and F = `mlp`, what is fixed, and what is to learn, as it begins."""
        config = checkpoint.config
        tokens, module = frequent_tokens(rows, config.vocab, vocab), LookAhead(vocab, config.width, mlp)
        whole = checkpoint.read(_table(config)).astype(np.float32)
        table = whole[tokens]
        nothing = jnp.zeros((1, config.width)), jnp.zeros(1, jnp.int32)
        learning = cast(Params, flatten_dict(module.init(jax.random.key(seed), *nothing)["params"], sep="/"))
        del learning[FROZEN]
        learning["mix/kernel"] = MIX * jnp.eye(config.width)
        learning["down/kernel"] = jnp.zeros_like(learning["down/kernel"])
        student = cls(module, tokens, Head({FROZEN: table}, tokens).places(config.vocab), states)
        return student, Fixed({"table": jnp.asarray(whole)}, {FROZEN: jnp.asarray(table)}), learning

    def __str__(self) -> str:
        return f"a head of {self.module.vocab} tokens"

    def pool(self, rows: Rows) -> np.ndarray:
        """Positions, counted through all rows; none is the first of its row, before which there is no state."""
        return np.flatnonzero((rows.wanted | rows.early()) & ~rows.held_out()[:, None])

    def batch(self, rows: Rows, drawn: np.ndarray) -> HeadBatch:
        return self._batch(rows, drawn, np.where(rows.wanted.ravel()[drawn], 1, EARLY))

    def wanted(self, rows: Rows, number: int) -> HeadBatch:
        found = np.flatnonzero(rows.wanted[number]) + number * rows.ids.shape[1]
        filled = np.zeros(rows.most_wanted - len(found), int)
        return self._batch(rows, np.append(found, filled), np.append(np.ones(len(found)), filled))

    def taught(self, fixed: Fixed, batch: HeadBatch) -> jax.Array:
        return jnp.asarray(batch.at, jnp.float32)

    def divergence(
        self, fixed: Fixed, params: Params, batch: HeadBatch, taught: jax.Array, key: jax.Array
    ) -> Float[Array, "R"]:
        keep = jax.random.bernoulli(key, 1 - DROPOUT, (len(batch.tokens), 2 * self.module.width)) / (1 - DROPOUT)
        return divergence(taught @ fixed.student[FROZEN].T, self.logits(fixed, params, batch, keep))

    def agrees(self, fixed: Fixed, params: Params, batch: HeadBatch, taught: jax.Array) -> Bool[Array, "R"]:
        """The teacher chooses among all its tokens, so one that the head does not know is a miss."""
        found = jnp.argmax(self.logits(fixed, params, batch), axis=-1)
        return jnp.argmax(taught @ fixed.teacher["table"].T, axis=-1) == jnp.asarray(self.tokens)[found]

    def logits(
        self, fixed: Fixed, params: Params, batch: HeadBatch, keep: jax.Array | None = None
    ) -> Float[Array, "R M"]:
        variables = {"params": unflatten_dict({**fixed.student, **params}, sep="/")}
        logits = self.module.apply(variables, jnp.asarray(batch.before), jnp.asarray(batch.tokens), keep)
        assert isinstance(logits, jax.Array)
        return logits

    def write(self, folder: pathlib.Path, checkpoint: Checkpoint, fixed: Fixed, params: Params) -> None:
        """The tokenizer, and then look_ahead.npz, whole or not at all."""
        part = folder / f"part.{LOOK_AHEAD}"
        checkpoint.write_tokenizer(folder)
        Head({path: np.asarray(value) for path, value in {**fixed.student, **params}.items()}, self.tokens).save(part)
        part.rename(folder / LOOK_AHEAD)

    def _batch(self, rows: Rows, positions: np.ndarray, weights: np.ndarray) -> HeadBatch:
        states, tokens = self.states.reshape(-1, self.states.shape[-1]), self.places[rows.ids.ravel()[positions]]
        before = states[np.maximum(positions - 1, 0)]
        return HeadBatch(before, states[positions], tokens, weights.astype(np.float32))


def teacher_states(checkpoint: Checkpoint, rows: Rows, dtype: str, file: pathlib.Path, report: Reporter) -> np.ndarray:
    """What the model, computing in `dtype`, makes its logits of: [S, T, D] float16, of each row up to its last position
    that is wanted, and some more.

    It is kept in `file`, whole or not at all, and not read into memory.
    """
    if not file.exists():
        module = make_module(checkpoint.config, jnp.dtype(dtype))
        params = {path: jnp.asarray(checkpoint.read(path), jnp.dtype(dtype)) for path in checkpoint.specs()}
        count, length = rows.ids.shape

        @jax.jit
        def run(params: Params, ids: jax.Array) -> jax.Array:
            index, same = jnp.arange(len(ids), dtype=jnp.int32), jnp.zeros(len(ids), jnp.int32)
            return logits_and_hidden(module, params, ids, index, same, index)[1].astype(jnp.float16)

        part = file.with_suffix(".part")
        kept = np.lib.format.open_memmap(part, "w+", np.float16, (count, length, checkpoint.config.width))
        with report.stage("states", checkpoint.origin, count) as stage:
            for number, ids in enumerate(rows.ids):
                end = _padded(rows.wanted[number], length)
                kept[number, :end] = run(params, ids[:end])
                stage.advance()
            kept.flush()
            stage.done(f"of {count} sequences")
        part.rename(file)
    return np.load(file, mmap_mode="r")


def _padded(wanted: np.ndarray, length: int) -> int:
    """A number of positions that takes in all that are wanted; one of few, for each is compiled."""
    return min(length, -(-(int(np.flatnonzero(wanted).max(initial=0)) + 1) // _PADDING) * _PADDING)


def frequent_tokens(rows: Rows, vocab: int, count: int) -> np.ndarray:
    """[M] int32, rising: the `count` tokens that come most often in the rows to train on, by the weights of training,
    then the lowest ids, which are the commonest of the text that a tokenizer was made from."""
    chosen = ~rows.held_out()
    weights = np.where(rows.wanted, 1, EARLY * rows.early())
    said = np.bincount(rows.ids[chosen, 1:].ravel(), weights[chosen, :-1].ravel(), vocab)
    return np.sort(np.lexsort((np.arange(vocab), -said))[:count]).astype(np.int32)


def _table(config: ModelConfig) -> str:
    """The path of what the model gives logits with."""
    return "embed_tokens/embedding" if config.tied else "lm_head/kernel"
