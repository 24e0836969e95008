import jax
import numpy as np
import pytest

from jaxserve.pallas_kernels import rms_norm
from tests.pallas_kernels import oracles
from tests.pallas_kernels.harness import BF16, F32, assert_close, compute, dtypes, implementations, normal, wide


@implementations
class TestRmsNorm:
    @dtypes
    @pytest.mark.parametrize("shape", [(1, 1), (1, 64), (5, 576), (2, 3, 40), (7,)], ids=str)
    def test_matches_the_equation(self, implementation, dtype, shape):
        x, weight = normal(0, *shape, dtype=dtype) * dtype.type(3), normal(1, shape[-1], dtype=dtype)
        found = compute(implementation, rms_norm, x, weight, eps=1e-5)
        assert_close(found, oracles.rms_norm(wide(x), wide(weight), 1e-5), dtype, roundings=2)

    @dtypes
    def test_plus_one_adds_one_to_the_weight_before_rounding(self, implementation, dtype):
        x, weight = normal(0, 4, 64, dtype=dtype), normal(1, 64, dtype=dtype) * dtype.type(0.01)
        found = compute(implementation, rms_norm, x, weight, eps=1e-6, plus_one=True)
        assert_close(found, oracles.rms_norm(wide(x), 1 + wide(weight), 1e-6), dtype)

    def test_rounds_the_normalized_row_before_the_weight(self, implementation):
        x, weight = normal(0, 16, 128, dtype=BF16), normal(1, 128, dtype=BF16)
        normalized = oracles.rms_norm(wide(x), np.ones(128), 1e-5).astype(BF16)
        found = compute(implementation, rms_norm, x, weight, eps=1e-5)
        agree = np.mean(found == (normalized * weight).astype(F32))
        assert agree > 0.995  # float32 statistics may land on the other side of a rounding boundary, rarely

    def test_a_row_of_zeros_stays_finite(self, implementation):
        found = compute(implementation, rms_norm, np.zeros((2, 8), F32), np.ones(8, F32), eps=1e-6)
        np.testing.assert_array_equal(found, 0)

    def test_statistics_do_not_overflow_in_sixteen_bits(self, implementation):
        x = np.full((1, 16), 1000.0, np.float16)  # its square is past float16
        found = compute(implementation, rms_norm, x, np.ones(16, np.float16), eps=1e-6)
        np.testing.assert_array_equal(found, 1)


def test_shape_errors_name_the_operand():
    x = np.zeros((2, 8), F32)
    with pytest.raises(
        TypeError, match=r"rms_norm: weight has shape \(7,\), expected axes \[D\] with D = 8 \(from x\)"
    ):
        rms_norm(x, np.zeros(7, F32), eps=1e-5)
    with pytest.raises(TypeError, match="rms_norm: x has dtype int32, expected float32 or"):
        rms_norm(np.zeros((2, 8), np.int32), np.zeros(8, F32), eps=1e-5)


@pytest.mark.parametrize("width", [576, 64, 96, 100])
def test_a_row_does_not_depend_on_its_company(width):
    x = np.random.default_rng(width).normal(0, 3, (32, width)).astype(np.float32)
    weight = np.random.default_rng(1).normal(1, 0.1, width).astype(np.float32)
    norm = jax.jit(lambda x: rms_norm(x, weight, eps=1e-5))
    alone = np.concatenate([norm(row[None]) for row in x])
    for rows in (2, 4, 8, 32):
        np.testing.assert_array_equal(norm(x[:rows]), alone[:rows])
