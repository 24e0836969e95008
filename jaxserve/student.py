"""What a teacher trains, and how: a student is the first layers of a model, or a head (head_student.py).

The loss of a position is KL(p || q) = sum p (log p - log q), of the teacher's distribution p and the student's q
(Hinton et al. 2015; for drafts DistillSpec, Zhou et al. 2024). Of a cut model layers and last norm learn; the table of
tokens and the head are the teacher's own and stay.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from jaxserve.distill_rows import Batch, Rows
from jaxserve.models.checkpoint import Checkpoint
from jaxserve.models.config import ModelConfig
from jaxserve.models.family import apply_params
from jaxserve.models.hf_writer import write_checkpoint
from jaxserve.models.registry import make_module

Params = dict[str, jax.Array]
FROZEN = ("embed_tokens/", "lm_head/")


class State(NamedTuple):
    """What training changes."""

    params: Params
    optimizer: Any


class Fixed(NamedTuple):
    """What does not learn: all of the teacher's parameters, and those of the student's, by path."""

    teacher: Params
    student: Params


class Pupil(Protocol):
    """What can be trained. A batch is what it says it is, with a weight for each of its R distributions."""

    def __str__(self) -> str:
        """What it is, in a few words."""
        ...

    def pool(self, rows: Rows) -> np.ndarray:
        """Numbers of what a step draws from: nothing of the rows held out."""
        ...

    def batch(self, rows: Rows, drawn: np.ndarray) -> Any:
        """What was drawn from the pool."""
        ...

    def wanted(self, rows: Rows, number: int) -> Any:
        """What is wanted of one row."""
        ...

    def taught(self, fixed: Fixed, batch: Any) -> jax.Array:
        """What the other two need of the teacher, which is run once a batch."""
        ...

    def divergence(
        self, fixed: Fixed, params: Params, batch: Any, taught: jax.Array, key: jax.Array
    ) -> Float[Array, "R"]:
        """KL(p || q) of each row; `key` is for what training does at random."""
        ...

    def agrees(self, fixed: Fixed, params: Params, batch: Any, taught: jax.Array) -> Bool[Array, "R"]:
        """Of each row, whether its likeliest token is the teacher's."""
        ...

    def write(self, folder: pathlib.Path, checkpoint: Checkpoint, fixed: Fixed, params: Params) -> None:
        """Puts what came out into a folder, with the tokenizer."""
        ...


@dataclasses.dataclass(frozen=True)
class Student:
    """The configs of a teacher and of the student cut from it, which compute in `dtype`."""

    teacher: ModelConfig
    config: ModelConfig
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.config.layers} of {self.teacher.layers} layers"

    @classmethod
    def cut(cls, checkpoint: Checkpoint, layers: int, dtype: str) -> tuple["Student", Fixed, Params]:
        """The student of a model's first `layers` layers, what is fixed, and in float32 what is to learn."""
        small = checkpoint.first_layers(layers)
        teacher = {path: jnp.asarray(checkpoint.read(path), jnp.dtype(dtype)) for path in checkpoint.specs()}
        fixed = {path: teacher[path] for path in small.specs() if path.startswith(FROZEN)}
        learning = {path: jnp.asarray(small.read(path), jnp.float32) for path in small.specs() if path not in fixed}
        return cls(checkpoint.config, small.config, dtype), Fixed(teacher, fixed), learning

    def pool(self, rows: Rows) -> np.ndarray:
        return np.flatnonzero(~rows.held_out())

    def batch(self, rows: Rows, drawn: np.ndarray) -> Batch:
        return rows.batch(drawn)

    def wanted(self, rows: Rows, number: int) -> Batch:
        return rows.batch([number])

    def taught(self, fixed: Fixed, batch: Batch) -> Float[Array, "R V"]:
        """The teacher's logits."""
        return self._logits(self.teacher, fixed.teacher, batch)

    def divergence(
        self, fixed: Fixed, params: Params, batch: Batch, taught: jax.Array, key: jax.Array
    ) -> Float[Array, "R"]:
        return divergence(taught, self.logits(fixed, params, batch))

    def agrees(self, fixed: Fixed, params: Params, batch: Batch, taught: jax.Array) -> Bool[Array, "R"]:
        return jnp.argmax(taught, axis=-1) == jnp.argmax(self.logits(fixed, params, batch), axis=-1)

    def write(self, folder: pathlib.Path, checkpoint: Checkpoint, fixed: Fixed, params: Params) -> None:
        """A checkpoint as `jaxserve compile` takes it."""
        everything = {path: np.asarray(value, np.float32) for path, value in {**fixed.student, **params}.items()}
        checkpoint.write_tokenizer(folder)
        write_checkpoint(folder, self.config, everything.items(), checkpoint.generation)

    def logits(self, fixed: Fixed, params: Params, batch: Batch) -> Float[Array, "R V"]:
        narrow = {path: value.astype(self.dtype) for path, value in params.items()}
        return self._logits(self.config, {**fixed.student, **narrow}, batch)

    def _logits(self, config: ModelConfig, params: Mapping[str, jax.Array], batch: Batch) -> Float[Array, "R V"]:
        module = make_module(config, jnp.dtype(self.dtype))
        return apply_params(module, params, *map(jnp.asarray, batch[:4]))


def divergence(teacher: Float[Array, "R V"], student: Float[Array, "R V"]) -> Float[Array, "R"]:
    """KL(p || q) of each row."""
    p, q = jax.nn.log_softmax(teacher), jax.nn.log_softmax(student)
    return jnp.sum(jnp.exp(p) * (p - q), axis=-1)


def make_step(pupil: Pupil, optimizer: optax.GradientTransformation) -> Callable[..., tuple[State, jax.Array]]:
    """step(fixed, state, batch, key) -> (state, the batch's mean KL before it), compiled; the state is donated."""

    @functools.partial(jax.jit, donate_argnums=1)
    def step(fixed: Fixed, state: State, batch: Any, key: jax.Array) -> tuple[State, jax.Array]:
        taught = pupil.taught(fixed, batch)

        def loss(params: Params) -> jax.Array:
            each = pupil.divergence(fixed, params, batch, taught, key)
            return jnp.sum(each * batch.weights) / jnp.maximum(jnp.sum(batch.weights), 1)

        value, gradient = jax.value_and_grad(loss)(state.params)
        updates, inner = optimizer.update(gradient, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), inner), value  # type: ignore[arg-type]

    return step


def make_agreement(pupil: Pupil) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """agreement(fixed, params, batch) -> (rows whose likeliest token is the teacher's, rows), compiled."""

    @jax.jit
    def agreement(fixed: Fixed, params: Params, batch: Any) -> tuple[jax.Array, jax.Array]:
        same = pupil.agrees(fixed, params, batch, pupil.taught(fixed, batch))
        return jnp.sum(same * batch.weights), jnp.sum(batch.weights)

    return agreement
