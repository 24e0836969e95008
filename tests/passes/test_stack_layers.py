"""stack-layers: entry i of a stack is layer i's, however many layers there are."""

import numpy as np

from tests.passes.helpers import assert_same_results, edited_values, paths, pipeline, random_values, trace_tiny

STACKED = "canonicalize,lower-dense-matmul,stack-layers"


def test_layers_are_stacked_by_their_number():
    """Not by their names, of which layers_10 comes before layers_2."""
    graph = trace_tiny(layers=11)
    result = pipeline(graph, STACKED, numbers=False)
    assert "layers_0-10/input_layernorm/scale" in paths(result.graph, "param")
    values = random_values(graph)
    stack = edited_values(graph, result, values)["layers_0-10/input_layernorm/scale"]
    for layer in range(11):
        np.testing.assert_array_equal(stack[layer], values[f"layers_{layer}/input_layernorm/scale"])


def test_the_model_stays_the_same():
    graph = trace_tiny(layers=11)
    assert_same_results(graph, pipeline(graph, STACKED))
