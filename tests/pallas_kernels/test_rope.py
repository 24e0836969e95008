import math

import jax
import numpy as np
import pytest

from jaxserve.pallas_kernels import OPS, LinearScaling, Llama3Scaling, Refusal, RopeSpec, rope, rope_qkv
from jaxserve.pallas_kernels._native import describe, is_available
from tests.pallas_kernels import oracles
from tests.pallas_kernels.harness import F32, assert_close, compute, dtypes, native_implementations, normal, wide

LLAMA3 = Llama3Scaling(8.0, 1.0, 4.0, 8192)


@native_implementations
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

    @dtypes
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize(("dim", "head_dim"), [(64, 64), (128, 128), (40, 40), (34, 80)])
    def test_heads_of_models_at_long_contexts(self, implementation, dtype, interleaved, dim, head_dim):
        """The angle is a float32, whose cosine and sine are right to float32's last places however many turns it is."""
        spec = RopeSpec(dim, 500_000.0, LLAMA3, interleaved)
        positions = np.array([131071, 131070, 65537, 8191, 25 * 2**18, 0], np.int32)
        x = normal(0, len(positions), 2, head_dim, dtype=dtype)
        found = compute(implementation, rope, x, positions, spec=spec)
        assert_close(found, oracles.rope(wide(x), positions, spec.inv_freq(), interleaved), dtype, f32=2e-7)
        np.testing.assert_array_equal(found[..., dim:], x[..., dim:].astype(F32))

    @pytest.mark.parametrize("tokens", [0, 1, 200])
    @pytest.mark.parametrize("scaling", [None, LinearScaling(4.0)])
    def test_any_number_of_tokens(self, implementation, tokens, scaling):
        spec = RopeSpec(64, 1e4, scaling)
        x, positions = normal(0, tokens, 3, 64), np.arange(tokens, dtype=np.int32)[::-1].copy()
        found = compute(implementation, rope, x, positions, spec=spec)
        assert_close(found, oracles.rope(wide(x), positions, spec.inv_freq(), False), F32)

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


@native_implementations
class TestRopeQkv:
    @dtypes
    @pytest.mark.parametrize("spec", [RopeSpec(64, 1e4), RopeSpec(20, 1e6, interleaved=True)], ids=["all", "some"])
    @pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (4, 4)])
    @pytest.mark.parametrize("tokens", [0, 1, 70])
    def test_is_rope_of_two_parts_and_the_third(self, implementation, dtype, spec, heads, kv_heads, tokens):
        x, positions = normal(0, tokens, (heads + 2 * kv_heads) * 64, dtype=dtype), np.arange(tokens, dtype=np.int32)
        found = compute(implementation, rope_qkv, x, positions, spec=spec, heads=heads, kv_heads=kv_heads)
        q, k, v = np.split(x.reshape(tokens, heads + 2 * kv_heads, 64), (heads, heads + kv_heads), axis=1)
        for part, turned in zip((q, k), found, strict=False):
            np.testing.assert_array_equal(turned, compute(implementation, rope, part, positions, spec=spec))
        np.testing.assert_array_equal(found[2], v.astype(F32))

    @dtypes
    @pytest.mark.parametrize("layer", [None, 0, 2])
    @pytest.mark.parametrize("dim", [16, 10])
    def test_adds_biases_first(self, implementation, dtype, layer, dim):
        spec, positions = RopeSpec(dim, 1e4, interleaved=dim == 10), np.array([5, 0, 90000], np.int32)
        x, stacks = (
            normal(0, 3, 96, dtype=dtype),
            [normal(i, 3, n * 16, dtype=dtype) for i, n in ((1, 2), (2, 2), (3, 2))],
        )
        biases = stacks if layer is not None else [stack[1] for stack in stacks]
        options = {"spec": spec, "heads": 2, "kv_heads": 2}
        found = compute(implementation, rope_qkv, x, positions, *biases, **options, layer=layer)
        biased = x + np.concatenate([stack[1 if layer is None else layer] for stack in stacks])
        for one, other in zip(found, compute(implementation, rope_qkv, biased, positions, **options), strict=True):
            assert_close(one, wide(other), dtype, f32=0)


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
    with pytest.raises(TypeError, match=r"rope_qkv: x has 16 channels, which are not those of 1 \+ 2 \* 1 heads"):
        rope_qkv(x.reshape(3, 16), positions, spec=RopeSpec(4, 1e4), heads=1, kv_heads=1)
    with pytest.raises(TypeError, match="rope_qkv: spec rotates 8 channels but heads have only H = 4"):
        rope_qkv(x.reshape(3, 16), positions, spec=RopeSpec(8, 1e4), heads=2, kv_heads=1)
    options = {"spec": RopeSpec(4, 1e4), "heads": 2, "kv_heads": 1}
    stacks = [np.zeros((5, n), F32) for n in (8, 4, 4)]
    with pytest.raises(TypeError, match=r"rope_qkv: there are biases for q, k and v or for none, .*; got 1"):
        rope_qkv(x.reshape(3, 16), positions, stacks[0], **options, layer=0)
    with pytest.raises(TypeError, match=r"rope_qkv: the bias of k has shape \(5, 8\), expected axes \[L 4\]"):
        rope_qkv(x.reshape(3, 16), positions, stacks[0], stacks[0], stacks[1], **options, layer=0)
    with pytest.raises(TypeError, match="rope_qkv: layer 5 is not one of the 5 of the biases"):
        rope_qkv(x.reshape(3, 16), positions, *stacks, **options, layer=5)


@pytest.mark.skipif(not is_available(), reason=describe())
def test_a_layer_that_is_known_when_it_runs_may_not_lie_outside_the_biases():
    x, positions, stacks = np.zeros((3, 16), F32), np.zeros(3, np.int32), [np.ones((5, n), F32) for n in (8, 4, 4)]
    options = {"spec": RopeSpec(4, 1e4), "heads": 2, "kv_heads": 1, "layer": "traced"}
    call = OPS["jaxserve.rope_qkv"].kernel("cpu", "native")(x, positions, *stacks, **options)
    assert not isinstance(call, Refusal)
    for part in jax.jit(call)(x, positions, *stacks, np.int32(4)):
        np.testing.assert_array_equal(part, 1)
    for layer in (-1, 5):
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="rope_qkv: the operands do not fit"):
            jax.block_until_ready(jax.jit(call)(x, positions, *stacks, np.int32(layer)))


@pytest.mark.skipif(not is_available(), reason=describe())
def test_native_kernels_refuse_other_dtypes_with_a_reason():
    x, positions = np.zeros((3, 4, 8), np.float16), np.zeros(3, np.int32)
    native = lambda name: OPS[f"jaxserve.{name}"].kernel("cpu", "native")  # noqa: E731
    reason = Refusal("x is float16; it knows float32 and bfloat16")
    assert native("rope")(x, positions, spec=RopeSpec(8, 1e4)) == reason
    options = {"spec": RopeSpec(8, 1e4), "heads": 2, "kv_heads": 1, "layer": None}
    assert native("rope_qkv")(x.reshape(3, 32), positions, **options) == reason
