import jax
import numpy as np
import pytest

from jaxserve.pallas_kernels import OPS, Refusal, add_rms_norm, quantized_norm, rms_norm
from jaxserve.pallas_kernels._native import describe, is_available
from tests.pallas_kernels import oracles
from tests.pallas_kernels.harness import BF16, F32, assert_close, compute, dtypes, native_implementations, normal, wide


@native_implementations
class TestRmsNorm:
    @dtypes
    @pytest.mark.parametrize("shape", [(1, 1), (1, 64), (5, 576), (2, 3, 40), (7,), (0, 64), (33, 301)], ids=str)
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

    def test_one_layer_of_a_stack_rounded_once(self, implementation):
        x, weights = normal(0, 5, 100), normal(1, 3, 100)
        found = compute(implementation, rms_norm, x, weights, eps=1e-5, layer=2, out_dtype=BF16)
        assert_close(found, oracles.rms_norm(wide(x), wide(weights[2]), 1e-5), BF16)


@native_implementations
class TestAddRmsNorm:
    @dtypes
    @pytest.mark.parametrize("shape", [(1, 64), (17, 576), (2, 3, 40), (0, 64), (3, 301)], ids=str)
    def test_is_the_sum_and_its_norm(self, implementation, dtype, shape):
        x, y, weight = (normal(seed, *shape[at:], dtype=dtype) for seed, at in ((0, 0), (1, 0), (2, -1)))
        h, n = compute(implementation, add_rms_norm, x, y, weight, eps=1e-5)
        np.testing.assert_array_equal(h, (x + y).astype(F32))
        # XLA may take the statistics of the sum before it rounds it.
        assert_close(n, oracles.rms_norm(wide(x + y), wide(weight), 1e-5), dtype, roundings=4)

    def test_options_are_those_of_the_norm(self, implementation):
        x, y, weights = normal(0, 5, 100), normal(1, 5, 100), normal(2, 3, 100)
        options = {"eps": 1e-5, "layer": 1, "plus_one": True, "out_dtype": BF16}
        h, n = compute(implementation, add_rms_norm, x, y, weights, **options)
        assert_close(n, oracles.rms_norm(wide(h), 1 + wide(weights[1]), 1e-5), BF16)


@pytest.mark.parametrize(("activation", "largest", "unit"), [("int8", 127, 1), ("e4m3", 448, 16)])
def test_a_norm_in_codes(activation, largest, unit):
    x, weights = normal(0, 2, 3, 100), normal(1, 3, 100)
    x[0, 0] = 0
    options = {"eps": 1e-5, "layer": 2, "plus_one": True}
    codes, scale = compute("reference", quantized_norm, x, weights, activation=activation, **options)
    expected = oracles.rms_norm(wide(x), 1 + wide(weights[2]), 1e-5)
    assert_close(scale[..., 0], np.abs(expected).max(axis=-1) / largest, F32)
    assert not scale[0, 0].any() and not codes[0, 0].any()
    assert np.abs(codes * scale - expected).max() <= 1.001 * unit * scale.max()
    np.testing.assert_array_equal(np.abs(codes).max(axis=-1), [[0, largest, largest], [largest] * 3])


def test_shape_errors_name_the_operand():
    x = np.zeros((2, 8), F32)
    with pytest.raises(
        TypeError, match=r"rms_norm: weight has shape \(7,\), expected axes \[D\] with D = 8 \(from x\)"
    ):
        rms_norm(x, np.zeros(7, F32), eps=1e-5)
    with pytest.raises(TypeError, match="rms_norm: x has dtype int32, expected float32 or"):
        rms_norm(np.zeros((2, 8), np.int32), np.zeros(8, F32), eps=1e-5)
    with pytest.raises(TypeError, match=r"rms_norm: layer 3 is not one of the 3 of weight"):
        rms_norm(np.zeros((2, 8), F32), np.zeros((3, 8), F32), eps=1e-5, layer=3)
    with pytest.raises(TypeError, match=r"quantized_norm: activation must be one of int8, e4m3, got 'int8-static'"):
        quantized_norm(x, np.zeros(8, F32), activation="int8-static", eps=1e-5)
    with pytest.raises(TypeError, match=r"add_rms_norm: y has shape \(1, 8\), expected that of x, \(2, 8\)"):
        add_rms_norm(np.zeros((2, 8), F32), np.zeros((1, 8), F32), np.zeros(8, F32), eps=1e-5)


@native_implementations
@pytest.mark.parametrize("width", [576, 64, 96, 100])
def test_a_row_does_not_depend_on_its_company(implementation, width):
    x = np.random.default_rng(width).normal(0, 3, (96, width)).astype(np.float32)
    weight = np.random.default_rng(1).normal(1, 0.1, width).astype(np.float32)
    alone = np.concatenate([compute(implementation, rms_norm, row[None], weight, eps=1e-5) for row in x])
    for rows in (2, 4, 8, 32, 96):
        found = compute(implementation, rms_norm, x[:rows], weight, eps=1e-5)
        np.testing.assert_array_equal(found, alone[:rows])
        h, n = compute(implementation, add_rms_norm, x[:rows] / 2, x[:rows] / 2, weight, eps=1e-5)
        np.testing.assert_array_equal(h, x[:rows])
        np.testing.assert_array_equal(n, alone[:rows])


@pytest.mark.skipif(not is_available(), reason=describe())
def test_a_layer_that_is_known_when_it_runs_may_not_lie_outside_the_stack():
    x, weights = np.ones((2, 8), F32), np.ones((3, 8), F32)
    call = OPS["jaxserve.rms_norm"].kernel("cpu", "native")(
        x, weights, eps=1e-5, plus_one=False, out_dtype=None, layer="traced"
    )
    assert not isinstance(call, Refusal)
    np.testing.assert_allclose(jax.jit(call)(x, weights, np.int32(2)), 1, rtol=1e-5)
    for layer in (-1, 3):
        with pytest.raises(
            (ValueError, jax.errors.JaxRuntimeError), match="rms_norm: the operands do not fit each other"
        ):
            jax.block_until_ready(jax.jit(call)(x, weights, np.int32(layer)))
