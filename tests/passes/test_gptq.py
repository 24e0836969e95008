"""GPTQ against the published algorithm, by hand and in float64."""

import dataclasses

import numpy as np
import pytest

from jaxserve.pallas_kernels import QuantFormat, quantize_rtn
from jaxserve.pallas_kernels.quantized_matmul.grid import Grid, channel_scale
from jaxserve.passes.gptq import feedback_of, quantize_gptq
from tests.passes.weight_problems import error, problem

ROW = QuantFormat(4, None, "none", "float32")
FORMATS = [
    QuantFormat(4, 32, "minimum", "float16"),
    QuantFormat(3, 32, "zero", "float16"),
    QuantFormat(4, 40, "none", "bfloat16"),  # 96 = 2 * 40 + 16
    QuantFormat(4, 32, "zero", "float32", level2="channel"),
    QuantFormat(8, None, "none", "float32"),
    QuantFormat(8, None, "none", "float32", element="e4m3"),
]
formats = pytest.mark.parametrize("format", FORMATS, ids=str)
orders = pytest.mark.parametrize("act_order", ["off", "static", "permuted"])


def fitting(format: QuantFormat, act_order: str) -> QuantFormat:
    """The format in which an order leaves its result."""
    return dataclasses.replace(format, ordered=act_order == "permuted" and format.group is not None)


def published(weight, gram, format, act_order, damp) -> np.ndarray:
    """Algorithm 1 of the paper, and the order as in its code: every later column is updated at once, in float64."""
    inputs, size = weight.shape[1], format.group_size(weight.shape[1])
    order = np.arange(inputs) if act_order == "off" else np.argsort(-np.diag(gram), kind="stable")
    left, channel = weight.astype(np.float64)[:, order], channel_scale(weight, format)
    hessian = gram.astype(np.float64)[np.ix_(order, order)]
    hessian += damp * np.mean(np.diag(hessian)) * np.eye(inputs)
    factor = np.linalg.cholesky(np.linalg.inv(hessian)).T
    result, grids = np.zeros(weight.shape), {}
    for place, name in enumerate(order):
        group = (name if act_order == "static" else place) // size
        if group not in grids:
            start = group * size
            of = weight if act_order == "static" or size == inputs else left.astype(np.float32)
            span = of[:, start : start + size]
            ends = span.min(axis=1, keepdims=True), span.max(axis=1, keepdims=True)
            grids[group] = Grid.spanning(*ends, format, channel)
        grid, column = grids[group], left[:, place : place + 1].astype(np.float32)
        found = grid.values(grid.nearest(column))[:, 0]
        result[:, name] = found
        left[:, place:] -= np.outer((left[:, place] - found) / factor[place, place], factor[place, place:])
    return result


def test_two_inputs_by_hand():
    # Scales are 1. An error e at the first input moves the target of the second by -e * 2 / 1:
    # 3.6 -> 4 leaves 7 - 2 * 0.4 = 6.2 -> 6, and -2.7 -> -3 leaves -7 + 2 * 0.3 = -6.4 -> -6.
    weight = np.array([[3.6, 7.0], [-2.7, -7.0]], np.float32)
    gram = np.array([[5.0, 2.0], [2.0, 1.0]], np.float32)
    found = quantize_gptq(weight, ROW, {"gram": gram}, ranges="minmax", damp=0.0)
    np.testing.assert_array_equal(found.codes(), [[4, 6], [-3, -6]])
    np.testing.assert_array_equal(quantize_rtn(weight, ROW).codes(), [[4, 7], [-3, -7]])
    # 5 * 0.16 - 4 * 0.4 + 1 = 0.2 where rounding has 0.8; 5 * 0.09 - 4 * 0.3 + 1 = 0.25 where it has 0.45.
    assert error(found.dequantize(), weight, gram) == pytest.approx(0.45, rel=1e-5)
    # The other way round, the input of more weight still goes first if asked to.
    swapped = quantize_gptq(weight[:, ::-1], ROW, {"gram": gram[::-1, ::-1]}, "static", "minmax", damp=0.0)
    np.testing.assert_array_equal(swapped.codes(), [[6, 4], [-6, -3]])


def test_feedback_by_hand():
    # H = U U^T with U = [[1, 2], [0, 1]].
    feedback, costs = feedback_of(np.array([[5.0, 2.0], [2.0, 1.0]]), 0.0)
    np.testing.assert_allclose(feedback, [[1, 2], [0, 1]], rtol=1e-6)
    np.testing.assert_allclose(costs, [1, 1], rtol=1e-6)


@formats
@orders
def test_the_published_algorithm(format, act_order):
    weight, gram = problem(1)
    format = fitting(format, act_order)
    found = quantize_gptq(weight, format, {"gram": gram}, act_order, "minmax", damp=0.01)
    want = published(weight, gram, format, act_order, 0.01)
    same = np.isclose(found.dequantize(), want, rtol=1e-5, atol=1e-5)
    assert same[:, :32].all() or act_order != "off"
    assert same.mean() > 0.97  # a tie that float32 decides otherwise changes a row from there on
    assert error(found.dequantize(), weight, gram) == pytest.approx(error(want, weight, gram), rel=0.01)
    assert ("order" in found.arrays) == format.ordered


@formats
@orders
def test_beats_rounding_and_searching_ranges_helps(format, act_order):
    plain, searched, fits = 0.0, 0.0, fitting(format, act_order)
    for seed in range(3):
        weight, gram = problem(seed)
        rounded = error(quantize_rtn(weight, format).dequantize(), weight, gram)
        here = [
            error(quantize_gptq(weight, fits, {"gram": gram}, act_order, ranges).dequantize(), weight, gram)
            for ranges in ("minmax", "search")
        ]
        assert max(here) < 0.75 * rounded
        plain, searched = plain + here[0] / rounded, searched + here[1] / rounded
    assert searched < plain or format.bits == 8  # there is little to gain with many codes


def test_order_of_groups_is_that_of_processing():
    weight, gram = problem(2)
    form = QuantFormat(4, 32, "minimum", "float16", ordered=True)
    found = quantize_gptq(weight, form, {"gram": gram}, "permuted")
    np.testing.assert_array_equal(found.arrays["order"], np.argsort(-np.diag(gram), kind="stable"))
    assert (np.diff(np.diag(gram)[found.arrays["order"]]) <= 0).all()


@orders
def test_inputs_that_are_never_active_are_rounded(act_order):
    weight, gram = problem(3)
    gram[32:64], gram[:, 32:64] = 0, 0
    form = fitting(QuantFormat(4, 32, "minimum", "float16"), act_order)
    found = quantize_gptq(weight, form, {"gram": gram}, act_order, "minmax").dequantize()
    np.testing.assert_array_equal(found[:, 32:64], quantize_rtn(weight[:, 32:64], form).dequantize())
    nothing = quantize_gptq(weight, form, {"gram": np.zeros_like(gram)}, act_order, "minmax").dequantize()
    np.testing.assert_array_equal(nothing, quantize_rtn(weight, form).dequantize())


def test_fewer_tokens_than_inputs():
    weight, gram = problem(4, tokens=20)
    found = quantize_gptq(weight, FORMATS[0], {"gram": gram}).dequantize()
    assert np.isfinite(found).all()
    assert error(found, weight, gram) < 0.5 * error(quantize_rtn(weight, FORMATS[0]).dequantize(), weight, gram)


def test_what_does_not_fit_is_refused():
    weight, gram = problem(0)
    with pytest.raises(ValueError, match=r"gram of a weight with 95 inputs must be \[95, 95\], got \(96, 96\)"):
        quantize_gptq(weight[:, :95], QuantFormat(8, 32, "none", "float16"), {"gram": gram})
    with pytest.raises(ValueError, match="is not finite on the calibration text"):
        quantize_gptq(weight, FORMATS[0], {"gram": gram * np.inf})
    with pytest.raises(ValueError, match="damp=1e-09 is too little"):
        quantize_gptq(weight, FORMATS[0], {"gram": gram - np.median(np.diag(gram)) * np.eye(96)}, damp=1e-9)
    weight[0, 0] = np.nan
    with pytest.raises(ValueError, match="infinities or NaN"):
        quantize_gptq(weight, FORMATS[0], {"gram": gram})
