"""quantize-matmul: methods and what they look at, quantized activations, and what is said of each weight."""

import numpy as np
import pytest

from jaxserve._compat import spec_of
from jaxserve.lowering import trace_model
from jaxserve.pallas_kernels import QuantFormat, QuantizedTensor, dense_matmul, quantize_rtn
from jaxserve.passes import statistics
from jaxserve.passes.clip import quantize_clip
from jaxserve.passes.gptq import quantize_gptq
from jaxserve.passes.graph import Graph, Stored
from jaxserve.passes.pipeline import PipelineResult
from jaxserve.passes.rules import parse_scheme
from jaxserve.passes.weights import ValueSource, WeightPlan
from tests.pallas_kernels import oracles
from tests.passes.helpers import make_graph, pipeline, random_values, report_of, run_graph, tiny, trace_tiny

W = "layer/proj/kernel"
FOUR = QuantFormat(4, 32, "minimum", "float16")
SCHEMES = ["w8a16", "w4a16:g32", "w4a16:zero", "w3a16:g32:sym", "w8a8", "w8a8:static", "w4a8:g32", "w4a8:static", "fp8"]


def one_matmul(inputs: int = 64) -> Graph:
    return make_graph(lambda v: dense_matmul(v["x"], v[W]), {W: (24, inputs)}, {"x": (40, inputs)})


def two_readers() -> Graph:
    """A weight that two matmuls read."""

    def function(v):
        return dense_matmul(v["x"], v[W]) + dense_matmul(v["x"] * 2, v[W])

    return make_graph(function, {W: (24, 64)}, {"x": (40, 64)})


def quantize(graph: Graph, rules: str, options: str = "") -> PipelineResult:
    """Runs the pass with every check on, numbers included."""
    return pipeline(graph, f"quantize-matmul{{rules='{rules}'{options and ','}{options}}}")


def measured(result: PipelineResult, graph: Graph, values: dict) -> dict:
    """The statistics that a pipeline asks for, of activations that are inputs."""
    return {
        each.path: statistics.compute(
            each.kind, next(values[e.path] for e in graph.inputs if graph.var(e.path) is each.var)
        )
        for stage in result.stages
        for each in stage.result.statistics
    }


def final(result: PipelineResult, graph: Graph, values: dict) -> dict:
    """The parameters that a pipeline makes of `values`, calibrated on their activations."""
    source = ValueSource({**values, **measured(result, graph, values)})
    return dict(WeightPlan(result.edits).materialize(result.graph, source))


@pytest.mark.parametrize(
    ("options", "function", "kwargs"),
    [
        ("method=clip", quantize_clip, {}),
        ("method=gptq", quantize_gptq, {}),
        ("method=gptq,act-order=static", quantize_gptq, {"act_order": "static"}),
        ("method=gptq,ranges=minmax,damp=0.1", quantize_gptq, {"ranges": "minmax", "damp": 0.1}),
    ],
)
def test_methods_get_the_weight_and_the_gram_of_its_activation(options, function, kwargs):
    graph = one_matmul()
    values = random_values(graph)
    result = quantize(graph, "proj=w4a16:g32", options)
    (statistic,) = result.stages[0].result.statistics
    assert (statistic.path, statistic.kind, statistic.var) == (f"stats/gram/{W}", "gram", graph.var("x"))
    params = final(result, graph, values)
    gram = values["x"].T @ values["x"] / np.float32(40)
    want = function(values[W], FOUR, {"gram": gram}, **kwargs)
    for field, array in want.arrays.items():
        assert np.mean(params[f"{W}/{field}"] == array) > 0.98, field  # the gram's last bits may differ
    method = options.split(",")[0].removeprefix("method=")
    (line,) = report_of(result, "quantize-matmul")
    assert line.endswith(f"{W} [24, 64]: int4 g32 minimum f16 by {method}")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("method", ["rtn", "clip", "gptq"])
def test_every_scheme_by_every_method(scheme, method):
    """The region is checked by the verifier; then its results against the equation."""
    graph = one_matmul(96)
    values = random_values(graph)
    result = quantize(graph, f".*={scheme}", f"method={method}" if method != "rtn" else "")
    params, wanted = final(result, graph, values), parse_scheme(scheme)
    assert wanted.format is not None
    arrays = {field: params[f"{W}/{field}"] for field in wanted.format.fields}
    weight = QuantizedTensor(wanted.format, (24, 96), arrays).dequantize().astype(np.float64)
    x = values["x"].astype(np.float64)
    if wanted.activation:
        static = float(params[f"{W}/input_scale"]) if wanted.activation == "int8-static" else 0.0
        assert static == pytest.approx(np.abs(x).max() / 127 if static else 0.0)
        codes, scales = oracles.quantize_activation(x, wanted.activation.removesuffix("-static"), static)
        x = codes * scales
    (have,) = run_graph(result.graph, {**values, **params}).values()
    np.testing.assert_allclose(have, x @ weight.T, atol=1e-4, rtol=1e-4)


def test_groups_in_permuted_order():
    graph = trace_tiny(width=64, mlp=64)
    rules = "quantize-matmul{rules='up_proj=w4a16:g32;down_proj=w4a16:channel',method=gptq,act-order=permuted}"
    result = pipeline(graph, f"lower-dense-matmul,{rules}")
    entries = {entry.path.split("mlp/")[1]: entry for entry in result.graph.of_kind("param") if "/mlp/" in entry.path}
    order = entries["up_proj/kernel/order"]
    assert (order.aval.shape, order.aval.dtype, order.axes) == ((64,), np.int32, "D")
    assert "down_proj/kernel/order" not in entries  # one group has no order to keep
    lines = [line for line in report_of(result, "quantize-matmul") if "_proj: " in line]
    assert lines == [
        "layers_0/mlp/down_proj: layers_0/mlp/down_proj/kernel [64, 64]: int4 row minimum f32 by gptq",
        "layers_0/mlp/up_proj: layers_0/mlp/up_proj/kernel [64, 64]: int4 g32 minimum f16 ordered by gptq",
    ]


def test_a_weight_with_other_readers_is_rounded_to_nearest():
    graph = trace_tiny(tied=True)
    values = random_values(graph)
    result = pipeline(graph, "lower-dense-matmul,quantize-matmul{rules='embed=w8a16',method=gptq}", numbers=False)
    assert result.stages[1].result.statistics == ()
    found = dict(WeightPlan(result.edits).materialize(result.graph, ValueSource(values)))
    want = quantize_rtn(values["embed_tokens/embedding"], QuantFormat(8, None, "none", "float32"))
    np.testing.assert_array_equal(found["embed_tokens/embedding/codes"], want.arrays["codes"])
    said = "int8 row none f32 by rtn; 1 lookups and 1 matmuls read it, and gptq is for one matmul"
    assert [said in line for line in report_of(result, "quantize-matmul")][:2] == [True, True]

    result = quantize(two_readers(), ".*=w4a16", "method=clip")
    assert (
        "by rtn; 0 lookups and 2 matmuls read it, and clip is for one matmul" in report_of(result, "quantize-matmul")[0]
    )


def test_a_static_scale_is_for_one_matmul():
    result = quantize(two_readers(), ".*=w8a8:static")
    assert report_of(result, "quantize-matmul") == [
        f"{W}: no match, 2 matmuls read it; a static scale of activations is for one"
    ]
    assert result.edits == ()
    (tied,) = [
        line
        for line in report_of(
            pipeline(trace_tiny(tied=True), "lower-dense-matmul,quantize-matmul{rules='embed=w8a8:static'}"),
            "quantize-matmul",
        )
        if line.startswith("embed_tokens.attend")
    ]
    assert tied.endswith("int8 row none f32 by rtn, activations int8-static")


def test_activations_that_are_all_zero_have_a_scale_of_zero():
    graph = one_matmul()
    values = {**random_values(graph), "x": np.zeros((40, 64), np.float32)}
    result = quantize(graph, ".*=w8a8:static")
    params = final(result, graph, values)
    assert params[f"{W}/input_scale"].shape == () and params[f"{W}/input_scale"] == 0
    (have,) = run_graph(result.graph, {**values, **params}).values()
    np.testing.assert_array_equal(have, 0)


def test_what_is_stored_in_the_format_is_kept_and_needs_no_statistics():
    path = "layers_0/self_attn/o_proj/kernel"
    graph = trace_model(tiny(), 4, 2, {path: Stored(FOUR, "Q4_1")})
    step = "quantize-matmul{rules='o_proj=w4a16:g32;down=w4a16:g32',method=gptq}"
    result = pipeline(graph, f"lower-dense-matmul,{step}")
    assert [each.path for each in result.stages[1].result.statistics] == ["stats/gram/layers_0/mlp/down_proj/kernel"]
    lines = [line for line in report_of(result, "quantize-matmul") if "_proj: " in line]
    assert lines[0].endswith("int4 g32 minimum f16 by gptq")
    assert lines[1].endswith("Q4_1 kept exactly as int4 g32 minimum f16")


@pytest.mark.parametrize(("scheme", "rest"), [("w4a16:g64", 32), ("w4a16:g32", 0), ("w8a16", 0)])
def test_a_group_that_does_not_divide_the_width_is_said(scheme, rest):
    (line,) = report_of(quantize(one_matmul(96), f".*={scheme}"), "quantize-matmul")
    assert line.endswith(f"by rtn; the last group has {rest} inputs" if rest else "by rtn")


def test_narrow_matmul_leaves_quantized_activations_to_be_rounded_once():
    step = "quantize-matmul{rules='up_proj=w8a8;down_proj=w4a16:g32'},narrow-matmul"
    result = pipeline(trace_tiny(), f"lower-dense-matmul,{step}")
    told = report_of(result, "narrow-matmul")
    assert "layers_0/mlp/up_proj: no match, its activation becomes int8, from float32" in told
    dtypes = {
        eqn.params["activation"]: spec_of(eqn.invars[0]).dtype.name
        for eqn in result.graph.eqns
        if eqn.primitive.name == "jaxserve.quantized_matmul"
    }
    assert dtypes == {"int8": "float32", None: "bfloat16"}
