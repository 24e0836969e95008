"""The search for ranges."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.pallas_kernels import QuantFormat, quantize_rtn
from jaxserve.pallas_kernels.quantized_matmul.grid import Grid
from jaxserve.passes.clip import quantize_clip
from jaxserve.passes.ranges import SHRINKS
from tests.passes.weight_problems import error, problem

FORMATS = [
    QuantFormat(4, 32, "minimum", "float16"),
    QuantFormat(3, 40, "zero", "float16"),
    QuantFormat(4, 32, "none", "bfloat16"),
    QuantFormat(4, 32, "zero", "float32", level2="channel"),
    QuantFormat(8, None, "none", "float32", element="e4m3"),
]
formats = pytest.mark.parametrize("format", FORMATS, ids=str)


def group_errors(quantized, weight, gram, size) -> np.ndarray:
    """E H E^T [O, G] with the blocks of H, group by group."""
    found = []
    for start in range(0, weight.shape[1], size):
        group = slice(start, start + size)
        change = (quantized[:, group] - weight[:, group]).astype(np.float64)
        found.append(np.einsum("oi,ij,oj->o", change, gram[group, group], change))
    return np.stack(found, axis=1)


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(FORMATS), st.integers(0, 10**6))
def test_no_group_is_worse_than_rounded(format, seed):
    weight, gram = problem(seed, outputs=5)
    size = format.group_size(weight.shape[1])
    searched = group_errors(quantize_clip(weight, format, {"gram": gram}).dequantize(), weight, gram, size)
    rounded = group_errors(quantize_rtn(weight, format).dequantize(), weight, gram, size)
    assert (searched <= rounded * (1 + 1e-4) + 1e-9).all()


@pytest.mark.parametrize("seed", range(3))
def test_outputs_are_nearer(seed):
    weight, gram = problem(seed, outputs=16)
    form = FORMATS[1]
    searched = error(quantize_clip(weight, form, {"gram": gram}).dequantize(), weight, gram)
    assert searched < 0.95 * error(quantize_rtn(weight, form).dequantize(), weight, gram)


def test_the_best_of_all_that_is_tried():
    """One group, both ends in every way that the search goes: nothing tried at its last turn is better."""
    weight, gram = problem(7, outputs=1, inputs=16)
    form = QuantFormat(3, None, "minimum", "float32")
    tensor = quantize_clip(weight, form, {"gram": gram})
    found = error(tensor.dequantize(), weight, gram)

    def of(low, high):
        grid = Grid.spanning(np.array([[low]], np.float32), np.array([[high]], np.float32), form)
        return error(grid.values(grid.nearest(weight)), weight, gram)

    low, high = float(weight.min()), float(weight.max())
    together = min(of(low * shrink, high * shrink) for shrink in SHRINKS)
    everything = min(of(low * a, high * b) for a, b in itertools.product(np.linspace(0.25, 1, 31), repeat=2))
    assert everything * (1 - 1e-4) <= found <= together * (1 + 1e-4)


def test_a_weight_that_matters_little_does_not_stretch_its_group():
    weight, gram = np.tile(np.linspace(-1, 1, 32, dtype=np.float32), (2, 1)), np.eye(32, dtype=np.float32)
    weight[1, 5], gram[5, 5] = 2.0, 1e-6
    tensor = quantize_clip(weight, QuantFormat(4, None, "none", "float32"), {"gram": gram})
    unclipped, clipped = tensor.arrays["scale"][:, 0] * 7
    assert unclipped > 0.8 and clipped < 1.2


@formats
def test_a_short_last_group(format):
    weight, gram = problem(0, inputs=90)
    tensor = quantize_clip(weight, format, {"gram": gram})
    assert tensor.shape == (12, 90) and np.isfinite(tensor.dequantize()).all()


def test_what_does_not_fit_is_refused():
    weight, gram = problem(0)
    with pytest.raises(ValueError, match=r"gram of a weight with 96 inputs must be \[96, 96\], got \(95, 95\)"):
        quantize_clip(weight, FORMATS[0], {"gram": gram[1:, 1:]})
    with pytest.raises(ValueError, match="is not finite on the calibration text"):
        quantize_clip(weight, FORMATS[0], {"gram": gram * np.inf})
    weight[0, 0] = np.inf
    with pytest.raises(ValueError, match="infinities or NaN"):
        quantize_clip(weight, FORMATS[0], {"gram": gram})
