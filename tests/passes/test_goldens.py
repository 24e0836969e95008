"""Every pass once where it matches and once where it must not: its report, its weight edits and its graph.

The texts are in tests/golden/. JAXSERVE_UPDATE_GOLDENS=1 writes them anew; read the difference before keeping it.
"""

import contextlib
import dataclasses
import importlib
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.lowering import trace_model
from jaxserve.pallas_kernels import QuantFormat, RopeSpec, attention, dense_matmul, quantized_matmul, rms_norm, rope
from jaxserve.passes.graph import Graph
from jaxserve.passes.verify import VerifyError
from tests.passes import rope_cases, scale_cases
from tests.passes.helpers import (
    assert_same_results,
    check_golden,
    explained,
    make_graph,
    pipeline,
    random_values,
    spec,
    tiny,
    trace_tiny,
)

ROPE = RopeSpec(8, 1e4)
INDEX = spec((4,), "int32")
X = {"x": (4, 16)}
DENSE = "canonicalize,lower-dense-matmul"


def scope(name: str, value):
    with jax.named_scope("model"), jax.named_scope(name):
        return value()


def flax_dense() -> Graph:
    """flax's Dense keeps its kernel [I, O]; the second is square."""
    dense = {name: nn.Dense(features, name=name) for name, features in (("up", 32), ("square", 32))}

    def function(v):
        hidden = v["x"]
        for name, module in dense.items():
            hidden = module.apply({"params": {key: v[f"{name}/{key}"] for key in ("kernel", "bias")}}, hidden)
        return hidden

    params = {"up/kernel": (16, 32), "up/bias": (32,), "square/kernel": (32, 32), "square/bias": (32,)}
    return make_graph(function, params, X)


def written_with_transposes() -> Graph:
    """x @ w.T, also by a reader of w itself; and a dot with the transpose of a weight kept [I, O]."""

    def function(v):
        y = v["x"] @ v["tied"].T
        z = v["tied"].at[v["ids"]].get(mode="clip") + jax.lax.dot_general(y, v["w"].T, (((1,), (1,)), ((), ())))
        return z

    return make_graph(function, {"tied": (32, 16), "w": (32, 16)}, {**X, "ids": INDEX})


def weights_with_two_readers() -> Graph:
    """A weight [I, O] that two dots read, and a transpose that is also an output; nothing may be stored transposed."""

    def function(v):
        y = scope("first", lambda: v["x"] @ v["twice"])
        z = scope("second", lambda: jnp.sin(v["x"]) @ v["twice"])
        t = scope("third", lambda: v["mixed"].T)
        return {"y": y + z, "m": v["x"] @ t, "t": t + 1.0}

    return make_graph(function, {"twice": (16, 32), "mixed": (32, 16)}, X)


def model(**changes) -> Callable[[], Graph]:
    return lambda: trace_tiny(**changes)


def dots_that_are_not_linear_layers() -> Graph:
    """Two activations; a weight on the left; a contraction over the first axis; another precision; a cast weight."""
    last = (((1,), (1,)), ((), ()))

    def function(v):
        x = v["x"]
        return {
            "activations": scope("activations", lambda: jax.lax.dot_general(x, jnp.sin(x), last)),
            "left": scope("left", lambda: jax.lax.dot_general(v["w"], x, last)),
            "first": scope("first", lambda: x @ v["kn"]),
            "precision": scope("precision", lambda: jax.lax.dot_general(x, v["w"], last, precision="highest")),
            "cast": scope("cast", lambda: jax.lax.dot_general(x.astype("bfloat16"), v["w"].astype("bfloat16"), last)),
        }

    return make_graph(function, {"w": (8, 16), "kn": (16, 8)}, X)


def attend(v, q, k, v_, **options):
    heads = [y.reshape(4, -1, 8) for y in (q, k, v_)]
    q, k = (rope(y, v["positions"], spec=ROPE) for y in heads[:2])
    return scope("attn", lambda: attention(q, k, heads[2], v["positions"], v["segments"], scale=0.5, **options))


QKV = {f"block/{name}_proj/kernel": (8, 16) for name in "qkv"}
STEP = {**X, "positions": INDEX, "segments": INDEX}


def project(v, x, name, block="block"):
    return scope(f"{block}/{name}_proj", lambda: dense_matmul(x, v[f"{block}/{name}_proj/kernel"]))


def projections_that_do_not_stack() -> Graph:
    """q from another activation; k tied to another reader; v through an op that is not known; then one sound group
    that two attentions share."""

    def function(v):
        x, other = v["x"], jnp.sin(v["x"])
        q, k, w = (project(v, x, name) for name in "qkv")
        tied = dense_matmul(other, v["block/k_proj/kernel"])
        return {
            "different": attend(v, project(v, other, "q"), k, w),
            "tied": attend(v, q, k, w) + tied.reshape(4, 1, 8),
            "unknown": attend(v, q, k, jnp.cumsum(w, axis=0)),
            "shared": attend(v, *(project(v, x, name, "good") for name in "qkv")),
            "same": (y := project(v, x, "q", "one")) is not None and attend(v, y, y, y),
        }

    good = {f"good/{name}_proj/kernel": (8, 16) for name in "qkv"} | {"one/q_proj/kernel": (8, 16)}
    return make_graph(function, {**QKV, **good}, STEP)


def layers_that_share_projections() -> Graph:
    """Two attentions of one layer on the same q, k, v; a third with another q; and flat names that would collide."""

    def function(v):
        x = v["x"]
        q, k, w = (project(v, x, name) for name in "qkv")
        flat = [[dense_matmul(x, v[f"{name}{i}"]) for name in "qkv"] for i in (0, 1)]
        return {
            "full": attend(v, q, k, w),
            "window": attend(v, q, k, w, window=2),
            "other": attend(v, project(v, x, "q", "extra"), k, w),
            "first": attend(v, *flat[0]),
            "second": attend(v, *flat[1]),
        }

    flat = {f"{name}{i}": (8, 16) for i in (0, 1) for name in "qkv"}
    return make_graph(function, {**QKV, "extra/q_proj/kernel": (8, 16), **flat}, STEP)


def products_that_are_not_gated_mlps() -> Graph:
    """An activation of one matmul; factors of different activations; a factor that is more than an activation; one
    factor used twice in two products; stored forms that differ are shown by the models' tests."""

    def function(v):
        x = v["x"]
        a, b = project(v, x, "a"), project(v, x, "b")
        c = project(v, jnp.sin(x), "c")
        return {
            "silu": jax.nn.silu(project(v, x, "d")),
            "different": jax.nn.silu(a) * c,
            "sorted": scope("sorted", lambda: jnp.sort(a, axis=-1) * b),
            "first": jax.nn.gelu(project(v, x, "e"), approximate=False) * project(v, x, "f"),
            "scaled": a * v["scale"],
        }

    params = {f"block/{name}_proj/kernel": (8, 16) for name in "abcdef"}
    return make_graph(function, {**params, "scale": (8,)}, X)


def odd_readers() -> Graph:
    """A tied embedding read by an op that is not known; an output; a plain dot; an odd width; no rule."""
    last = (((1,), (1,)), ((), ()))

    def function(v):
        head = dense_matmul(v["x"], v["tied/kernel"])
        return {
            "y": head + jnp.sum(v["tied/kernel"], axis=1),
            "out": v["out/kernel"],
            "z": dense_matmul(v["x"], v["out/kernel"]),
            "plain": scope("plain", lambda: jax.lax.dot_general(v["x"], v["plain/kernel"], last)),
            "odd": dense_matmul(v["x"][:, :7], v["odd/kernel"]),
            "free": dense_matmul(v["x"], v["free/kernel"]),
        }

    shapes = {"tied": (8, 16), "out": (8, 16), "plain": (8, 16), "odd": (8, 7), "free": (8, 16)}
    return make_graph(function, {f"{name}/kernel": shape for name, shape in shapes.items()}, X)


def quantizable() -> Graph:
    """Every scheme, a tied embedding, and a weight that the checkpoint stores in blocks."""
    config = tiny(tied=True, vocab=64, width=64, mlp=64)
    stored = {"layers_0/self_attn/o_proj/kernel": QuantFormat(8, 32, "none", "float16")}
    return trace_model(config, 4, 2, stored, "bfloat16")


QUANTIZE = (
    "quantize-matmul{rules='embed=w8a16;o_proj=native;gate_proj=w4a16:sym:g32;"
    "up_proj=w4a16;down_proj=skip;q_proj=w4a16:channel'}"
)


ACTIVATIONS = (
    "quantize-matmul{rules='embed=w8a8;q_proj=w8a8:static;k_proj=w4a8:g32;v_proj=fp8;gate_proj=w3a16:zero;"
    "down_proj=w4a8:g128:static'}"
)
FUSED = f"{DENSE},fuse-qkv,fuse-gate-up"
CALIBRATED = "quantize-matmul{rules='layers=w4a16:g32',method=gptq,act-order=permuted}"


STACKED = f"{FUSED},quantize-matmul{{rules='layers_0/.*down=w8a16;qkv=skip;layers=w8a8:static'}},stack-layers"
ODD_RULES = "quantize-matmul{rules='free=skip;kernel=w4a16;x=w8a16'}"


def narrowable() -> Graph:
    """A tied embedding, dense and quantized matmuls."""
    return trace_model(tiny(tied=True, vocab=64, width=64, mlp=64), 4, 2, {})


def layers_that_do_not_stack() -> Graph:
    """Codes that two layers share, norms of which one is an output, and two biases that are alike."""
    format = QuantFormat(8, None, "none", "float32")

    def function(v):
        x = v["x"]
        for layer in (0, 1):
            scale = v["layers_0/up/scale"]
            x = quantized_matmul(x, v[f"layers_{layer}/up/codes"], scale, format=format, shape=(16, 16))
            x = rms_norm(x, v[f"layers_{layer}/norm"], eps=1e-6) + v[f"layers_{layer}/bias"]
        return {"out": x, "norm": v["layers_1/norm"]}

    shapes = {"norm": (16,), "bias": (16,), "up/scale": (16, 1)}
    params = {f"layers_{layer}/{name}": shape for layer in (0, 1) for name, shape in shapes.items()}
    codes = {f"layers_{layer}/up/codes": spec((16, 16), "int8") for layer in (0, 1)}
    graph = make_graph(function, params, {**codes, **X})
    inputs = [dataclasses.replace(entry, kind="param") if entry.path in codes else entry for entry in graph.inputs]
    return dataclasses.replace(graph, inputs=tuple(inputs))


def norms_that_share() -> Graph:
    """A sum that two norms read; a norm whose result is read in two dtypes, as it is, as an output; and one of a sum
    with a number. A weight that is one row of a stack, and one that is part of a row."""

    def function(v):
        x, y, w, low = v["x"], v["y"], v["w"], jnp.bfloat16
        norm = lambda name, x, w: scope(name, lambda: rms_norm(x, w, eps=1e-6))  # noqa: E731
        h = x + y
        two = norm("two_dtypes", x, w)
        return {
            "h": h * 2.0,
            "first": norm("first", h, w).astype(low),
            "second": norm("second", h, jax.lax.index_in_dim(v["stack"], 1, keepdims=False)).astype(low),
            "number": norm("number", x + 1.0, w).astype(low),
            "two": two.astype(low) + two.astype(jnp.float16).astype(low),
            "plain": jnp.sin(norm("plain", x * y, w)),
            "output": norm("output", h * y, w),
            "part": norm("part", (x - y)[:, :8], jax.lax.slice(v["stack"], (0, 0), (1, 8))[0]).astype(low),
        }

    return make_graph(function, {"w": (16,), "stack": (3, 16)}, {**X, "y": (4, 16)})


def gemma_norms() -> Graph:
    """1 + w, and norms after each half of a layer: of a matmul's result, and before the sum."""

    def function(v):
        x = v["x"]
        for layer in (0, 1):
            for half in ("attention", "mlp"):
                at = f"layers_{layer}/{half}"
                normal = rms_norm(x, v[f"{at}/before"], eps=1e-6, plus_one=True)
                y = dense_matmul(normal.astype(jnp.bfloat16), v[f"{at}/kernel"], out_dtype=jnp.float32)
                x = x + rms_norm(y, v[f"{at}/after"], eps=1e-6, plus_one=True)
        return x

    halves = [f"layers_{layer}/{half}" for layer in (0, 1) for half in ("attention", "mlp")]
    norms = {f"{at}/{name}": (16,) for at in halves for name in ("before", "after")}
    graph = make_graph(function, norms, {**X, **{f"{at}/kernel": spec((16, 16), "bfloat16") for at in halves}})
    inputs = [dataclasses.replace(entry, kind="param") if "kernel" in entry.path else entry for entry in graph.inputs]
    return dataclasses.replace(graph, inputs=tuple(inputs))


def norms_that_stay_in_floats() -> Graph:
    """A norm that is also read as it is, one that is an output, one of static scales, one that two matmuls quantize
    differently, one whose matmul takes it as it is; then one that two matmuls quantize alike."""
    formats = {element: QuantFormat(8, None, "none", "float32", element=element) for element in ("int", "e4m3")}

    def function(v):
        def norm(name):
            return scope(name, lambda: rms_norm(v["x"], v["w"], eps=1e-6))

        def matmul(x, activation, *scale):
            element = "e4m3" if activation == "e4m3" else "int"
            return quantized_matmul(
                x,
                v[f"{element}/codes"],
                v["scale"],
                *scale,
                format=formats[element],
                shape=(8, 16),
                activation=activation,
            )

        read, output, static, apart, plain, alike = (
            norm(name) for name in ("read", "output", "static", "apart", "plain", "alike")
        )
        return {
            "read": matmul(read, "int8") + jnp.sin(read)[:, :8],
            "output": output, "product": matmul(output, "int8"),
            "static": matmul(static, "int8-static", v["x_scale"]),
            "apart": matmul(apart, "int8") + matmul(apart, "e4m3"),
            "plain": matmul(plain, None),
            "alike": matmul(alike, "e4m3") * matmul(alike, "e4m3"),
        }  # fmt: skip

    codes = {"int/codes": spec((8, 16), "int8"), "e4m3/codes": spec((8, 16), "float8_e4m3fn")}
    graph = make_graph(function, {"w": (16,), "scale": (8, 1), "x_scale": ()}, {**codes, **X})
    inputs = [dataclasses.replace(entry, kind="param") if entry.path in codes else entry for entry in graph.inputs]
    return dataclasses.replace(graph, inputs=tuple(inputs))


def products_that_are_not_gated_activations() -> Graph:
    """Halves in the other order, of two arrays, of unequal parts, with a bias; an activation that is also an output;
    another activation. And a product that is read in two dtypes: it is one, but the rounding stays outside."""

    def function(v):
        part = lambda x, first, last: jax.lax.slice_in_dim(x, first, last, axis=1)  # noqa: E731
        x, y = v["x"], v["y"]
        gate, factor = part(x, 0, 8), part(x, 8, 16)
        silu = scope("read_alone", lambda: jax.nn.silu(part(y, 0, 8)))
        read = scope("two_dtypes", lambda: jax.nn.silu(part(x, 0, 8)) * part(x, 8, 16))
        return {
            "swapped": scope("swapped", lambda: jax.nn.silu(factor) * gate),
            "two": scope("two_arrays", lambda: jax.nn.silu(gate) * part(y, 8, 16)),
            "unequal": scope("unequal", lambda: jax.nn.silu(part(x, 0, 4)) * part(x, 12, 16)),
            "bias": scope("bias", lambda: jax.nn.silu(gate + v["bias"]) * factor),
            "silu": silu, "alone": scope("read_alone", lambda: silu * part(y, 8, 16)),
            "relu": scope("relu", lambda: jax.nn.relu(gate) * factor),
            "read": read, "rounded": read.astype(jnp.bfloat16),
        }  # fmt: skip

    return make_graph(function, {"bias": (8,)}, {**X, "y": (4, 16)})


def attention_by_other_positions() -> Graph:
    """The cache goes by the step's own positions and segments; another attention may not silently use it."""

    def function(v):
        q = v["x"].reshape(4, 2, 8)
        shifted = scope("shifted", lambda: attention(q, q, q, v["positions"] * 2, v["segments"], scale=0.5))
        global_ = scope("together", lambda: attention(q, q, q, v["positions"], v["segments"] * 0, scale=0.5))
        return shifted + global_ + attend(v, v["x"], v["x"], v["x"])

    return make_graph(function, {}, STEP)


MIXED = "quantize-matmul{rules='q_proj=w4a16:g32;mlp=w4a16:g32;k_proj=w8a16:g32;o_proj=fp8;emb=w8a16;.*=w8a8:static'}"
FOLD = "fold-scales{method=awq,scheme=w4a16}"
FOLD_ALL = "fold-scales{targets=kernel}"
NARROW = f"{FUSED},narrow-matmul"
INT8_NORMS = f"{FUSED},quantize-matmul{{rules='layers=w8a8'}},narrow-matmul,stack-layers,fuse-norm"
two_layers = model(layers=2, heads=4, kv_heads=2, head_dim=8, width=32)


CASES: list[tuple[str, str, str, Callable[[], Graph]]] = [
    ("canonicalize_flax_dense", "canonicalize", "canonicalize", flax_dense),
    ("canonicalize_transposes", "canonicalize", "canonicalize", written_with_transposes),
    ("canonicalize_negative", "canonicalize", "canonicalize", weights_with_two_readers),
    ("lower_dense_matmul_f32", "lower-dense-matmul", "lower-dense-matmul", model()),
    ("lower_dense_matmul_bf16", "lower-dense-matmul", "lower-dense-matmul", model(activations="bf16", tied=True)),
    ("lower_dense_matmul_negative", "lower-dense-matmul", "lower-dense-matmul", dots_that_are_not_linear_layers),
    ("prune_wanda", "prune", f"{DENSE},prune", model()),
    ("prune_magnitude", "prune", f"{DENSE},prune{{method=magnitude,pattern=2:4,targets=mlp}}", model(tied=True)),
    ("prune_negative", "prune", "prune{method=magnitude,pattern=2:4,targets=kernel}", odd_readers),
    ("fold_scales_before", "lower-dense-matmul", DENSE, two_layers),
    ("fold_scales", "fold-scales", f"{DENSE},{FOLD}", two_layers),
    ("fold_scales_residual_negative", "fold-scales", FOLD_ALL, scale_cases.norm_with_other_readers),
    ("fold_scales_tied_negative", "fold-scales", FOLD_ALL, scale_cases.shared_parameters),
    ("fold_scales_unequal_groups_negative", "fold-scales", FOLD_ALL, scale_cases.unequal_groups),
    ("fold_scales_no_absorber_negative", "fold-scales", FOLD_ALL, scale_cases.no_absorber),
    ("fold_scales_quantized_negative", "fold-scales", FOLD_ALL, scale_cases.quantized_already),
    ("smooth_attention", "smooth-attention", f"{DENSE},smooth-attention", two_layers),
    ("smooth_attention_norms", "smooth-attention", f"{DENSE},smooth-attention", model(qkv_bias=True, qk_norm=True)),
    ("smooth_attention_negative", "smooth-attention", "smooth-attention", scale_cases.attentions_that_share),
    ("smooth_attention_unequal_groups_negative", "smooth-attention", "smooth-attention", scale_cases.unequal_groups),
    ("fuse_qkv_bias_norm", "fuse-qkv", f"{DENSE},fuse-qkv", model(qkv_bias=True, qk_norm=True)),
    ("fuse_qkv_shared", "fuse-qkv", "fuse-qkv", layers_that_share_projections),
    ("fuse_qkv_negative", "fuse-qkv", "fuse-qkv", projections_that_do_not_stack),
    ("fuse_gate_up_bias", "fuse-gate-up", f"{DENSE},fuse-gate-up", model(mlp_bias=True, activation="gelu")),
    ("fuse_gate_up_negative", "fuse-gate-up", "fuse-gate-up", products_that_are_not_gated_mlps),
    ("quantize_matmul", "quantize-matmul", f"{DENSE},{QUANTIZE}", quantizable),
    ("quantize_matmul_activations", "quantize-matmul", f"{DENSE},{ACTIVATIONS}", quantizable),
    ("quantize_matmul_gptq_before", "fuse-gate-up", FUSED, model(layers=2, width=64, mlp=64)),
    ("quantize_matmul_gptq", "quantize-matmul", f"{FUSED},{CALIBRATED}", model(layers=2, width=64, mlp=64)),
    ("quantize_matmul_negative", "quantize-matmul", ODD_RULES, odd_readers),
    ("quantize_matmul_undone", "quantize-matmul", "canonicalize,quantize-matmul{rules='.*=w8a16'}", model()),
    ("narrow_matmul", "narrow-matmul", f"{DENSE},quantize-matmul{{rules='mlp=w8a16'}},narrow-matmul", narrowable),
    ("narrow_matmul_logit", "narrow-matmul", f"{DENSE},quantize-matmul{{rules='emb=w8a16'}},narrow-matmul", narrowable),
    ("narrow_matmul_negative", "narrow-matmul", "narrow-matmul", odd_readers),
    ("choose_layout", "choose-layout", f"{DENSE},{MIXED},choose-layout", model(tied=True)),
    ("choose_layout_negative", "choose-layout", "choose-layout", layers_that_do_not_stack),
    ("stack_layers", "stack-layers", STACKED, model(layers=3, width=64, mlp=64, qkv_bias=True)),
    ("stack_layers_negative", "stack-layers", "stack-layers", layers_that_do_not_stack),
    ("fuse_norm", "fuse-norm", f"{NARROW},stack-layers,fuse-norm", model(layers=2, qk_norm=True)),
    ("fuse_norm_gemma", "fuse-norm", "stack-layers,fuse-norm", gemma_norms),
    ("fuse_norm_negative", "fuse-norm", "fuse-norm", norms_that_share),
    ("quantize_norm", "quantize-norm", f"{INT8_NORMS},quantize-norm", model(layers=2)),
    ("quantize_norm_negative", "quantize-norm", "quantize-norm", norms_that_stay_in_floats),
    ("fuse_epilogue", "fuse-epilogue", f"{NARROW},fuse-epilogue", model()),
    ("fuse_epilogue_gelu", "fuse-epilogue", f"{FUSED},fuse-epilogue", model(activation="gelu_pytorch_tanh")),
    ("fuse_epilogue_negative", "fuse-epilogue", "fuse-epilogue", products_that_are_not_gated_activations),
    ("fuse_rope", "fuse-rope", f"{FUSED},fuse-rope", model()),
    ("fuse_rope_bias", "fuse-rope", f"{FUSED},stack-layers,fuse-rope", model(layers=2, qkv_bias=True)),
    ("fuse_rope_qkv_norm_negative", "fuse-rope", f"{FUSED},fuse-rope", model(qk_norm=True)),
    ("fuse_rope_negative", "fuse-rope", "fuse-rope", rope_cases.parts_that_are_not_turned_together),
    ("insert_paged_kv_window", "insert-paged-kv", "insert-paged-kv{page=4,kv=f32}", model(windows=(3,))),
    ("insert_paged_kv_bf16", "insert-paged-kv", "insert-paged-kv", model(activations="bf16", layers=2)),
    ("insert_paged_kv_int4", "insert-paged-kv", "insert-paged-kv{page=4,kv=int4}", model()),
    ("insert_paged_kv_fp8", "insert-paged-kv", "insert-paged-kv{page=4,kv=fp8}", model(activations="bf16")),
    ("insert_paged_kv_negative", "insert-paged-kv", "insert-paged-kv{page=4}", attention_by_other_positions),
    ("insert_paged_kv_no_attention", "insert-paged-kv", "insert-paged-kv{page=4}", flax_dense),
]  # fmt: skip


@pytest.mark.parametrize(("name", "step", "text", "build"), CASES, ids=[case[0] for case in CASES])
def test_golden(name, step, text, build):
    result = pipeline(build(), text, numbers=False)
    check_golden(name, explained(result, step))


@pytest.mark.parametrize("build", [flax_dense, written_with_transposes, weights_with_two_readers])
def test_canonicalize_keeps_the_numbers_and_every_weight_can_be_lowered(build):
    graph = build()
    result = pipeline(graph, DENSE)
    assert_same_results(graph, result)
    if build is not weights_with_two_readers:
        assert "dot_general" not in [eqn.primitive.name for eqn in result.graph.eqns]


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("fuse-qkv", projections_that_do_not_stack),
        ("fuse-qkv", layers_that_share_projections),
        ("fuse-gate-up", products_that_are_not_gated_mlps),
        ("lower-dense-matmul", dots_that_are_not_linear_layers),
        ("fuse-norm", norms_that_share),
        ("stack-layers,fuse-norm", gemma_norms),
        ("fuse-epilogue", products_that_are_not_gated_activations),
        ("fuse-rope", rope_cases.parts_that_are_not_turned_together),
    ],
)
def test_partial_matches_keep_the_numbers(text, build):
    graph = build()
    assert_same_results(graph, pipeline(graph, text, numbers=False))


@pytest.mark.parametrize(
    ("before", "build"), [("canonicalize", norms_that_stay_in_floats), (INT8_NORMS, model(layers=2))]
)
def test_a_norm_in_codes_gives_the_same_bytes(before, build):
    """By the references: they define the numbers."""
    graph = pipeline(build(), before, numbers=False).graph
    result = pipeline(graph, "quantize-norm")
    assert result.stages[0].result.matches
    values = random_values(graph)
    expected = graph.call_references(values)
    for name, found in result.graph.call_references(values).items():
        np.testing.assert_array_equal(found, expected[name])


@pytest.mark.parametrize(("slip", "refused"), [(2.0**-20, False), (2.0**-5, True)])
def test_a_norm_in_codes_may_differ_in_the_last_bits_and_no_more(slip, refused, monkeypatch):
    """Some numbers then get the code beside theirs."""
    pass_module = importlib.import_module("jaxserve.passes.quantize_norm")
    real = pass_module.quantized_norm
    monkeypatch.setattr(pass_module, "quantized_norm", lambda x, w, **options: real(x, (1 + slip) * w, **options))
    before = pipeline(norms_that_stay_in_floats(), "canonicalize", numbers=False).graph
    with pytest.raises(VerifyError, match="alike moved by") if refused else contextlib.nullcontext():
        pipeline(before, "quantize-norm")


def test_goldens_and_cases_are_the_same_set():
    from tests.passes.helpers import GOLDEN

    assert {path.stem for path in GOLDEN.glob("*.txt")} == {case[0] for case in CASES}
