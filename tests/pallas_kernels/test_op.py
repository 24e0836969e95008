"""What holds for every op: abstract evaluation, transformations, lowering; and the seam for kernels."""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve._compat import trace
from jaxserve.pallas_kernels import (
    OPS,
    Op,
    QuantFormat,
    Refusal,
    RopeSpec,
    add_rms_norm,
    attention,
    dense_matmul,
    gated_activation,
    kv_write,
    paged_attention,
    quantize_rtn,
    quantized_matmul,
    quantized_norm,
    quantized_take,
    rms_norm,
    rope,
    rope_qkv,
    sample_logits,
)
from jaxserve.pallas_kernels._native import CUSTOM_CALLS
from tests.pallas_kernels.harness import BF16, F32, normal


def samples(dtype):
    """One call of every op: function of the arrays, the arrays."""
    tensor = quantize_rtn(normal(0, 6, 32), QuantFormat(4, 16, "minimum", "float32"))
    weight = {"format": tensor.format, "shape": tensor.shape}
    fields = tuple(tensor.arrays.values())
    index, segments = np.array([1, 0, 2], np.int32), np.zeros(3, np.int32)
    q, k, v = (normal(i, 3, n, 8, dtype=dtype) for i, n in enumerate((4, 2, 2)))
    caches = tuple(normal(i, 5, 4, 2, 8, dtype=dtype) for i in (3, 4))
    tables, lengths = np.array([[4, 1], [0, 2]], np.int32), np.array([7, 3], np.int32)
    starts = np.array([0, 1, 3], np.int32)
    draw_options = (np.ones(3, F32), np.array([0, 1, 5], np.int32), np.full(3, 0.9, F32), np.zeros(3, F32))
    rows = [normal(seed, 3, 8, dtype=dtype) for seed in (0, 1)]
    return {
        "rms_norm": (functools.partial(rms_norm, eps=1e-5), (normal(0, 3, 8, dtype=dtype), normal(1, 8, dtype=dtype))),
        "add_rms_norm": (functools.partial(add_rms_norm, eps=1e-5), (*rows, normal(2, 8, dtype=dtype))),
        "quantized_norm": (
            functools.partial(quantized_norm, eps=1e-5, activation="int8"),
            (rows[0], normal(2, 8, dtype=dtype)),
        ),
        "gated_activation": (gated_activation, (rows[0],)),
        "rope": (functools.partial(rope, spec=RopeSpec(4, 1e4)), (q, index)),
        "rope_qkv": (
            functools.partial(rope_qkv, spec=RopeSpec(4, 1e4), heads=2, kv_heads=1),
            (q.reshape(3, 32), index),
        ),
        "attention": (functools.partial(attention, scale=0.3, window=2), (q, k, v, index, segments)),
        "kv_write": (kv_write, (*caches, k, v, np.array([6, -1, 0], np.int32))),
        "paged_attention": (functools.partial(paged_attention, scale=0.3), (q, *caches, tables, starts, lengths)),
        "dense_matmul": (dense_matmul, (normal(0, 3, 8, dtype=dtype), normal(1, 6, 8, dtype=dtype))),
        "quantized_matmul": (functools.partial(quantized_matmul, **weight), (normal(0, 3, 32, dtype=dtype), *fields)),
        "quantized_take": (functools.partial(quantized_take, **weight, dtype=dtype), (index, *fields)),
        "sample_logits": (
            functools.partial(sample_logits, vocab=20),
            (normal(0, 3, 24), np.arange(6, dtype=np.uint32).reshape(3, 2), index, *draw_options),
        ),
    }


calls = pytest.mark.parametrize("name", sorted(samples(F32)))


def reference_of(function, operands):
    """The plain function that a call of an op stands for."""
    (eqn,) = trace(function, *operands).eqns
    return functools.partial(OPS[eqn.primitive.name].reference, **eqn.params)


def same(found, expected, **tolerance):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a, F32), np.asarray(b, F32), **tolerance), found, expected
    )


def test_every_op_has_a_sample():
    assert {f"jaxserve.{name}" for name in samples(F32)} == set(OPS)
    assert all(op.primitive.name == name for name, op in OPS.items())


@calls
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
class TestEveryOp:
    def test_traces_to_one_equation(self, name, dtype):
        function, operands = samples(dtype)[name]
        (eqn,) = trace(function, *operands).eqns
        assert eqn.primitive.name == f"jaxserve.{name}"
        hash(tuple(sorted(eqn.params.items())))
        assert not any(" at 0x" in repr(value) for value in eqn.params.values())

    def test_shape_rule_agrees_with_the_reference(self, name, dtype):
        function, operands = samples(dtype)[name]
        found = jax.eval_shape(function, *operands)
        expected = jax.eval_shape(reference_of(function, operands), *operands)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)

    def test_eager_jit_and_reference_agree(self, name, dtype):
        function, operands = samples(dtype)[name]
        found = jax.jit(function)(*operands)
        same(function(*operands), found, rtol=0, atol=0)
        close = 1e-5 if dtype == F32 else 2.0**-7  # a kernel may add in another order
        same(found, jax.jit(reference_of(function, operands))(*operands), rtol=close, atol=close)

    def test_vmap_is_a_loop(self, name, dtype):
        function, operands = samples(dtype)[name]
        first, rest = operands[0], operands[1:]
        stacked = np.stack([first, first[::-1]])
        expected = [function(each, *rest) for each in stacked]
        expected = jax.tree.map(lambda *each: jnp.stack(each), *expected)
        close = 1e-5 if dtype == F32 else 2.0**-7
        same(jax.vmap(function, (0, *[None] * len(rest)))(stacked, *rest), expected, rtol=close, atol=close)

    def test_works_in_cond_and_while(self, name, dtype):
        function, operands = samples(dtype)[name]
        expected = jax.jit(function)(*operands)

        @jax.jit
        def nested(flag, *operands):
            zeros = jax.tree.map(jnp.zeros_like, expected)
            looped = jax.lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + 1, function(*operands)), (0, zeros))[1]
            return looped, jax.lax.cond(flag, lambda: function(*operands), lambda: zeros)

        looped, chosen = nested(True, *operands)
        close = 1e-6 if dtype == F32 else 2.0**-7
        same(looped, expected, rtol=close, atol=close)
        same(chosen, expected, rtol=close, atol=close)

    def test_exports_with_no_custom_calls_but_ours(self, name, dtype):
        function, operands = samples(dtype)[name]
        ours = [jax.export.DisabledSafetyCheck.custom_call(target) for target in CUSTOM_CALLS]
        exported = jax.export.export(jax.jit(function), platforms=["cpu"], disabled_checks=ours)(*operands)
        assert set(re.findall(r"custom_call @(\w+)", exported.mlir_module())) <= set(CUSTOM_CALLS)
        reference = jax.export.export(jax.jit(function), platforms=["cuda"])(*operands)
        assert "stablehlo.custom_call" not in reference.mlir_module()
        loaded = jax.export.deserialize(exported.serialize())
        close = 1e-6 if dtype == F32 else 2.0**-7
        same(loaded.call(*operands), function(*operands), rtol=close, atol=close)


@pytest.mark.parametrize(
    "name", sorted(samples(F32).keys() - {"sample_logits", "quantized_norm"})
)  # they give whole numbers
def test_jvp_is_the_derivative(name):
    function, operands = samples(F32)[name]
    moving = [i for i, operand in enumerate(operands) if operand.dtype == F32]
    assert moving

    def of_moving(*values):
        merged = list(operands)
        for i, value in zip(moving, values, strict=True):
            merged[i] = value
        return function(*merged)

    points = [operands[i] for i in moving]
    directions = [normal(50 + i, *operands[i].shape) for i in moving]
    _, found = jax.jvp(of_moving, points, directions)
    step = 1e-2
    ahead, behind = (
        of_moving(*(p + sign * step * d for p, d in zip(points, directions, strict=True))) for sign in (1, -1)
    )
    numeric = jax.tree.map(lambda a, b: (a - b) / (2 * step), ahead, behind)
    same(found, numeric, rtol=2e-2, atol=5e-3)


@pytest.mark.parametrize("name", ["rms_norm", "rope", "attention", "dense_matmul", "quantized_matmul"])
def test_anchors_have_gradients(name):
    function, operands = samples(F32)[name]
    gradient = jax.grad(lambda x: function(x, *operands[1:]).sum())(operands[0])
    assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0


def test_parameters_are_checked_for_wrong_shapes_under_jit_too():
    with pytest.raises(TypeError, match="rms_norm: weight"):
        jax.jit(functools.partial(rms_norm, eps=1e-5)).trace(jnp.zeros((2, 8)), jnp.zeros(4))


class TestKernels:
    """The seam: kernels are asked in turn, may refuse, and the reference is the last resort."""

    @pytest.fixture
    def op(self):
        def rule(x, *, times):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)

        return Op("multiply_for_a_test", lambda x, *, times: x * times, rule)

    @staticmethod
    def off_by_100(x, *, times):
        """A kernel whose work can be told from the reference's; takes short vectors only."""
        return Refusal(f"{x.shape[0]} is too long") if x.shape[0] > 4 else lambda x: x * times + 100

    def run(self, op, length=3):
        return jax.jit(lambda x: op(x, times=2.0))(jnp.ones(length)).tolist()

    def test_reference_when_there_is_no_kernel(self, op):
        assert self.run(op) == [2, 2, 2]
        choice = op.choose("cpu", jax.ShapeDtypeStruct((3,), F32), times=2.0)
        assert choice.name == "reference" and choice.refusals == ()

    def test_a_kernel_takes_what_it_supports_and_refuses_with_a_reason(self, op):
        op.register("cpu", self.off_by_100, name="fast")
        assert self.run(op) == [102, 102, 102]
        assert op(jnp.ones(3), times=2.0).tolist() == [102, 102, 102]
        assert self.run(op, 5) == [2] * 5
        choice = op.choose("cpu", jax.ShapeDtypeStruct((5,), F32), times=2.0)
        assert choice.name == "reference" and choice.refusals == (("fast", "5 is too long"),)

    def test_the_latest_kernel_is_asked_first(self, op):
        op.register("cpu", lambda x, *, times: lambda x: x * times + 7, name="general")
        op.register("cpu", self.off_by_100, name="fast")
        assert self.run(op, 2) == [102, 102]
        assert self.run(op, 6) == [9] * 6
        op.unregister("cpu", "fast")
        assert self.run(op, 1) == [9]

    def test_kernels_of_another_platform_are_not_asked(self, op):
        op.register("cuda", self.off_by_100, name="fast")
        assert self.run(op) == [2, 2, 2]
        exported = jax.export.export(jax.jit(lambda x: op(x, times=2.0)), platforms=["cuda"])(jnp.ones(3))
        assert "1.000000e+02" in exported.mlir_module()

    def test_derivatives_and_batching_use_the_reference(self, op):
        op.register("cpu", self.off_by_100, name="fast")
        assert jax.jvp(lambda x: op(x, times=2.0), (jnp.ones(3),), (jnp.ones(3),))[1].tolist() == [2, 2, 2]
        assert jax.vmap(lambda x: op(x, times=2.0))(jnp.ones((2, 3))).tolist() == [[2, 2, 2], [2, 2, 2]]

    def test_wrong_registrations_are_refused(self, op):
        op.register("cpu", self.off_by_100, name="fast")
        with pytest.raises(ValueError, match="already has a kernel named 'fast'"):
            op.register("cpu", self.off_by_100, name="fast")
        with pytest.raises(ValueError, match="unknown platform 'tpu'"):
            op.register("tpu", self.off_by_100, name="fast")
        with pytest.raises(ValueError, match=r"already an op named jaxserve\.rms_norm"):
            Op("rms_norm", op.reference, op.shape_rule).publish()
        assert OPS["jaxserve.rms_norm"].reference is not op.reference
