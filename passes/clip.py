"""AWQ's search for the range of each group, on what it does to outputs (Lin et al., arXiv:2306.00978)."""

import dataclasses
from collections.abc import Mapping
from functools import partial

import numpy as np

from jaxserve.pallas_kernels import QuantFormat, QuantizedTensor
from jaxserve.pallas_kernels.quantized_matmul.grid import Grid, channel_scale
from jaxserve.pallas_kernels.quantized_matmul.rtn import round_to, split_groups
from jaxserve.passes.ranges import best_grid, check_gram
from jaxserve.passes.statistics import StatisticKind

ROWS = 512  # outputs that are searched at a time


def quantize_clip(
    weight: np.ndarray, format: QuantFormat, statistics: Mapping[StatisticKind, np.ndarray]
) -> QuantizedTensor:
    """Rounds a weight [O, I] to the nearest codes, each group's range shrunk so that its output error is least.

    With E the error of a group of one output and H the block of the statistic `gram` [I, I] that belongs to the group's
    inputs, that error is E H E^T; `passes.ranges` says what is tried. No group is worse than rounded as it is.

    Raises ValueError for a weight that cannot be quantized (`quantize_rtn`), or an H of another width or that
    is not finite.
    """
    grouped = split_groups(weight, format)
    channel = channel_scale(weight, format)
    blocks = _blocks(check_gram(statistics["gram"], weight.shape[1]), grouped.shape[2])
    grids = []
    for start in range(0, len(grouped), ROWS):
        rows = slice(start, start + ROWS)
        part = np.ascontiguousarray(grouped[rows].transpose(1, 0, 2))
        outer = None if channel is None else channel[rows, 0]
        grids.append(best_grid(part.min(axis=2), part.max(axis=2), format, outer, partial(_error, part, blocks)).fields)
    fields = {name: np.concatenate([grid[name].T for grid in grids]) for name in grids[0] if name != "channel"}
    if channel is not None:
        fields["channel"] = channel
    return round_to(Grid(format, fields), grouped, weight.shape[1])


def _blocks(gram: np.ndarray, size: int) -> np.ndarray:
    """The diagonal blocks [G, size, size] of a gram, 0 where a short last group has no inputs."""
    missing = -len(gram) % size
    gram = np.pad(gram, ((0, missing), (0, missing)))
    return np.stack([gram[at : at + size, at : at + size] for at in range(0, len(gram), size)])


def _error(weight: np.ndarray, blocks: np.ndarray, grid: Grid) -> np.ndarray:
    """E H E^T [G, O] of rounding groups [G, O, size] to a grid with fields [G, O]."""
    each = dataclasses.replace(grid, fields={name: field[..., None] for name, field in grid.fields.items()})
    change = each.values(each.nearest(weight)) - weight
    return np.einsum("gos,gos->go", change @ blocks, change)
