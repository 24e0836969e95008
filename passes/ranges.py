"""Which range the codes of a group should span: clipping what is rare makes the rest finer (AWQ, arXiv:2306.00978)."""

from collections.abc import Callable

import numpy as np

from jaxserve.pallas_kernels import QuantFormat
from jaxserve.pallas_kernels.quantized_matmul.grid import Grid
from jaxserve.passes.statistics import NOT_FINITE

SHRINKS = tuple(1 - step / 20 for step in range(11))  # AWQ's: down to half of the range


def best_grid(
    low: np.ndarray,
    high: np.ndarray,
    format: QuantFormat,
    channel: np.ndarray | None,
    error: Callable[[Grid], np.ndarray],
) -> Grid:
    """The grid that spans [low, high] of each group, or less of it if `error(grid)` is smaller then.

    Both ends are shrunk together, in 20ths down to half; then, unless the format is symmetric, either end alone. Only
    what helps a group is taken. Arguments and errors have the shape of `low`; `channel` is as in `Grid.spanning`.
    """
    best = np.full(low.shape, np.inf, np.float32)
    together, below, above = (1, 1), (1, 0), (0, 1)
    for moves in (together,) if format.signed else (together, below, above):
        ends = low, high
        for shrink in SHRINKS:
            tried = [end * np.float32(shrink if move else 1) for end, move in zip(ends, moves, strict=True)]
            found = error(Grid.spanning(*tried, format, channel))
            better = found < best
            best = np.where(better, found, best)
            low, high = np.where(better, tried[0], low), np.where(better, tried[1], high)
    return Grid.spanning(low, high, format, channel)


def check_gram(gram: np.ndarray, inputs: int) -> np.ndarray:
    """The statistic `gram` in float32; ValueError if it is not [inputs, inputs] or not finite."""
    if gram.shape != (inputs, inputs):
        raise ValueError(f"the gram of a weight with {inputs} inputs must be [{inputs}, {inputs}], got {gram.shape}")
    if not np.isfinite(gram).all():
        raise ValueError(NOT_FINITE)
    return np.asarray(gram, np.float32)
