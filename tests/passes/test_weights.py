"""Weight plans: lazily, in order, each edit once, no more values alive than one layer needs."""

import weakref

import numpy as np
import pytest

from jaxserve.pallas_kernels import QuantFormat, QuantizedTensor, quantize_rtn
from jaxserve.passes.fuse_projections import stack
from jaxserve.passes.weights import ValueSource, WeightEdit, WeightPlan
from tests.passes.helpers import make_graph, pipeline, random_values, trace_tiny


def graph_of(**params):
    """A graph that has just these parameters."""
    return make_graph(lambda v: {path: v[path] + 0.0 for path in params}, params, {})


class CountingSource:
    """Random float parameters by path; counts reads and how many of the arrays it gave are alive."""

    def __init__(self, **shapes):
        self.shapes = shapes
        self.reads: list[str] = []
        self.alive: list[weakref.ref] = []
        self.peak = 0

    def value(self, path):
        return np.random.default_rng(sorted(self.shapes).index(path)).normal(size=self.shapes[path]).astype("float32")

    def read_native(self, path):
        self.reads.append(path)
        value = self.value(path)
        self.alive = [ref for ref in self.alive if ref() is not None] + [weakref.ref(value)]
        self.peak = max(self.peak, len(self.alive))
        return value


def transpose(path):
    return WeightEdit((path,), (path,), lambda w: (np.ascontiguousarray(w.T),))


def test_without_edits_parameters_are_read_once_in_order():
    source = CountingSource(b=(2,), a=(3,))
    pairs = WeightPlan([]).materialize(graph_of(b=(2,), a=(3,)), source)
    assert source.reads == []  # nothing is read before it is asked for
    path, value = next(pairs)
    assert path == "b" and source.reads == ["b"]
    np.testing.assert_array_equal(value, source.value("b"))
    assert [path for path, _ in pairs] == ["a"] and source.reads == ["b", "a"]


def test_edits_on_edits():
    """Transposed, stacked, then quantized: each original is read once."""
    form = QuantFormat(8, None, "none", "float32")

    def quantize(value):
        tensor = quantize_rtn(value, form)
        return tuple(tensor.arrays[field] for field in form.fields)

    quantized = WeightEdit(("qk",), ("qk/codes", "qk/scale"), quantize)
    plan = WeightPlan([transpose("q"), WeightEdit(("q", "k"), ("qk",), stack), quantized])
    source = CountingSource(q=(8, 4), k=(6, 8))
    graph = make_graph(lambda v: v["qk/codes"] * v["qk/scale"], {"qk/codes": (10, 8), "qk/scale": (10, 1)}, {})
    values = dict(plan.materialize(graph, source))
    expected = quantize_rtn(np.concatenate([source.value("q").T, source.value("k")]), form)
    for field in form.fields:
        np.testing.assert_array_equal(values[f"qk/{field}"], expected.arrays[field])
    assert sorted(source.reads) == ["k", "q"]
    assert plan.originals("qk/scale") == ("q", "k")
    assert plan.originals("other") == ("other",)


def test_an_edit_may_read_what_it_replaces_and_a_later_one_reads_the_result():
    double = WeightEdit(("w",), ("w",), lambda w: (2 * w,))
    plus = WeightEdit(("w",), ("w",), lambda w: (w + 1,))
    source = CountingSource(w=(2,))
    for edits, expected in (([double, plus], 2 * source.value("w") + 1), ([plus, double], 2 * (source.value("w") + 1))):
        (pair,) = WeightPlan(edits).materialize(graph_of(w=(2,)), source)
        np.testing.assert_allclose(pair[1], expected)


def test_an_edit_with_several_results_runs_once():
    calls = []

    def split(w):
        calls.append(1)
        return w[:2], w[2:]

    plan = WeightPlan([WeightEdit(("w",), ("low", "high"), split)])
    source = CountingSource(w=(5,))
    values = dict(plan.materialize(graph_of(low=(2,), high=(3,)), source))
    np.testing.assert_array_equal(np.concatenate([values["low"], values["high"]]), source.value("w"))
    assert calls == [1] and source.reads == ["w"]


def test_a_shared_edit_runs_once_for_one_parameter_that_is_made_of_several_of_its_results():
    calls = []

    def fold(s, q, k):
        calls.append(1)
        return q * s, k * s

    plan = WeightPlan([WeightEdit(("s", "q", "k"), ("q", "k"), fold), WeightEdit(("q", "k"), ("qk",), stack)])
    source = CountingSource(s=(1, 4), q=(2, 4), k=(3, 4))
    (pair,) = plan.materialize(graph_of(qk=(5, 4)), source)
    expected = np.concatenate([source.value("q"), source.value("k")]) * source.value("s")
    np.testing.assert_allclose(pair[1], expected, rtol=1e-6)
    assert calls == [1] and sorted(source.reads) == ["k", "q", "s"]


def test_a_result_that_the_graph_does_not_want_is_dropped():
    plan = WeightPlan([WeightEdit(("w",), ("kept", "dropped"), lambda w: (w, w))])
    values = dict(plan.materialize(graph_of(kept=(3,)), CountingSource(w=(3,))))
    assert list(values) == ["kept"]


def test_few_values_are_alive_at_a_time():
    """Forty layers of three weights, transposed, stacked and quantized: one layer's worth at a time."""
    layers = range(40)
    shapes = {f"{layer}{name}": (4, 4) for layer in layers for name in "qkv"}
    edits = [transpose(path) for path in shapes]
    edits += [WeightEdit(tuple(f"{layer}{name}" for name in "qkv"), (f"{layer}qkv",), stack) for layer in layers]
    source = CountingSource(**shapes)
    count = 0
    for _, value in WeightPlan(edits).materialize(graph_of(**{f"{layer}qkv": (12, 4) for layer in layers}), source):
        del value
        count += 1
    assert count == 40 and len(source.reads) == 120
    assert source.peak <= 6


def test_wrong_shapes_and_counts():
    source = CountingSource(w=(2, 3))
    with pytest.raises(ValueError, match=r"w: the edits give shape \(3, 2\), the graph declares \(2, 3\)"):
        list(WeightPlan([transpose("w")]).materialize(graph_of(w=(2, 3)), source))
    two = WeightEdit(("w",), ("w", "v"), lambda w: (w,))
    with pytest.raises(ValueError, match="shorter"):
        list(WeightPlan([two]).materialize(graph_of(w=(2, 3)), source))


def test_values_take_the_declared_dtype_and_blocks_become_dense():
    tensor = quantize_rtn(
        np.linspace(-1, 1, 32, dtype="float32").reshape(2, 16), QuantFormat(8, None, "none", "float32")
    )
    graph = make_graph(lambda v: v["w"] + 0.0, {"w": (2, 16)}, {}, "bfloat16")
    ((_, value),) = WeightPlan([]).materialize(graph, ValueSource({"w": tensor}))
    assert value.dtype == graph.inputs[0].aval.dtype and value.flags.c_contiguous
    np.testing.assert_array_equal(value, tensor.dequantize().astype(value.dtype))


def test_stacking_keeps_blocks_of_one_format_and_dequantizes_others():
    eight, four = QuantFormat(8, 32, "none", "float16"), QuantFormat(4, 32, "minimum", "float16")
    weights = np.random.default_rng(0).normal(size=(2, 3, 64)).astype("float32")
    (same,) = stack(*(quantize_rtn(weight, eight) for weight in weights))
    assert isinstance(same, QuantizedTensor) and same.format == eight and same.shape == (6, 64)
    tensors = [quantize_rtn(weights[0], eight), quantize_rtn(weights[1], four)]
    (mixed,) = stack(*tensors)
    assert isinstance(mixed, np.ndarray)
    np.testing.assert_array_equal(mixed, np.concatenate([tensor.dequantize() for tensor in tensors]))


def test_originals_of_a_whole_pipeline():
    graph = trace_tiny()
    result = pipeline(
        graph, "canonicalize,lower-dense-matmul,fuse-qkv,quantize-matmul{rules='qkv=w8a16'}", numbers=False
    )
    plan = WeightPlan(result.edits)
    layer = "layers_0/self_attn"
    expected = tuple(f"{layer}/{name}_proj/kernel" for name in "qkv")
    assert plan.originals(f"{layer}/qkv_proj/kernel/codes") == expected
    values = random_values(graph)
    assert set(dict(plan.materialize(result.graph, ValueSource(values)))) == {
        e.path for e in result.graph.of_kind("param")
    }
