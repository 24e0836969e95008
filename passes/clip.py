"""AWQ's search for the range of each group: clipped weights can be finer (Lin et al., arXiv:2306.00978)."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxserve.pallas_kernels import QuantFormat, QuantizedTensor
from jaxserve.pallas_kernels.quantized_matmul.grid import Grid, channel_scale
from jaxserve.pallas_kernels.quantized_matmul.rtn import round_to, split_groups
from jaxserve.passes.statistics import StatisticKind

SHRINKS = tuple(1 - step / 20 for step in range(11))  # AWQ's: down to half of the range
ROWS = 512  # outputs that are searched at a time


def quantize_clip(
    weight: np.ndarray, format: QuantFormat, statistics: Mapping[StatisticKind, np.ndarray]
) -> QuantizedTensor:
    """Rounds a weight [O, I] to the nearest codes, each group's range shrunk so that its output error is least.

    With E the error of a group of one output and H the block of the statistic `gram` [I, I] that belongs to the group's
    inputs, that error is E H E^T. Both ends of a range are shrunk together, in 20ths down to half; then, unless the
    format is symmetric, either end alone. A shrink that does not help is not taken, so no group is worse than rounded.

    Raises ValueError for a weight that cannot be quantized (`quantize_rtn`), or that has another width than H.
    """
    grouped = split_groups(weight, format)
    channel = channel_scale(weight, format)
    blocks = _blocks(np.asarray(statistics["gram"], np.float32), weight.shape[1], grouped.shape[2])
    parts = []
    for start in range(0, len(grouped), ROWS):
        rows = slice(start, start + ROWS)
        part = np.ascontiguousarray(grouped[rows].transpose(1, 0, 2))
        parts.append(_search(part, blocks, format, None if channel is None else channel[rows, 0]))
    low, high = (np.concatenate(ends, axis=1).T for ends in zip(*parts, strict=True))
    return round_to(Grid.spanning(low, high, format, channel), grouped, weight.shape[1])


def _blocks(gram: np.ndarray, inputs: int, size: int) -> np.ndarray:
    """The diagonal blocks [G, size, size] of a gram, 0 where a short last group has no inputs."""
    if gram.shape != (inputs, inputs):
        raise ValueError(f"the gram of a weight with {inputs} inputs must be [{inputs}, {inputs}], got {gram.shape}")
    missing = -inputs % size
    gram = np.pad(gram, ((0, missing), (0, missing)))
    return np.stack([gram[at : at + size, at : at + size] for at in range(0, len(gram), size)])


def _search(
    weight: np.ndarray, blocks: np.ndarray, format: QuantFormat, channel: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """The ends [G, O] of the best ranges of groups [G, O, size]; `channel` [O] for two levels."""
    low, high = weight.min(axis=2), weight.max(axis=2)
    best = np.full(low.shape, np.inf, np.float32)
    together, below, above = (1, 1), (1, 0), (0, 1)
    for moves in (together,) if format.signed else (together, below, above):
        ends = low, high
        for shrink in SHRINKS:
            tried = [end * np.float32(shrink if move else 1) for end, move in zip(ends, moves, strict=True)]
            error = _error(weight, blocks, Grid.spanning(*tried, format, channel))
            better = error < best
            best = np.where(better, error, best)
            low, high = np.where(better, tried[0], low), np.where(better, tried[1], high)
    return low, high


def _error(weight: np.ndarray, blocks: np.ndarray, grid: Grid) -> np.ndarray:
    """E H E^T [G, O] of rounding groups [G, O, size] to a grid with fields [G, O]."""
    each = dataclasses.replace(grid, fields={name: field[..., None] for name, field in grid.fields.items()})
    change = each.values(each.nearest(weight)) - weight
    return np.einsum("gos,gos->go", change @ blocks, change)
