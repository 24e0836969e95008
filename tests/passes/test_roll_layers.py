"""roll-layers: loops that are found and what they compute, and graphs in which there is none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.passes.graph import Graph
from jaxserve.passes.loops import call_with_loops, find_loops
from jaxserve.passes.pipeline import Context, run_pipeline
from jaxserve.passes.recipes import parse_spec
from tests.passes.helpers import make_graph, names, pipeline, spec, trace_tiny

STACKED = "canonicalize,lower-dense-matmul,fuse-qkv,quantize-matmul{rules='.*=w8a16'},choose-layout,stack-layers"
PAGED = f"{STACKED},insert-paged-kv{{page=4,kv=%s}},roll-layers"


def paged(layers: int, kv: str = "f32", **changes) -> Graph:
    return pipeline(trace_tiny(layers=layers, **changes), PAGED % kv, numbers=False).graph


def values_of(graph: Graph) -> dict[str, jax.Array]:
    """Weights, and two sequences of four new tokens each on pages of their own."""
    rng = np.random.default_rng(0)
    arguments = {
        "tokens": np.arange(8), "positions": np.tile(np.arange(4), 2), "logit_rows": np.array([3, 7]),
        "kv_slots": np.concatenate([8 + np.arange(4), 20 + np.arange(4)]),
        "block_tables": np.array([[2, -1, -1, -1], [5, -1, -1, -1]]),
        "query_starts": np.array([0, 4, 8]), "context_lens": np.array([4, 4]),
    }  # fmt: skip

    def value(path: str, aval: jax.ShapeDtypeStruct) -> jax.Array:
        if path in arguments:
            return jnp.asarray(arguments[path], jnp.int32)
        if jnp.issubdtype(aval.dtype, jnp.floating):
            return jnp.asarray(rng.normal(size=aval.shape) / 50, aval.dtype)
        return jnp.asarray(rng.integers(0, 100, aval.shape), aval.dtype)

    return {entry.path: value(entry.path, entry.aval) for entry in graph.inputs}


def assert_same(graph: Graph) -> None:
    values = values_of(graph)
    want, have = jax.jit(graph.call)(values), jax.jit(lambda values: call_with_loops(graph, values))(values)
    assert list(have) == list(want)
    for name in want:
        np.testing.assert_allclose(
            np.asarray(have[name], np.float32), np.asarray(want[name], np.float32), rtol=1e-5, atol=1e-6, err_msg=name
        )


def test_biases_are_read_out_of_their_stacks_in_the_loop():
    text = f"{STACKED},fuse-rope,insert-paged-kv{{page=4,kv=f32}},roll-layers"
    graph = pipeline(trace_tiny(layers=6, qkv_bias=True), text, numbers=False).graph
    assert names(graph).count("jaxserve.rope_qkv") == 6
    (loop,) = find_loops(graph)
    assert loop.repeats == 6 and set(loop.steps.values()) == {1}
    assert_same(graph)


@pytest.mark.parametrize("kv", ["f32", "int8"])
def test_layers_become_a_loop(kv):
    graph = paged(6, kv)
    (loop,) = find_loops(graph)
    assert loop.repeats == 6
    arrays = 1 if kv == "f32" else 3
    assert len(loop.carried) == 1 + 2 * arrays  # the residual stream, and the caches
    assert set(loop.steps.values()) == {1}
    assert_same(graph)


def test_the_loop_computes_each_op_in_one_place():
    graph = paged(6)
    jaxpr = jax.make_jaxpr(lambda values: call_with_loops(graph, values))(values_of(graph))
    matmuls = names(graph).count("jaxserve.quantized_matmul")
    assert str(jaxpr).count("jaxserve.quantized_matmul") == (matmuls - 1) // 6 + 1  # and the one that gives the logits


def test_two_kinds_of_layers_in_turns():
    graph = paged(8, windows=(2, None) * 4)
    (loop,) = find_loops(graph)
    assert loop.repeats == 4
    assert set(loop.steps.values()) == {2}
    assert_same(graph)


def test_a_layer_of_another_kind_stays_outside():
    graph = paged(6, windows=(2, None, None, None, None, None))
    (loop,) = find_loops(graph)
    assert loop.repeats == 5
    assert_same(graph)


@pytest.mark.parametrize("layers", [1, 3])
def test_few_layers_are_no_loop(layers):
    graph = paged(layers)
    assert find_loops(graph) == []
    assert_same(graph)


def test_weights_that_are_not_stacked_are_no_loop():
    result = pipeline(trace_tiny(layers=6), "canonicalize,lower-dense-matmul,stack-layers,roll-layers", numbers=False)
    assert find_loops(result.graph) == []
    assert "no 4 segments in a row" in str(result.stages[-1].result.report[0])


def test_a_target_without_loops_says_so():
    graph = pipeline(trace_tiny(layers=6), STACKED, numbers=False).graph
    (stage,) = run_pipeline(graph, parse_spec("roll-layers"), Context(loops=False)).stages
    assert "known when they are compiled" in str(stage.result.report[0])


def chain(step, layers: int = 6) -> Graph:
    """x = step(x, row of a stack, the first x, the sums of before) of each layer, one after the other."""

    def model(values):
        x, before = values["x"], []
        for layer in range(layers):
            x = step(x, jax.lax.index_in_dim(values["stack"], layer, keepdims=False), values["x"], before)
            before.append(x)
        return {"y": x}

    return make_graph(model, {"stack": (layers, 4)}, {"x": spec((4,))})


def test_a_chain_of_layers():
    graph = chain(lambda x, row, first, before: jnp.sin(x + row))
    (loop,) = find_loops(graph)
    assert (loop.repeats, len(loop.carried)) == (6, 1)
    assert_same(graph)


def test_a_first_value_that_all_read_is_not_carried():
    graph = chain(lambda x, row, first, before: jnp.sin(x + row) * first)
    (loop,) = find_loops(graph)
    assert (loop.repeats, len(loop.carried)) == (5, 1)  # the first layer reads one array in two places
    assert_same(graph)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(lambda x, row, first, before: jnp.sin(x + row + sum(before)), id="all layers before are read"),
        pytest.param(lambda x, row, first, before: jnp.sin(x + row) * (1 + len(before)), id="another number in each"),
    ],
)
def test_layers_that_read_more_are_no_loop(step):
    graph = chain(step)
    assert find_loops(graph) == []
    assert_same(graph)
