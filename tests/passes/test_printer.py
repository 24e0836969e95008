"""The printed form is stable and complete."""

import enum
import re

import jax
import jax.numpy as jnp
import pytest

from jaxserve.passes.graph import Graph, Input, Output, Stored
from jaxserve.passes.printer import print_graph, short
from jaxserve.passes.recipes import RECIPES
from tests.passes.helpers import make_graph, pipeline, spec, trace_tiny


def test_two_traces_give_the_same_text():
    first = print_graph(trace_tiny(qk_norm=True, qkv_bias=True))
    print_graph(trace_tiny(layers=2))  # nothing carries over from one print to the next
    assert print_graph(trace_tiny(qk_norm=True, qkv_bias=True)) == first
    assert first != print_graph(trace_tiny())


def test_two_pipelines_give_the_same_text():
    text = RECIPES["w4a16"].spec(page=4)
    prints = [[print_graph(s.result.graph) for s in pipeline(trace_tiny(), text, numbers=False).stages] for _ in "ab"]
    assert prints[0] == prints[1]


def test_no_addresses():
    graph = make_graph(lambda v: jax.lax.while_loop(lambda x: x[0] < 1, lambda x: x + 1.0, v["x"]), {}, {"x": (3,)})
    assert not re.search("0x[0-9a-f]{4}", print_graph(graph) + print_graph(trace_tiny()))


def test_a_graph_in_full():
    def function(v):
        with jax.named_scope("model"), jax.named_scope("block"):
            values, _ = jax.lax.top_k(v["x"], 2)
            return {"y": values * 2.0, "cache": v["cache"] + 1.0}

    graph = make_graph(function, {}, {"x": spec((3, 4), "bfloat16"), "cache": spec((2,))})
    inputs = (Input("x", "arg", spec((3, 4), "bfloat16"), "T D"), Input("cache", "cache", spec((2,))))
    outputs = (graph.outputs[0], Output("cache", spec((2,)), replaces="cache"))
    assert print_graph(Graph(inputs, outputs, graph.jaxpr)) == (
        "graph {\n"
        "  arg @x: bf16[3,4]  # T D\n"
        "  cache @cache: f32[2]\n"
        "\n"
        "  # block\n"
        "  %0: bf16[3,2], %1: i32[3,2] = top_k(@x) {axis=1, is_stable=True, k=2}\n"
        "  %2: bf16[3,2] = mul(%0, 2.0:bf16[])\n"
        "  %3: f32[2] = add(@cache, 1.0:f32[])\n"
        "\n"
        "  return y = %2: bf16[3,2]\n"
        "  return cache = %3: f32[2] replaces @cache\n"
        "}\n"
    )


def test_parameters_are_sorted():
    lines = [line for line in print_graph(trace_tiny()).splitlines() if " = " in line and "{" in line]
    assert len(lines) > 20
    for line in lines:
        found = re.search(r"\{(.*)\}$", line)
        assert found
        keys = re.findall(r"(?:^|, )(\w+)=", re.sub(r"\w+\([^()]*(\([^()]*\)[^()]*)*\)", "X", found[1]))
        assert keys == sorted(keys) and keys


def test_bodies_are_printed_with_their_own_names():
    graph = make_graph(lambda v: jax.lax.while_loop(lambda x: x[0] < 1, lambda x: x + 1.0, v["x"]), {}, {"x": (3,)})
    text = print_graph(graph)
    assert "body_jaxpr(^0: f32[3]):" in text and "cond_jaxpr(^0: f32[3]):" in text
    assert re.search(r"%0: f32\[3\] = add\(\^0, 1\.0:f32\[\]\)\n +yield %0", text)


def test_stored_forms_are_shown():
    from jaxserve.pallas_kernels import QuantFormat

    stored = Input("w", "param", spec((4, 32)), "O I", Stored(QuantFormat(4, 32, "minimum", "float16")))
    graph = make_graph(lambda v: v["w"] + 1.0, {"w": (4, 32)}, {})
    assert "param @w: f32[4,32] stored(int4 g32 minimum f16)  # O I" in print_graph(
        Graph((stored,), graph.outputs, graph.jaxpr)
    )


@pytest.mark.parametrize(
    ("aval", "text"),
    [
        (spec((8, 576)), "f32[8,576]"),
        (spec((), "bfloat16"), "bf16[]"),
        (spec((2,), "uint8"), "u8[2]"),
        (spec((2,), "int32"), "i32[2]"),
        (spec((2,), "bool"), "bool[2]"),
        (spec((2,), jnp.float8_e4m3fn), "float8_e4m3fn[2]"),
        ("token", "token"),
    ],
    ids=str,
)
def test_short(aval, text):
    assert short(aval) == text


def test_values_of_parameters_do_not_depend_on_hashing():
    from jaxserve.passes.printer import _value

    class Mode(enum.Enum):
        CLIP = 1

    assert _value(frozenset({"b", "a", "c"})) == "{a, b, c}"
    assert _value(Mode.CLIP) == "CLIP"
    assert _value("a\n  b at 0x7f00") == "a b"
