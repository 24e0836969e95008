import numpy as np
import pytest

from jaxserve.pallas_kernels import QuantFormat, dense_matmul, quantize_rtn, quantized_matmul, quantized_take
from tests.pallas_kernels import oracles
from tests.pallas_kernels.harness import BF16, F32, assert_close, compute, dtypes, implementations, normal, wide

FORMATS = [
    QuantFormat(bits, group, offset, scale)
    for bits in (4, 8)
    for group, scale in ((None, "float32"), (32, "float16"), (64, "bfloat16"))
    for offset in ("none", "zero", "minimum")
]
formats = pytest.mark.parametrize("format", FORMATS, ids=str)


def weight(format, outputs=24, inputs=80):
    """A quantized weight (80 is no multiple of a group of 32 or 64) and what it stands for, float64."""
    tensor = quantize_rtn(normal(7, outputs, inputs), format)
    group = format.group_size(inputs)
    return tensor, oracles.dequantize(tensor.codes(), tensor.arrays, format.offset, group)


@implementations
class TestDenseMatmul:
    @dtypes
    @pytest.mark.parametrize("rows", [(1,), (2,), (33,), (2, 3), (1, 1), ()], ids=str)
    def test_matches_the_equation(self, implementation, dtype, rows):
        x, w = normal(0, *rows, 96, dtype=dtype), normal(1, 40, 96, dtype=dtype)
        found = compute(implementation, dense_matmul, x, w)
        assert found.shape == (*rows, 40)
        assert_close(found, wide(x) @ wide(w).T, dtype)

    @pytest.mark.parametrize("rows", [1, 5])
    def test_float32_results_of_bf16_operands_are_not_rounded(self, implementation, rows):
        x, w = normal(0, rows, 512, dtype=BF16), normal(1, 8, 512, dtype=BF16)
        found = compute(implementation, dense_matmul, x, w, out_dtype=F32)
        assert_close(found, wide(x) @ wide(w).T, F32)

    @pytest.mark.parametrize("rows", [1, 5])
    def test_accumulates_in_float32(self, implementation, rows):
        # In bf16, 256 + 1 is 256 again: summing there would lose all the ones.
        x = np.ones((rows, 1025), BF16)
        w = np.ones((1, 1025), BF16)
        w[0, 0] = 1024
        np.testing.assert_array_equal(compute(implementation, dense_matmul, x, w), 2048)


@implementations
class TestQuantizedMatmul:
    @formats
    @pytest.mark.parametrize("rows", [(1,), (5,), (2, 3)], ids=str)
    def test_matches_the_equation(self, implementation, format, rows):
        tensor, expected = weight(format)
        x = normal(0, *rows, 80)
        found = compute(implementation, quantized_matmul, x, *tensor.arrays.values(), format=format, shape=tensor.shape)
        assert_close(found, wide(x) @ expected.T, F32)

    @formats
    def test_bf16_activations_leave_the_weight_exact(self, implementation, format):
        tensor, expected = weight(format)
        x = normal(0, 5, 80, dtype=BF16)
        found = compute(implementation, quantized_matmul, x, *tensor.arrays.values(), format=format, shape=tensor.shape)
        assert_close(found, wide(x) @ expected.T, BF16, f32=1e-3)

    def test_float32_result_of_bf16_activations(self, implementation):
        tensor, expected = weight(QuantFormat(8, None, "none", "float16"))
        x, options = normal(0, 2, 80, dtype=BF16), {"format": tensor.format, "shape": tensor.shape, "out_dtype": F32}
        found = compute(implementation, quantized_matmul, x, *tensor.arrays.values(), **options)
        assert_close(found, wide(x) @ expected.T, F32, f32=1e-4)
        assert np.any(found != found.astype(BF16).astype(F32))


@implementations
class TestQuantizedTake:
    @formats
    @dtypes
    def test_takes_rows(self, implementation, format, dtype):
        tensor, expected = weight(format)
        ids = np.array([3, 0, 23, 3], np.int32)
        options = {"format": format, "shape": tensor.shape, "dtype": dtype}
        found = compute(implementation, quantized_take, ids, *tensor.arrays.values(), **options)
        assert_close(found, expected[ids], dtype, f32=1e-6)

    def test_ids_outside_the_table_are_clipped(self, implementation):
        tensor, expected = weight(QuantFormat(8, None, "none", "float32"))
        options = {"format": tensor.format, "shape": tensor.shape, "dtype": F32}
        ids = np.array([-1, 24, 10**6], np.int32)
        found = compute(implementation, quantized_take, ids, *tensor.arrays.values(), **options)
        assert_close(found, expected[[0, 23, 23]], F32)


def test_wrong_dense_calls_are_refused():
    x, w = np.zeros((2, 8), F32), np.zeros((4, 8), F32)
    with pytest.raises(
        TypeError, match=r"dense_matmul: w has shape \(4, 7\), expected axes \[O I\] with I = 8 \(from x\)"
    ):
        dense_matmul(x, w[:, :7])
    with pytest.raises(TypeError, match="w has dtype bfloat16, expected float32"):
        dense_matmul(x, w.astype(BF16))
    with pytest.raises(TypeError, match="out_dtype must be a floating dtype, got int8"):
        dense_matmul(x, w, out_dtype=np.int8)


def test_wrong_quantized_calls_are_refused():
    format = QuantFormat(4, 32, "minimum", "float16")
    tensor, _ = weight(format)
    codes, scale, minimum = tensor.arrays.values()
    x, options = np.zeros((2, 80), F32), {"format": format, "shape": tensor.shape}
    with pytest.raises(TypeError, match=r"x has shape \(2, 79\), expected axes \[... 80\]"):
        quantized_matmul(x[:, :79], codes, scale, minimum, **options)
    with pytest.raises(TypeError, match="int4 g32 minimum f16 takes the arrays codes, scale, minimum, got 2 arrays"):
        quantized_matmul(x, codes, scale, **options)
    with pytest.raises(
        TypeError, match=r"scale is float32 \[24, 3\], expected float16 \[24, 3\] for a \[24, 80\] weight"
    ):
        quantized_matmul(x, codes, scale.astype(F32), minimum, **options)
    with pytest.raises(TypeError, match="must be even, got 81"):
        quantized_matmul(np.zeros((2, 81), F32), codes, scale, minimum, format=format, shape=(24, 81))
    with pytest.raises(TypeError, match=r"codes is uint8 \[23, 40\]"):
        quantized_take(np.zeros(2, np.int32), codes[:23], scale, minimum, **options, dtype=F32)
    with pytest.raises(TypeError, match="quantized_take: dtype must be a floating dtype, got int32"):
        quantized_take(np.zeros(2, np.int32), codes, scale, minimum, **options, dtype=np.int32)
