"""Statistics of activations: what a calibrated pass asks for, and how each is computed.

A pass runs on shapes alone, so it cannot look at numbers. It names a `Statistic` in its result and reads it in its
weight edits, under a path like any parameter's; `jaxserve.calibration` fills it in, layer by layer, before it applies
the edits.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve._compat import Var

StatisticKind = Literal["absmax", "absmean", "square", "range", "gram"]
PREFIX = "stats/"
NOT_FINITE = "what it multiplies is not finite on the calibration text: do weights before it hold infinities or NaN?"


@dataclasses.dataclass(frozen=True)
class Statistic:
    """`kind` of the activation `var` [T, ...] (a variable of the graph before the pass), under the name `path`.

    With x the activation over all T tokens of the calibration text:

    - absmax [...]: max_t |x_t|;
    - absmean [...]: mean_t |x_t|;
    - square [...]: mean_t x_t^2, the gram's diagonal for those who need no more of it;
    - range [2]: the smallest and the largest element of x;
    - gram [I, I], for x [T, I]: mean_t x_t x_t^T, so that the mean squared error of a change E of a weight [O, I] is
      trace(E gram E^T).

    All are float32.
    """

    path: str
    var: Var
    kind: StatisticKind


def statistic_path(kind: StatisticKind, path: str) -> str:
    """The name of a statistic at the input of the matmul with the weight at `path`."""
    return f"{PREFIX}{kind}/{path}"


def is_statistic(path: str) -> bool:
    """Whether an edit that reads `path` reads a statistic, and not a parameter."""
    return path.startswith(PREFIX)


def start(kind: StatisticKind, shape: tuple[int, ...]) -> jax.Array:
    """The total of no tokens, for an activation of `shape` [T, ...]."""
    if kind == "range":
        return jnp.array([jnp.inf, -jnp.inf], jnp.float32)
    return jnp.zeros((*shape[1:], *shape[1:]) if kind == "gram" else shape[1:], jnp.float32)


def add(kind: StatisticKind, total: jax.Array, x: jax.Array) -> jax.Array:
    """The total with the tokens of x [T, ...] in it; traceable, in float32."""
    x = x.astype(jnp.float32)
    match kind:
        case "absmax":
            return jnp.maximum(total, jnp.abs(x).max(0))
        case "absmean":
            return total + jnp.abs(x).sum(0)
        case "square":
            return total + jnp.square(x).sum(0)
        case "range":
            return jnp.stack([jnp.minimum(total[0], x.min()), jnp.maximum(total[1], x.max())])
        case "gram":
            return total + jnp.matmul(x.T, x, precision=jax.lax.Precision.HIGHEST)


def finish(kind: StatisticKind, total: jax.Array, tokens: int) -> np.ndarray:
    """The statistic of `tokens` tokens, from their total."""
    value = np.asarray(total)
    return value if kind in ("absmax", "range") else value / np.float32(tokens)


def compute(kind: StatisticKind, x: jax.Array | np.ndarray) -> np.ndarray:
    """The statistic of one activation [T, ...]."""
    return finish(kind, add(kind, start(kind, x.shape), jnp.asarray(x)), len(x))
