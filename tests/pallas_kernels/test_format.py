import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.pallas_kernels import QuantFormat, QuantizedTensor, pack_int4, quantize_rtn, unpack_int4
from jaxserve.pallas_kernels.quantized_matmul.format import OFFSETS, SCALE_DTYPES
from tests.pallas_kernels.harness import normal

formats = st.builds(
    QuantFormat,
    bits=st.sampled_from([4, 8]),
    group=st.none() | st.integers(1, 70),
    offset=st.sampled_from(OFFSETS),
    scale_dtype=st.sampled_from(list(SCALE_DTYPES)),
)
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


@given(formats)
def test_formats_survive_json(format):
    assert QuantFormat.from_json(format.to_json()) == format


def test_formats_read_well():
    assert str(QuantFormat(4, 64, "minimum", "float16")) == "int4 g64 minimum f16"
    assert str(QuantFormat(8, None, "none", "bfloat16")) == "int8 row none bf16"


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"bits": 5}, "bits must be 3, 4 or 8, got 5"),
        ({"group": 0}, "group must be a positive number"),
        ({"offset": "maximum"}, "offset must be one of none, zero, minimum"),
        ({"scale_dtype": "float8"}, "scale_dtype must be one of"),
    ],
)
def test_bad_formats_are_refused(wrong, message):
    fields = {"bits": 4, "group": 32, "offset": "none", "scale_dtype": "float16"}
    with pytest.raises(ValueError, match=message):
        QuantFormat(**{**fields, **wrong})
    with pytest.raises(ValueError, match="has the fields"):
        QuantFormat.from_json({**fields, "extra": 1})


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
