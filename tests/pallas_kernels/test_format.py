import dataclasses
import json

import hypothesis.extra.numpy as arrays
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.pallas_kernels import QuantFormat, QuantizedTensor, pack_int4, quantize_rtn, unpack_int4
from jaxserve.pallas_kernels.quantized_matmul.format import OFFSETS, SCALE_DTYPES
from jaxserve.pallas_kernels.quantized_matmul.grid import Grid
from tests.pallas_kernels.harness import normal

groups, scales = st.integers(1, 70), st.sampled_from(list(SCALE_DTYPES))
formats = st.builds(
    QuantFormat,
    bits=st.sampled_from([3, 4, 8]),
    group=st.none() | groups,
    offset=st.sampled_from(OFFSETS),
    scale_dtype=scales,
    ordered=st.booleans(),
)
two_levels = st.builds(QuantFormat, st.just(4), groups, st.just("zero"), scales, level2=st.just("channel"))
e4m3 = st.builds(QuantFormat, st.just(8), st.none() | groups, st.just("none"), scales, element=st.just("e4m3"))
weights = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 5), st.integers(1, 40).map(lambda half: 2 * half)),
    elements=st.floats(-8, 8, width=16),
)
# How far a scale of each dtype may be from the exact one.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}


@given(arrays.arrays(np.int8, (3, 14), elements=st.integers(-8, 7)))
def test_signed_nibbles_survive_packing(codes):
    packed = pack_int4(codes)
    assert packed.dtype == np.uint8 and packed.shape == (3, 7)
    found = unpack_int4(packed, signed=True)
    assert found.dtype == np.int8
    np.testing.assert_array_equal(found, codes)


@given(arrays.arrays(np.uint8, (2, 6), elements=st.integers(0, 15)))
def test_unsigned_nibbles_survive_packing(codes):
    found = unpack_int4(pack_int4(codes), signed=False)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, codes)


def test_even_inputs_are_in_the_low_nibble():
    np.testing.assert_array_equal(pack_int4(np.array([[1, 2, -1, -8]], np.int8)), [[0x21, 0x8F]])
    with pytest.raises(ValueError, match="must be even, got 3"):
        pack_int4(np.zeros((1, 3), np.uint8))


@given(formats | two_levels | e4m3)
def test_formats_survive_json(format):
    assert QuantFormat.from_json(json.loads(json.dumps(format.to_json()))) == format


def test_formats_of_older_manifests_are_read():
    old = {"bits": 4, "group": 32, "offset": "zero", "scale_dtype": "float16"}
    assert QuantFormat.from_json(old) == QuantFormat(4, 32, "zero", "float16")


def test_formats_read_well():
    assert str(QuantFormat(4, 64, "minimum", "float16")) == "int4 g64 minimum f16"
    assert str(QuantFormat(8, None, "none", "bfloat16")) == "int8 row none bf16"
    assert str(QuantFormat(8, None, "none", "float32", element="e4m3")) == "e4m3 row none f32"
    assert str(QuantFormat(3, 32, "zero", "float16", ordered=True)) == "int3 g32 zero f16 ordered"
    assert str(QuantFormat(4, 64, "zero", "float32", level2="channel")) == "int4 g64 zero u8 in row f32"


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"bits": 5}, "bits must be 3, 4 or 8, got 5"),
        ({"group": 0}, "group must be a positive number"),
        ({"offset": "maximum"}, "offset must be one of none, zero, minimum"),
        ({"scale_dtype": "float8"}, "scale_dtype must be one of"),
        ({"element": "e5m2"}, "element must be one of int, e4m3"),
        ({"element": "e4m3"}, "e4m3 has 8 bits and no offset, got 4 bits"),
        (
            {"element": "e4m3", "bits": 8, "offset": "zero"},
            "e4m3 has 8 bits and no offset, got 8 bits and offset 'zero'",
        ),
        ({"level2": "row"}, "level2 must be 'channel' or None"),
        ({"level2": "channel"}, "a second level needs groups of 4-bit codes with an integer zero point"),
        ({"level2": "channel", "offset": "zero", "group": None}, "a second level needs groups"),
    ],
)
def test_bad_formats_are_refused(wrong, message):
    fields = {"bits": 4, "group": 32, "offset": "none", "scale_dtype": "float16"}
    with pytest.raises(ValueError, match=message):
        QuantFormat(**{**fields, **wrong})
    for data in ({**fields, "extra": 1}, {"bits": 4}):
        with pytest.raises(ValueError, match="has the fields"):
            QuantFormat.from_json(data)


@settings(deadline=None)
@given(weights, formats)
def test_rounding_to_nearest_stays_within_half_a_step(weight, format):
    tensor = quantize_rtn(weight, format)
    assert tensor.shape == weight.shape and tuple(tensor.arrays) == format.fields
    assert tensor.nbytes == format.nbytes(*weight.shape)
    codes, largest = tensor.codes(), format.code_range[1]
    low, high = (-largest, largest) if format.offset == "none" else format.code_range
    assert codes.min() >= low and codes.max() <= high

    size = format.group_size(weight.shape[1])
    scale = np.repeat(tensor.arrays["scale"].astype(np.float64), size, axis=1)[:, : weight.shape[1]]
    # Half a step; the largest code moves with the rounding of the scale, a minimum with its own, a zero half a step.
    slack = ROUNDING[format.scale_dtype] * (2.0**format.bits * scale + 2 * np.abs(weight).max() + 2.0**-14)
    steps = 1.0 if format.offset == "zero" else 0.5
    error = np.abs(tensor.dequantize().astype(np.float64) - weight)
    assert (error <= steps * scale + slack + 1e-6 * np.abs(weight).max() + 2.0**-18 * 2**format.bits).all()


@settings(deadline=None)
@given(weights, two_levels)
def test_two_levels_stay_within_int8(weight, format):
    tensor = quantize_rtn(weight, format)
    codes, spread = tensor.codes().astype(int), format.group_size(weight.shape[1])
    scale, zero = (
        np.repeat(tensor.arrays[name], spread, axis=1)[:, : weight.shape[1]].astype(int) for name in ("scale", "zero")
    )
    whole = scale * (codes - zero)
    assert np.abs(whole).max() <= 127 and codes.min() >= 0 and codes.max() <= 15
    assert scale.min() >= 1 and scale.max() <= 16
    np.testing.assert_allclose(tensor.dequantize(), whole * tensor.arrays["channel"].astype(np.float32), rtol=1e-6)
    # Half a step of the coarser level; an end of the range may be half a step and the rounding of the step away.
    step, slack = (
        scale * tensor.arrays["channel"].astype(float),
        2 * ROUNDING[format.scale_dtype] * np.abs(weight).max(),
    )
    assert (np.abs(tensor.dequantize() - weight) <= step + 8 * tensor.arrays["channel"] + slack + 1e-3).all()


@given(
    arrays.arrays(np.float32, (3, 1), elements=st.floats(0, 119)),
    arrays.arrays(np.float32, (3, 1), elements=st.floats(0, 119)),
    arrays.arrays(np.float32, (3, 50), elements=st.floats(-(2**10), 2**10, width=32)),
)
def test_no_weight_leaves_int8_whatever_its_range(below, above, weight):
    """GPTQ rounds numbers that have moved out of the range for which scales were taken."""
    format = QuantFormat(4, 50, "zero", "float32", level2="channel")
    grid = Grid.spanning(-below, above, format, np.ones((3, 1), np.float32))
    assert np.abs(grid.values(grid.nearest(weight))).max() <= 127


@settings(deadline=None)
@given(weights, e4m3)
def test_e4m3_is_relatively_exact(weight, format):
    tensor = quantize_rtn(weight, format)
    assert tensor.codes().dtype == ml_dtypes.float8_e4m3fn
    scale = np.repeat(tensor.arrays["scale"].astype(np.float64), format.group_size(weight.shape[1]), axis=1)
    error = np.abs(tensor.dequantize().astype(np.float64) - weight)
    # 3 bits of mantissa; below 2^-6 steps of 2^-9; the largest number moves with the rounding of the scale.
    slack = 448 * ROUNDING[format.scale_dtype] * (scale + 2.0**-14) + 2.0**-25 * 448
    assert (error <= 2.0**-4 * np.abs(weight) + 2.0**-10 * scale[:, : weight.shape[1]] + slack.max()).all()


def test_scale_and_zero_point_by_hand():
    """Groups of 2, 4 bits: (3 + 1.5) / 15 = 0.3, 1.5 / 0.3 = 5; the second range is widened to 0: 2.25 / 15 = 0.15."""
    weight = np.array([[-1.5, 3.0, 0.78, 2.25]], np.float32)
    tensor = quantize_rtn(weight, QuantFormat(4, 2, "zero", "float32"))
    np.testing.assert_allclose(tensor.arrays["scale"], [[0.3, 0.15]], rtol=1e-6)
    np.testing.assert_array_equal(tensor.arrays["zero"], [[5, 0]])
    np.testing.assert_array_equal(tensor.codes(), [[0, 15, 5, 15]])
    np.testing.assert_array_equal(tensor.arrays["codes"], [[0xF0, 0xF5]])
    np.testing.assert_allclose(tensor.dequantize(), [[-1.5, 3.0, 0.75, 2.25]], rtol=1e-6)

    tensor = quantize_rtn(weight, QuantFormat(4, 2, "minimum", "float32"))
    np.testing.assert_allclose(tensor.arrays["scale"], [[0.3, 0.098]], rtol=1e-6)
    np.testing.assert_array_equal(tensor.arrays["minimum"], [[-1.5, np.float32(0.78)]])
    np.testing.assert_array_equal(tensor.codes(), [[0, 15, 0, 15]])

    tensor = quantize_rtn(weight, QuantFormat(4, 2, "none", "float32"))
    np.testing.assert_array_equal(tensor.codes(), [[-4, 7, 2, 7]])  # -1.5 / (3 / 7) = -3.5, to even
    np.testing.assert_array_equal(tensor.arrays["codes"], [[0x7C, 0x72]])


def test_two_levels_by_hand():
    """Row scale 11.9 / 119 = 0.1; in it the groups are -30, 45 and 10, 119: steps of 75 / 15 = 5 and 119 / 15 ~ 8."""
    tensor = quantize_rtn(
        np.array([[-3.0, 4.5, 1.0, 11.9]], np.float32), QuantFormat(4, 2, "zero", "float32", level2="channel")
    )
    np.testing.assert_allclose(tensor.arrays["channel"], [[0.1]], rtol=1e-6)
    np.testing.assert_array_equal(tensor.arrays["scale"], [[5, 8]])
    np.testing.assert_array_equal(tensor.arrays["zero"], [[6, 0]])
    np.testing.assert_array_equal(tensor.codes(), [[0, 15, 1, 15]])
    np.testing.assert_allclose(tensor.dequantize(), [[-3.0, 4.5, 0.8, 12.0]], rtol=1e-6)


def test_a_scaled_weight_is_rounded_less():
    """AWQ's reason: beside 7, 1.4 is rounded to 1; scaled by 2 it is 2.8, rounded to 3, and stands for 1.5."""
    format = QuantFormat(4, None, "none", "float32")
    np.testing.assert_array_equal(quantize_rtn(np.array([[1.4, 7.0]], np.float32), format).dequantize(), [[1, 7]])
    scaled = quantize_rtn(np.array([[2 * 1.4, 7.0]], np.float32), format).dequantize() / [2, 1]
    np.testing.assert_array_equal(scaled, [[1.5, 7]])


def test_three_bits_are_stored_as_four():
    format = QuantFormat(3, 4, "zero", "float32")
    tensor = quantize_rtn(np.array([[-3.0, 4.0, 0.0, 1.0]], np.float32), format)
    np.testing.assert_array_equal(tensor.codes(), [[0, 7, 3, 4]])
    assert tensor.arrays["codes"].shape == (1, 2) and format.code_range == (0, 7)


def test_ordered_codes():
    """The input at place k of the codes is order[k]."""
    format = QuantFormat(4, 2, "none", "float32", ordered=True)
    plain = quantize_rtn(np.array([[1.0, 7.0, -2.0, 14.0]], np.float32), format)
    np.testing.assert_array_equal(plain.arrays["order"], [0, 1, 2, 3])
    tensor = dataclasses.replace(plain, arrays={**plain.arrays, "order": np.array([2, 0, 3, 1], np.int32)})
    np.testing.assert_array_equal(tensor.dequantize(), [[7.0, 14.0, 1.0, -2.0]])
    double = QuantizedTensor.concatenate([tensor, tensor])
    np.testing.assert_array_equal(double.take_rows([1]).dequantize(), tensor.dequantize())
    assert double.arrays["order"].shape == (4,) and double.nbytes == format.nbytes(2, 4)
    with pytest.raises(ValueError, match="whose inputs are ordered differently"):
        QuantizedTensor.concatenate([plain, tensor])


@pytest.mark.parametrize("bits", [4, 8])
def test_what_a_format_can_hold_comes_back_exactly(bits):
    rng = np.random.default_rng(0)
    signed = QuantFormat(bits, 8, "none", "float16")
    largest = signed.code_range[1]
    codes = rng.integers(-largest, largest + 1, (4, 32)).reshape(4, 4, 8)
    codes[..., 0] = largest
    weight = (codes * np.exp2(rng.integers(-6, 3, (4, 4, 1)))).reshape(4, 32).astype(np.float32)
    np.testing.assert_array_equal(quantize_rtn(weight, signed).dequantize(), weight)

    top = 2**bits - 1
    codes = rng.integers(0, top + 1, (4, 4, 8))
    codes[..., 0], codes[..., 1] = 0, top
    weight = (codes * 0.25 - rng.integers(0, top, (4, 4, 1)) * 0.25).reshape(4, 32).astype(np.float32)
    for offset in ("zero", "minimum"):
        np.testing.assert_array_equal(
            quantize_rtn(weight, QuantFormat(bits, 8, offset, "float16")).dequantize(), weight
        )


@pytest.mark.parametrize("offset", OFFSETS)
def test_constant_and_zero_groups(offset):
    weight = np.array([[0.0] * 4 + [2.0] * 4 + [-3.0] * 4], np.float32)
    found = quantize_rtn(weight, QuantFormat(4, 4, offset, "float32")).dequantize()
    np.testing.assert_allclose(found, weight, rtol=1e-6)


def test_what_cannot_be_quantized_is_refused():
    format = QuantFormat(4, 32, "none", "float16")
    with pytest.raises(ValueError, match=r"only a weight \[O, I\]"):
        quantize_rtn(np.zeros(4, np.float32), format)
    with pytest.raises(ValueError, match="must be even, got 5"):
        quantize_rtn(np.zeros((2, 5), np.float32), format)
    with pytest.raises(ValueError, match="infinities or NaN"):
        quantize_rtn(np.array([[1.0, np.nan]], np.float32), format)
    with pytest.raises(ValueError, match="overflows float16"):
        quantize_rtn(np.array([[1e9, 1.0]], np.float32), format)


def test_rows_are_taken_and_stacked():
    format = QuantFormat(4, 32, "zero", "bfloat16")
    first, second = (quantize_rtn(normal(seed, 6, 48), format) for seed in (0, 1))
    stacked = QuantizedTensor.concatenate([first, second])
    assert stacked.shape == (12, 48)
    expected = np.concatenate([first.dequantize(), second.dequantize()])
    np.testing.assert_array_equal(stacked.dequantize(), expected)
    np.testing.assert_array_equal(stacked.take_rows([11, 0, 7]).dequantize(), expected[[11, 0, 7]])
    np.testing.assert_array_equal(stacked.take_rows(slice(6, None)).dequantize(), expected[6:])
    with pytest.raises(ValueError, match="cannot stack int4 g16 zero bf16 with 48 inputs on int4 g32 zero bf16"):
        QuantizedTensor.concatenate([first, quantize_rtn(normal(1, 6, 48), QuantFormat(4, 16, "zero", "bfloat16"))])


def test_arrays_that_do_not_fit_are_refused():
    tensor = quantize_rtn(normal(0, 6, 48), QuantFormat(8, 16, "minimum", "float16"))
    with pytest.raises(
        ValueError, match=r"scale of a \[6, 48\] weight in int8 g16 minimum f16 must be float16 \[6, 3\]"
    ):
        QuantizedTensor(tensor.format, tensor.shape, {**tensor.arrays, "scale": tensor.arrays["scale"][:, :2]})
    with pytest.raises(ValueError, match="has the fields"):
        QuantizedTensor(tensor.format, tensor.shape, {"codes": tensor.arrays["codes"]})
