"""Graphs cut into layers by dataflow: one after another they compute what the whole computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve._compat import Var, spec_of, vars_of
from jaxserve.passes.graph import Graph
from jaxserve.passes.segments import Segments, layer_of
from tests.passes.helpers import make_graph, pipeline, random_values, run_graph, spec, trace_tiny


def run_by_segments(graph: Graph, values: dict) -> list[np.ndarray]:
    """The graph's outputs, computed segment after segment, keeping only what later segments read."""
    segments = Segments(graph)
    outputs = vars_of(graph.jaxpr.outvars)
    needed, parts = set(outputs), []
    for number in reversed(range(segments.count)):
        part = segments.part(number, [var for var in segments.results(number) if var in needed])
        parts.append(part)
        needed |= set(part.operands)
    known = {graph.var(entry.path): jnp.asarray(values[entry.path]) for entry in graph.inputs}
    params = {entry.path for entry in graph.of_kind("param")}
    for part in parts[::-1]:
        results = part([jnp.asarray(values[path]) for path in part.params], [known[var] for var in part.operands])
        known.update(zip(part.results, results, strict=True))
        assert set(part.params) <= params
    return [np.asarray(known[var]) for var in outputs]


FUSED = "canonicalize,lower-dense-matmul,fuse-qkv,fuse-gate-up"


@pytest.mark.parametrize("text", ["canonicalize", FUSED])
def test_segments_compute_what_the_graph_computes(text):
    graph = pipeline(trace_tiny(layers=3, windows=(None, 4, None)), text, numbers=False).graph
    assert Segments(graph).count == 4
    values = random_values(graph)
    values["positions"], values["segments"] = np.arange(8, dtype=np.int32), np.zeros(8, np.int32)
    (found,) = run_by_segments(graph, values)
    np.testing.assert_allclose(found, run_graph(graph, values)["logits"], rtol=1e-5, atol=1e-5)


def test_each_layer_reads_its_own_parameters_and_one_value():
    graph = pipeline(trace_tiny(layers=3), FUSED, numbers=False).graph
    segments = Segments(graph)
    outs = vars_of(graph.jaxpr.outvars)
    for number in (3, 2, 1):
        part = segments.part(number, outs)
        layers = {layer_of(path) for path in part.params}
        assert layers == ({number - 1, None} if number == 3 else {number - 1})
        handed = [var for var in part.operands if graph.input_of(var) is None]
        assert [spec_of(var).shape for var in handed] == [(8, 16)]
        outs = handed
    first = segments.part(0, outs)
    assert first.params == ("embed_tokens/embedding",) and [spec_of(var).shape for var in first.operands] == [(8,)]


def layer_texts(graph: Graph) -> list[str]:
    segments = Segments(graph)
    outs, texts = vars_of(graph.jaxpr.outvars), []
    for number in reversed(range(segments.count)):
        part = segments.part(number, outs)
        texts.append(part.text)
        outs = [var for var in part.operands if graph.input_of(var) is None]
    return texts[::-1]


def test_equal_layers_have_equal_texts():
    text = FUSED + ",quantize-matmul{rules='layers_3/=w8a16;layers_=w4a16:g32'}"
    _, one, two, three, four, last = layer_texts(pipeline(trace_tiny(layers=5), text, numbers=False).graph)
    assert one == two == three
    assert len({one, four, last}) == 3  # another format; the head
    windows = layer_texts(pipeline(trace_tiny(layers=4, windows=(4, None, 4, None)), FUSED, numbers=False).graph)
    assert windows[1] == windows[3] != windows[2]


def test_only_what_is_wanted_is_computed():
    graph = pipeline(trace_tiny(layers=1), FUSED, numbers=False).graph
    segments = Segments(graph)
    (head,) = [eqn for eqn in graph.eqns if graph.users(graph.var("lm_head/kernel")) == [eqn]]
    (activation,) = [var for var in vars_of(head.invars) if graph.param_of(var) is None]
    part = segments.part(1, [activation])
    assert "norm/scale" in part.params and "lm_head/kernel" not in part.params
    assert part.results == (activation,)


def test_what_reads_no_data_or_no_parameter_goes_with_its_first_reader():
    def model(v):
        table = v["embed"].T  # only a parameter: with the lookup
        mask = (v["ids"] > 0).astype(jnp.float32)[:, None]  # no parameter: with layer 1, the first that reads it
        ones = jnp.ones((2, 3))  # neither: with layer 0
        x = table[v["ids"]]
        x = x * v["layers_0/w"] + ones
        x = x * v["layers_1/w"] * mask
        return x @ v["head"].T * mask

    shapes = {"embed": (3, 5), "layers_0/w": (3,), "layers_1/w": (3,), "head": (5, 3)}
    graph = make_graph(model, shapes, {"ids": spec((2,), "int32")})
    segments = Segments(graph)
    found = {}
    for eqn in graph.eqns:
        found.setdefault(eqn.primitive.name, set()).add(segments.of(eqn.outvars[0]))
    assert segments.count == 3
    assert found["gt"] == {2} and found["gather"] == {0} and found["dot_general"] == {2}
    assert {segments.of(eqn.outvars[0]) for eqn in graph.users(graph.var("embed"))} == {0}
    assert {segments.of(eqn.outvars[0]) for eqn in graph.users(graph.var("head"))} == {2}
    values = {**random_values(graph), "ids": np.array([1, 4], np.int32)}
    np.testing.assert_allclose(run_by_segments(graph, values)[0], run_graph(graph, values)["out"], rtol=1e-5)


def test_first_readers_and_foreign_variables():
    graph = trace_tiny(layers=2, tied=True)
    segments = Segments(graph)
    assert segments.first_reader("embed_tokens/embedding") == 0
    assert segments.first_reader("layers_1/mlp/up_proj/kernel") == 2
    assert segments.first_reader("norm/scale") == 2
    assert segments.of(graph.var("tokens")) is None
    assert segments.of(trace_tiny().eqns[0].outvars[0]) is None


@pytest.mark.parametrize(
    ("path", "layer"),
    [("layers_12/mlp/up_proj/kernel", 12), ("model/layers_0/w", 0), ("players_3/w", None), ("norm/scale", None)],
)
def test_layers_by_path(path, layer):
    assert layer_of(path) == layer


def test_a_part_may_hand_an_operand_through():
    graph = make_graph(lambda v: v["x"] * v["layers_0/w"], {"layers_0/w": (3,)}, {"x": (2, 3)})
    x: Var = graph.var("x")
    part = Segments(graph).part(1, [x])
    (out,) = jax.jit(lambda value: part([], [value]))(jnp.ones((2, 3)))
    assert part.params == () and out.shape == (2, 3)
