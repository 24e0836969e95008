"""Round-to-nearest quantization, plain numpy."""

import dataclasses

import numpy as np

from jaxserve.pallas_kernels.quantized_matmul.format import QuantFormat, QuantizedTensor
from jaxserve.pallas_kernels.quantized_matmul.grid import Grid, channel_scale


def quantize_rtn(weight: np.ndarray, format: QuantFormat) -> QuantizedTensor:
    """Rounds a weight [O, I] to the nearest codes of the grid that spans each group (`Grid.spanning`).

    Scales and minimums are rounded to the format's dtype before the codes are computed, so codes fit the numbers that
    are stored. An ordered format gets the inputs in their own order.

    Raises ValueError if the weight is not two-dimensional or not finite, or a scale overflows the format's dtype.
    """
    grouped = split_groups(weight, format)
    grid = Grid.spanning(grouped.min(axis=2), grouped.max(axis=2), format, channel_scale(weight, format))
    return round_to(grid, grouped, weight.shape[1])


def split_groups(weight: np.ndarray, format: QuantFormat) -> np.ndarray:
    """A weight [O, I] as float32 groups [O, G, group].

    The last group may be shorter: its last value is repeated, which changes neither its extremes nor what is kept.
    Raises ValueError as `check_weight` does.
    """
    check_weight(weight, format)
    outputs, inputs = weight.shape
    groups = format.specs(outputs, inputs)["scale"][0][1]
    missing = groups * format.group_size(inputs) - inputs
    return np.pad(weight.astype(np.float32), ((0, 0), (0, missing)), mode="edge").reshape(outputs, groups, -1)


def check_weight(weight: np.ndarray, format: QuantFormat) -> None:
    """ValueError if the weight is not two-dimensional, not finite or does not fit the format."""
    if weight.ndim != 2:
        raise ValueError(f"only a weight [O, I] can be quantized, got shape {list(weight.shape)}")
    format.specs(*weight.shape)
    if not np.isfinite(weight).all():
        raise ValueError("cannot quantize a weight that holds infinities or NaN")


def round_to(grid: Grid, grouped: np.ndarray, inputs: int) -> QuantizedTensor:
    """Groups [O, G, group] of a weight with so many inputs, rounded to a grid with fields [O, G]."""
    each = {name: field[..., None] for name, field in grid.fields.items()}
    codes = dataclasses.replace(grid, fields=each).nearest(grouped)
    order = np.arange(inputs) if grid.format.ordered else None
    return grid.tensor(codes.reshape(len(grouped), -1)[:, :inputs], order)
