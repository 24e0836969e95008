"""Graphs with activations that scales can be folded into, and with every kind that they cannot; running such folds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels import QuantFormat, RopeSpec, attention, dense_matmul, quantized_matmul, rms_norm, rope
from jaxserve.passes import statistics
from jaxserve.passes.fold_scales import FoldScales
from jaxserve.passes.graph import Graph, Output
from jaxserve.passes.pipeline import Context, Pass, PassResult, run_pipeline
from jaxserve.passes.recipes import parse_spec
from jaxserve.passes.rewrite import Rewriter
from jaxserve.passes.smooth_attention import SmoothAttention
from jaxserve.passes.verify import NumberCheck, Verifier
from jaxserve.passes.weights import ValueSource, WeightPlan
from tests.passes.helpers import make_graph, random_values, run_graph, spec

ROPE = RopeSpec(8, 1e4)
INDEX = spec((4,), "int32")
X = {"x": (4, 16)}
STEP = {**X, "positions": INDEX, "segments": INDEX}
INT8 = QuantFormat(8, None, "none", "float32")


def scope(name, value):
    with jax.named_scope("model"), jax.named_scope(name):
        return value()


def norm(v, x, path="norm", **options):
    return scope(path, lambda: rms_norm(x, v[f"{path}/scale"], eps=1e-5, **options))


def linear(v, x, path):
    return scope(path, lambda: dense_matmul(x, v[f"{path}/kernel"]))


def quantized(v, x, path):
    arrays = (v[f"{path}/kernel/codes"], v[f"{path}/kernel/scale"])
    return scope(path, lambda: quantized_matmul(x, *arrays, format=INT8, shape=arrays[0].shape))


def kernels(outputs: int, inputs: int, *paths: str) -> dict[str, tuple[int, ...]]:
    return {f"{path}/kernel": (outputs, inputs) for path in paths}


def scales(*paths: str, size: int = 16) -> dict[str, tuple[int, ...]]:
    return {f"{path}/scale": (size,) for path in paths}


def heads(x, count):
    return x.reshape(4, count, -1)


def attend(v, q, k, w, **options):
    return scope("attn", lambda: attention(q, k, w, v["positions"], v["segments"], scale=0.5, **options))


# What a scale can pass, one small graph each; every one ends in a matmul called `out`.


def gemma_norm() -> Graph:
    """A norm that multiplies by 1 + w."""
    return make_graph(
        lambda v: linear(v, norm(v, v["x"], plus_one=True), "out"), scales("norm") | kernels(8, 16, "out"), X
    )


def half_precision() -> Graph:
    """A cast between the norm and its readers, which read it in different dtypes."""

    def function(v):
        y = norm(v, v["x"])
        return {"wide": linear(v, y.astype("bfloat16").astype("float32"), "wide"), "out": linear(v, y, "out")}

    return make_graph(function, scales("norm") | kernels(8, 16, "out", "wide"), X)


def relu_mlp() -> Graph:
    """max(x, 0) lets positive scales through; the bias before it is scaled, too."""

    def function(v):
        return linear(v, jax.nn.relu(linear(v, v["x"], "up") + v["up/bias"]), "out")

    return make_graph(function, kernels(32, 16, "up") | kernels(16, 32, "out") | {"up/bias": (32,)}, X)


def repeated_heads() -> Graph:
    """KV heads repeated before the attention, as some models write it; values are negated and divided."""

    def function(v):
        q, k, w = (heads(linear(v, v["x"], name), count) for name, count in zip("qkv", (4, 2, 2), strict=True))
        k, w = (jnp.broadcast_to(y[:, :, None], (4, 2, 2, 8)).reshape(4, 4, 8) for y in (k, w))
        mixed = attend(v, q, k, -w) / 3.0
        return linear(v, mixed.reshape(4, 32), "out")

    return make_graph(function, kernels(32, 16, "q") | kernels(16, 16, "k", "v") | kernels(16, 32, "out"), STEP)


def values_of_two_attentions() -> Graph:
    """Two attentions with groups of different sizes mix the same values; both outputs are scaled by KV head."""

    def function(v):
        x = v["x"]
        k, w = (heads(linear(v, x, name), 2) for name in "kv")
        small, large = (heads(linear(v, x, name), count) for name, count in (("q", 2), ("q2", 4)))
        first, second = attend(v, small, k, w), attend(v, large, k, w)
        return {"out": linear(v, first.reshape(4, 16), "out"), "big": linear(v, second.reshape(4, 32), "big")}

    shapes = kernels(16, 16, "q", "k", "v", "out") | kernels(32, 16, "q2") | kernels(16, 32, "big")
    return make_graph(function, shapes, STEP)


def stacked_halves() -> Graph:
    """One matmul gives gate and up; only the rows of up are scaled, and another reader of gate stays as it is."""

    def function(v):
        both = linear(v, v["x"], "both") + v["both/bias"]
        gate, up = both[:, :16], both[:, 16:]
        return {"out": linear(v, jax.nn.silu(gate) * up, "out"), "gate": jnp.tanh(gate)}

    return make_graph(function, kernels(32, 16, "both") | kernels(8, 16, "out") | {"both/bias": (32,)}, X)


PASSABLE = (
    gemma_norm, half_precision, relu_mlp, repeated_heads, values_of_two_attentions, stacked_halves
)  # fmt: skip


# What it cannot.


def norm_with_other_readers() -> Graph:
    """The result of a norm also feeds a residual, a nonlinearity, an output, another norm, a sort along tokens."""

    def function(v):
        x, results = v["x"], {}
        y = norm(v, x, "residual_norm")
        results["residual"] = scope("block", lambda: y + dense_matmul(y, v["residual/kernel"]))
        y = norm(v, x, "gated_norm")
        results["gated"] = linear(v, y, "gated") * scope("gate", lambda: jax.nn.sigmoid(y))
        y = results["activation"] = norm(v, x, "output_norm")
        results["output"] = linear(v, y, "output")
        y = norm(v, x, "twice_norm")
        results["twice"] = linear(v, norm(v, y, "inner_norm"), "inner") + linear(v, y, "twice")
        y = norm(v, x, "square_norm")
        results["square"] = linear(v, scope("square_norm", lambda: y * y), "square")
        y = norm(v, x, "tokens_norm")
        results["tokens"] = linear(v, y, "tokens").sum() + linear(v, y.reshape(8, 8), "mixed").sum()
        return results

    names = ("residual", "gated", "output", "twice", "square", "tokens")
    shapes = kernels(16, 16, *names, "inner") | kernels(8, 8, "mixed")
    return make_graph(function, scales("inner_norm", *(f"{name}_norm" for name in names)) | shapes, X)


def shared_parameters() -> Graph:
    """Weights, norm scales and biases that something else reads, too."""

    def function(v):
        x, results = v["x"], {}
        tied = scope("rows", lambda: v["tied/kernel"].at[v["ids"]].get(mode="clip"))
        results["tied"] = linear(v, norm(v, x, "tied_norm"), "tied") + tied
        results["both"] = linear(v, norm(v, x, "both"), "first") + linear(v, norm(v, 2 * x, "both"), "second")
        up = linear(v, x, "up") + v["bias"]
        results["bias"] = linear(v, up, "down") + linear(v, x, "free") + v["bias"]
        once = linear(v, x, "once")
        results["value"] = linear(v, once, "value") + linear(v, x, "once")
        results["out"] = v["out/kernel"]
        results["head"] = linear(v, norm(v, x, "out_norm"), "out")
        return results

    names = ("tied", "first", "second", "up", "down", "free", "once", "value", "out")
    shapes = scales("tied_norm", "both", "out_norm") | kernels(16, 16, *names) | {"bias": (16,)}
    return make_graph(function, shapes, {**X, "ids": INDEX})


def no_absorber() -> Graph:
    """Activations that come straight from an input, a residual sum, a nonlinearity, a computed weight; a plain dot."""
    last = (((1,), (1,)), ((), ()))

    def function(v):
        x, results = v["x"], {}
        results["input"] = linear(v, x, "input")
        results["sum"] = linear(v, scope("stream", lambda: norm(v, x) + x), "sum")
        results["act"] = linear(v, scope("act", lambda: jnp.tanh(linear(v, x, "up"))), "down")
        made = scope("made", lambda: dense_matmul(x, v["a/kernel"] * 2))
        results["made"] = linear(v, made, "after")
        results["ratio"] = linear(v, scope("ratio", lambda: x / (1.0 + linear(v, x, "under"))), "over")
        results["plain"] = scope("plain", lambda: jax.lax.dot_general(norm(v, x, "n2"), v["plain/kernel"], last))
        return results

    names = ("input", "sum", "up", "down", "a", "after", "under", "over", "plain")
    return make_graph(function, scales("norm", "n2") | kernels(16, 16, *names), X)


def quantized_already() -> Graph:
    """A reader that is quantized beside one that is not, and a matmul that is quantized before one that is not."""

    def function(v):
        y = norm(v, v["x"])
        return {
            "beside": linear(v, y, "q") + quantized(v, y, "k"),
            "after": linear(v, quantized(v, v["x"], "up"), "down"),
        }

    shapes = scales("norm") | kernels(16, 16, "q", "down")
    arrays = {f"{name}/kernel/codes": spec((16, 16), "int8") for name in ("k", "up")}
    arrays |= {f"{name}/kernel/scale": spec((16, 1)) for name in ("k", "up")}
    graph = make_graph(function, shapes, {**X, **arrays})
    return _as_params(graph, arrays)


def _as_params(graph: Graph, paths) -> Graph:
    """The graph with some of its arguments as parameters."""
    inputs = tuple(dataclasses.replace(entry, kind="param") if entry.path in paths else entry for entry in graph.inputs)
    return dataclasses.replace(graph, inputs=inputs)


def unequal_groups() -> Graph:
    """Three query heads read the first KV head and one the second: written with a gather, which no scale passes."""

    def function(v):
        q, k, w = (heads(linear(v, v["x"], name), count) for name, count in zip("qkv", (4, 2, 2), strict=True))
        k, w = (scope("groups", lambda y=y: y.at[:, v["groups"]].get(mode="clip")) for y in (k, w))
        return linear(v, attend(v, q, k, w).reshape(4, 32), "out")

    shapes = kernels(32, 16, "q") | kernels(16, 16, "k", "v") | kernels(16, 32, "out")
    return make_graph(function, shapes, {**STEP, "groups": INDEX})


def attentions_that_share() -> Graph:
    """Keys that two attentions read; keys that are values, too; keys without a rotary embedding but with a tanh;
    queries that are the keys."""

    def function(v):
        x = v["x"]
        q, k, w, other, last = (heads(linear(v, x, name), 2) for name in ("q", "k", "v", "q2", "k2"))
        turned = rope(k, v["positions"], spec=ROPE)
        return {
            "first": attend(v, q, turned, w),
            "second": attend(v, other, turned, w),
            "values": attend(v, q, last, last),
            "act": attend(v, other, jnp.tanh(last), w),
            "same": attend(v, w, w, other),
            "input": attend(v, heads(x, 2), other, w),
        }

    return make_graph(function, kernels(16, 16, "q", "k", "v", "q2", "k2"), STEP)


# Running folds.


def fold(graph: Graph, values: dict, text: str, numbers: bool = True) -> tuple[Graph, dict, list[PassResult]]:
    """The graph and parameters after every pass of a pipeline, with the statistics of the values' own activations."""
    results = []
    for step in parse_spec(text):
        result, values = _apply(graph, values, step, numbers)
        graph = result.graph
        results.append(result)
    return graph, values, results


def _apply(graph: Graph, values: dict, step: Pass, numbers: bool) -> tuple[PassResult, dict]:
    checks = [Verifier(NumberCheck() if numbers else None)]
    (stage,) = run_pipeline(graph, [step], Context(), checks).stages
    known = {**values, **measured(graph, stage.result, values)}
    after = WeightPlan(stage.result.edits).materialize(stage.result.graph, ValueSource(known))
    return stage.result, {**values, **dict(after)}


def measured(graph: Graph, result: PassResult, values: dict) -> dict[str, np.ndarray]:
    """The statistics that a pass asks for, on one run of the graph."""
    rewriter = Rewriter(graph)
    for statistic in result.statistics:
        rewriter.add_output(Output(statistic.path, spec(())), statistic.var)
    found = run_graph(rewriter.finish(), values)
    return {s.path: statistics.compute(s.kind, found[s.path]) for s in result.statistics}


def assert_same_numbers(graph: Graph, text: str, tolerance: float = 1e-4, numbers: bool = True, seed: int = 0):
    """The folded graph gives what the graph gave, with every parameter that a fold wrote changed; gives the results."""
    values = random_values(graph, seed)
    after, folded, results = graph, values, list[PassResult]()
    for step in parse_spec(text):
        before = folded
        result, folded = _apply(after, before, step, numbers)
        after = result.graph
        results.append(result)
        if isinstance(step, FoldScales | SmoothAttention):
            written = {path for edit in result.edits for path in edit.writes}
            assert written and all(not np.allclose(folded[path], before[path], rtol=1e-3) for path in written)
    want, have = run_graph(graph, values), run_graph(after, folded)
    for name in want:
        np.testing.assert_allclose(have[name], want[name], rtol=tolerance, atol=tolerance * np.abs(want[name]).max())
    return results
