"""A student and its teacher: the first layers of a model, trained to give the whole model's distributions.

The loss of a position is KL(p || q) = sum p (log p - log q), of the teacher's distribution p and the student's q
(Hinton et al. 2015; for drafts DistillSpec, Zhou et al. 2024). Layers and last norm learn; the table of tokens and the
head are the teacher's own and stay.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxserve.models.checkpoint import Checkpoint
from jaxserve.models.config import ModelConfig
from jaxserve.models.family import apply_params
from jaxserve.models.registry import make_module

Params = dict[str, jax.Array]
FROZEN = ("embed_tokens/", "lm_head/")


class Batch(NamedTuple):
    """Sequences packed one after the other: `tokens`, `positions` and `segments` [T]; the R positions whose
    distributions are compared, `rows`, each with a weight of 1 or 0."""

    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    rows: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, ids: np.ndarray, wanted: np.ndarray, count: int) -> "Batch":
        """`ids` [S, T] with the positions `wanted` [S, T], at most `count` of each sequence."""
        seqs, length = ids.shape
        rows, weights = np.zeros((seqs, count), np.int32), np.zeros((seqs, count), np.float32)
        for number, flags in enumerate(wanted):
            found = np.flatnonzero(flags)[:count]
            rows[number, : len(found)], weights[number, : len(found)] = number * length + found, 1
        positions = np.tile(np.arange(length, dtype=np.int32), seqs)
        segments = np.repeat(np.arange(seqs, dtype=np.int32), length)
        return cls(ids.reshape(-1), positions, segments, rows.reshape(-1), weights.reshape(-1))


class State(NamedTuple):
    """What training changes."""

    params: Params
    optimizer: Any


class Fixed(NamedTuple):
    """What does not learn: all of the teacher's parameters, and those of the student's, by path."""

    teacher: Params
    student: Params


@dataclasses.dataclass(frozen=True)
class Student:
    """The configs of a teacher and of the student cut from it, which compute in `dtype`."""

    teacher: ModelConfig
    config: ModelConfig
    dtype: str = "float32"

    @classmethod
    def cut(cls, checkpoint: Checkpoint, layers: int, dtype: str) -> tuple["Student", Fixed, Params]:
        """The student of a model's first `layers` layers, what is fixed, and in float32 what is to learn."""
        small = checkpoint.first_layers(layers)
        teacher = {path: jnp.asarray(checkpoint.read(path), jnp.dtype(dtype)) for path in checkpoint.specs()}
        fixed = {path: teacher[path] for path in small.specs() if path.startswith(FROZEN)}
        learning = {path: jnp.asarray(small.read(path), jnp.float32) for path in small.specs() if path not in fixed}
        return cls(checkpoint.config, small.config, dtype), Fixed(teacher, fixed), learning

    def teacher_logits(self, fixed: Fixed, batch: Batch) -> Float[Array, "R V"]:
        return self._logits(self.teacher, fixed.teacher, batch)

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


def make_step(student: Student, optimizer: optax.GradientTransformation) -> Callable[..., tuple[State, jax.Array]]:
    """step(fixed, state, batch) -> (state, the batch's mean KL before it), compiled; the state is donated."""

    @functools.partial(jax.jit, donate_argnums=1)
    def step(fixed: Fixed, state: State, batch: Batch) -> tuple[State, jax.Array]:
        target = student.teacher_logits(fixed, batch)

        def loss(params: Params) -> jax.Array:
            each = divergence(target, student.logits(fixed, params, batch))
            return jnp.sum(each * batch.weights) / jnp.maximum(jnp.sum(batch.weights), 1)

        value, gradient = jax.value_and_grad(loss)(state.params)
        updates, inner = optimizer.update(gradient, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), inner), value  # type: ignore[arg-type]

    return step


def make_agreement(student: Student) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """agreement(fixed, params, batch) -> (rows whose likeliest token is the teacher's, rows), compiled."""

    @jax.jit
    def agreement(fixed: Fixed, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        wanted, found = student.teacher_logits(fixed, batch), student.logits(fixed, params, batch)
        same = jnp.argmax(wanted, axis=-1) == jnp.argmax(found, axis=-1)
        return jnp.sum(same * batch.weights), jnp.sum(batch.weights)

    return agreement
