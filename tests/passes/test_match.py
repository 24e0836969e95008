"""Patterns by example: where they match, and what a failed match says."""

import jax
import jax.numpy as jnp
import pytest

from jaxserve._compat import Var
from jaxserve.pallas_kernels import kv_write
from jaxserve.passes.graph import Graph
from jaxserve.passes.match import Match, NoMatch, Pattern
from jaxserve.passes.trace import TraceError
from tests.passes.helpers import make_graph, spec


def normalized(x, y):
    """(x + y) / sum of its last axis, times 2."""
    total = x + y
    return 2.0 * (total / jnp.sum(total, axis=-1, keepdims=True))


PATTERN = Pattern(normalized, spec((2, 3)), spec((2, 3)))


def output_var(graph: Graph, index: int = 0) -> Var:
    var = graph.jaxpr.outvars[index]
    assert isinstance(var, Var)
    return var


def match(function, pattern=PATTERN, shape=(5, 7), dtype="float32", output=0) -> Match | NoMatch:
    graph = make_graph(function, {}, {"x": shape, "y": shape}, dtype)
    return pattern.match(graph, output_var(graph, output))


def reason(*args, **kwargs) -> str:
    found = match(*args, **kwargs)
    assert isinstance(found, NoMatch) and not found
    assert str(found) == f"{found.where}: no match, {found.reason}"
    return found.reason


@pytest.mark.parametrize("shape", [(2, 3), (1, 1), (64, 5)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matches_at_other_sizes(shape, dtype):
    graph = make_graph(lambda v: normalized(v["x"], v["y"]), {}, {"x": shape, "y": shape}, dtype)
    found = Pattern(normalized, spec((2, 3), dtype), spec((2, 3), dtype)).match(graph, output_var(graph))
    assert isinstance(found, Match) and found
    assert found.operands == (graph.var("x"), graph.var("y"))
    assert {id(eqn) for eqn in found.eqns} == {id(eqn) for eqn in graph.eqns}
    assert found.results == (output_var(graph),)


def test_a_program_that_casts_is_another_at_another_dtype():
    """Summing bfloat16 goes through float32, so the float32 example does not describe it."""
    assert "expected" in reason(lambda v: normalized(v["x"], v["y"]), dtype="bfloat16")
    assert match(lambda v: v["x"] * v["y"], Pattern(lambda x, y: x * y, spec((2, 3)), spec((2, 3))), dtype="bfloat16")


def test_operands_are_bound_in_the_pattern_s_order():
    graph = make_graph(lambda v: normalized(v["y"], v["x"]), {}, {"x": (3, 4), "y": (3, 4)})
    found = PATTERN.match(graph, output_var(graph))
    assert isinstance(found, Match) and found.operands == (graph.var("y"), graph.var("x"))


def test_one_value_may_be_both_operands():
    graph = make_graph(lambda v: normalized(v["x"], v["x"]), {}, {"x": (3, 4)})
    found = PATTERN.match(graph, output_var(graph))
    assert isinstance(found, Match) and found.operands == (graph.var("x"),) * 2


def test_an_operand_may_be_computed_and_is_outside_the_region():
    graph = make_graph(lambda v: normalized(jnp.sin(v["x"]), v["y"]), {}, {"x": (3, 4), "y": (3, 4)})
    found = PATTERN.match(graph, output_var(graph))
    assert isinstance(found, Match) and "sin" not in [eqn.primitive.name for eqn in found.eqns]


def test_inner_value_that_feeds_something_else():
    def function(v):
        with jax.named_scope("model"), jax.named_scope("block"):
            total = v["x"] + v["y"]
            result = 2.0 * (total / jnp.sum(total, axis=-1, keepdims=True))
        with jax.named_scope("model"), jax.named_scope("residual"):
            return {"result": result, "other": jnp.sin(total)}

    assert reason(function) == "add's result also feeds sin at residual"


def test_inner_value_that_is_an_output():
    def function(v):
        total = v["x"] + v["y"]
        return {"result": 2.0 * (total / jnp.sum(total, axis=-1, keepdims=True)), "total": total}

    assert reason(function) == "add's result is also an output of the graph"


def test_different_parameters():
    def other_axis(v):
        total = v["x"] + v["y"]
        return 2.0 * (total / jnp.sum(total, axis=0, keepdims=True))

    assert "the pattern" in reason(other_axis, shape=(4, 4))
    assert "axes=(0,)" in reason(other_axis, shape=(4, 4)) or "broadcast_dimensions" in reason(other_axis, shape=(4, 4))


def test_literal_differs():
    def function(v):
        total = v["x"] + v["y"]
        return 3.0 * (total / jnp.sum(total, axis=-1, keepdims=True))

    assert reason(function) == "expected the constant 2.0, found the constant 3.0"


def test_literal_expected_but_value_found():
    pattern = Pattern(lambda x: 2.0 * x, spec((2,)))
    assert reason(lambda v: v["y"] * v["x"], pattern) == "expected the constant 2.0, found y"


def test_another_primitive_and_an_input():
    function = lambda v: 2.0 * ((v["x"] - v["y"]) / jnp.sum(v["x"] - v["y"], axis=-1, keepdims=True))  # noqa: E731
    assert reason(function) == "expected add, found sub"
    assert reason(lambda v: 2.0 * v["x"]) == "expected div, found an input"


def test_repeated_operand_must_be_one_value():
    pattern = Pattern(lambda x: x * jnp.sin(x), spec((2,)))
    assert match(lambda v: v["x"] * jnp.sin(v["x"]), pattern)
    assert reason(lambda v: v["x"] * jnp.sin(v["y"]), pattern).startswith("one operand is read twice")


def test_repeated_operand_may_be_an_equal_constant():
    pattern = Pattern(lambda x, c: (x + c) * c, spec((2,)), spec(()))
    assert match(lambda v: (v["x"] + 2.5) * 2.5, pattern)
    assert not match(lambda v: (v["x"] + 2.5) * 1.5, pattern)


def test_shapes_that_the_pattern_cannot_have():
    pattern = Pattern(lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))), spec((2, 3)), spec((4, 3)))
    found = reason(lambda v: jax.lax.dot_general(v["x"], v["y"], (((1,), (0,)), ((), ()))), pattern, shape=(4, 4))
    assert "dimension_numbers" in found
    transposed = Pattern(lambda x: x.T @ jnp.ones((2, 4)), spec((2, 3)))
    assert "shapes do not fit the pattern" in reason(lambda v: v["x"].T @ jnp.ones((5, 4)), transposed, shape=(5, 3))


def test_dtype_of_a_cast_decides():
    pattern = Pattern(lambda x: jnp.sin(x.astype("float32")).astype(x.dtype), spec((2,), "bfloat16"))
    assert match(lambda v: jnp.sin(v["x"].astype("float32")).astype("bfloat16"), pattern, dtype="bfloat16")
    assert "new_dtype" in reason(
        lambda v: jnp.sin(v["x"].astype("float32")).astype("float16"), pattern, dtype="bfloat16"
    )


def test_another_result_of_the_same_op_does_not_match():
    cache = spec((2, 4, 1, 8))
    args = {"kc": cache, "vc": cache, "k": spec((3, 1, 8)), "v": spec((3, 1, 8)), "slots": spec((3,), "int32")}
    pattern = Pattern(lambda *operands: kv_write(*operands)[0], *args.values())

    def graph_of(index):
        return make_graph(lambda v: kv_write(*(v[name] for name in args))[index], {}, args)

    first, second = graph_of(0), graph_of(1)
    assert pattern.match(first, output_var(first))
    found = pattern.match(second, output_var(second))
    assert isinstance(found, NoMatch) and "another result of jaxserve.kv_write" in found.reason


def test_patterns_that_make_no_sense():
    with pytest.raises(ValueError, match="a pattern computes one array"):
        match(lambda v: v["x"], Pattern(lambda x: (x + 1.0, x), spec((2,))))
    table = jnp.arange(3.0)
    with pytest.raises(TraceError, match="captures a constant"):
        match(lambda v: v["x"], Pattern(lambda x: x + table, spec((3,))))
    ignoring = Pattern(lambda x, y: jnp.sin(x), spec((2,)), spec((2,)))
    assert reason(lambda v: jnp.sin(v["x"]), ignoring) == "the pattern ignores one of its operands"


def test_inlined_calls_match_inlined_calls():
    pattern = Pattern(lambda x: jax.nn.silu(x), spec((2, 3)))
    assert match(lambda v: jax.nn.silu(v["x"]), pattern)
    assert match(lambda v: v["x"] * jax.nn.sigmoid(v["x"]), pattern)
