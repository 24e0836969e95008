import math

import numpy as np
import pytest

from jaxserve.pallas_kernels import LinearScaling, Llama3Scaling, RopeSpec, rope
from tests.pallas_kernels import oracles
from tests.pallas_kernels.harness import F32, assert_close, compute, dtypes, implementations, normal, wide

LLAMA3 = Llama3Scaling(8.0, 1.0, 4.0, 8192)


@implementations
class TestRope:
    @dtypes
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("dim", [2, 8, 16])
    def test_matches_the_equation(self, implementation, dtype, interleaved, dim):
        spec = RopeSpec(dim, 10_000.0, interleaved=interleaved)
        x, positions = normal(0, 5, 3, 16, dtype=dtype), np.array([0, 1, 7, 500, 2], np.int32)
        found = compute(implementation, rope, x, positions, spec=spec)
        assert_close(found, oracles.rope(wide(x), positions, spec.inv_freq(), interleaved), dtype)
        np.testing.assert_array_equal(found[..., dim:], x[..., dim:].astype(F32))

    def test_position_zero_changes_nothing(self, implementation):
        x = normal(0, 2, 4, 8)
        found = compute(implementation, rope, x, np.zeros(2, np.int32), spec=RopeSpec(8, 1e4))
        np.testing.assert_array_equal(found, x)

    def test_scores_depend_on_the_distance_only(self, implementation):
        q, k = (np.tile(normal(seed, 1, 1, 64), (3, 1, 1)) for seed in (0, 1))
        spec = RopeSpec(64, 500_000.0, LLAMA3)
        q = compute(implementation, rope, q, np.array([10, 110, 1010], np.int32), spec=spec)
        k = compute(implementation, rope, k, np.array([3, 103, 1003], np.int32), spec=spec)
        scores = np.einsum("tnh,tnh->t", q, k)
        np.testing.assert_allclose(scores, scores[0], rtol=1e-4, atol=1e-4)


class TestSpec:
    def test_plain_frequencies(self):
        inv_freq = RopeSpec(64, 10_000.0).inv_freq()
        assert inv_freq.dtype == F32
        np.testing.assert_allclose(inv_freq, [10_000 ** (-2 * i / 64) for i in range(32)], rtol=1e-7)

    def test_linear_scaling_divides(self):
        plain, scaled = RopeSpec(64, 1e4).inv_freq(), RopeSpec(64, 1e4, LinearScaling(4.0)).inv_freq()
        np.testing.assert_allclose(scaled, plain / 4, rtol=1e-7)

    def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones(self):
        plain, scaled = RopeSpec(128, 5e5).inv_freq(), RopeSpec(128, 5e5, LLAMA3).inv_freq()
        for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
            wavelength = 2 * math.pi / before
            if wavelength < 8192 / 4:
                expected = before
            elif wavelength > 8192 / 1:
                expected = before / 8
            else:
                smooth = (8192 / wavelength - 1) / (4 - 1)
                expected = (1 - smooth) * before / 8 + smooth * before
            assert after == pytest.approx(expected, rel=1e-6)
        assert len({round(b / a, 3) for b, a in zip(plain.tolist(), scaled.tolist(), strict=True)}) > 3

    def test_bad_values_are_refused(self):
        with pytest.raises(ValueError, match="positive and even, got 7"):
            RopeSpec(7, 1e4)
        with pytest.raises(ValueError, match="theta must be positive"):
            RopeSpec(8, 0.0)


def test_shape_errors_name_the_operand():
    x, positions = np.zeros((3, 2, 8), F32), np.zeros(3, np.int32)
    with pytest.raises(TypeError, match=r"rope: positions has shape \(4,\)"):
        rope(x, np.zeros(4, np.int32), spec=RopeSpec(8, 1e4))
    with pytest.raises(TypeError, match="rotates 16 channels but x has only H = 8"):
        rope(x, positions, spec=RopeSpec(16, 1e4))
    with pytest.raises(TypeError, match="positions has dtype float32, expected int32"):
        rope(x, np.zeros(3, F32), spec=RopeSpec(8, 1e4))
