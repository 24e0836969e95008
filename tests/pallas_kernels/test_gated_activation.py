import numpy as np
import pytest

from jaxserve.pallas_kernels import gated_activation
from tests.pallas_kernels import oracles
from tests.pallas_kernels.harness import BF16, F32, assert_close, compute, dtypes, native_implementations, normal, wide

activations = pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])


@native_implementations
@activations
class TestGatedActivation:
    @dtypes
    @pytest.mark.parametrize("shape", [(1, 2), (1, 128), (5, 602), (2, 3, 40), (0, 64), (9, 3072)], ids=str)
    def test_matches_the_equation(self, implementation, activation, dtype, shape):
        x = normal(0, *shape, dtype=dtype) * dtype.type(3)
        found = compute(implementation, gated_activation, x, activation=activation)
        # In bf16 the reference rounds every step of the activation, as models do.
        f32 = 2e-6 if dtype == F32 else 1e-2
        assert_close(found, oracles.gated_activation(wide(x), activation), dtype, roundings=4, f32=f32)

    def test_the_result_is_rounded_once(self, implementation, activation):
        x = normal(1, 7, 90)
        found = compute(implementation, gated_activation, x, activation=activation, out_dtype=BF16)
        assert_close(found, oracles.gated_activation(wide(x), activation), BF16)

    def test_far_from_zero(self, implementation, activation):
        """The gate passes what is large, stops what is small, and hides no NaN."""
        gates = np.array([1e4, -1e4, 88, -88, 0.0, -0.0, np.inf, np.nan], F32)
        x = np.concatenate([gates, np.ones(8, F32)])[None]
        found = compute(implementation, gated_activation, x, activation=activation)
        expected = [1e4, 0, 88, 0, 0, 0, np.inf, np.nan]
        np.testing.assert_allclose(found[0], expected, atol=1e-30)

    @pytest.mark.parametrize("width", [16, 301, 1536])
    def test_a_row_does_not_depend_on_its_company(self, implementation, activation, width):
        if implementation == "reference":
            pytest.skip("XLA's exponential is another one in the lanes that fill no vector")
        x = normal(2, 40, 2 * width)
        together = compute(implementation, gated_activation, x, activation=activation)
        for rows in (1, 2, 3, 17, 40):
            found = compute(implementation, gated_activation, x[-rows:], activation=activation)
            assert found.tobytes() == together[-rows:].tobytes()


def test_errors_name_what_is_wrong():
    with pytest.raises(TypeError, match=r"gated_activation: x has shape \(2, 7\), whose last axis has no two halves"):
        gated_activation(np.zeros((2, 7), F32))
    with pytest.raises(TypeError, match="gated_activation: activation is 'relu', expected one of silu, gelu_tanh"):
        gated_activation(np.zeros((2, 8), F32), activation="relu")
