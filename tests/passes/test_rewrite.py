"""Replacements are spliced in order, checked, and clean up behind them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve._compat import DropVar, Var, check_jaxpr
from jaxserve.passes.graph import Graph, Input, Output
from jaxserve.passes.match import Match
from jaxserve.passes.rewrite import Rewriter, eliminate_dead_code
from jaxserve.passes.trace import TraceError
from jaxserve.passes.weights import WeightEdit
from tests.passes.helpers import make_graph, make_input, names, paths, random_values, run_graph, spec


def eqn_match(graph: Graph, name: str, index: int = 0) -> Match:
    eqn = [eqn for eqn in graph.eqns if eqn.primitive.name == name][index]
    return Match(name, tuple(eqn.invars), (eqn,), tuple(eqn.outvars))


def assert_in_order(graph: Graph) -> None:
    known: set[Var] = set(graph.jaxpr.invars)
    for eqn in graph.eqns:
        assert all(atom in known for atom in eqn.invars if isinstance(atom, Var))
        fresh = [var for var in eqn.outvars if not isinstance(var, DropVar)]
        assert not known & set(fresh)
        known |= set(fresh)
    assert all(out in known for out in graph.jaxpr.outvars if isinstance(out, Var))
    check_jaxpr(graph.jaxpr)


def chain(v):
    a = jnp.sin(v["x"])
    b = jnp.cos(a)
    return b * v["scale"] + a


@pytest.fixture
def graph() -> Graph:
    return make_graph(chain, {"scale": (4,)}, {"x": (3, 4)})


def test_one_replacement(graph):
    rewriter = Rewriter(graph)
    rewriter.replace(match := eqn_match(graph, "cos"), lambda a: jnp.exp(-a) * 2.0, match.operands)
    after = rewriter.finish()
    assert_in_order(after)
    assert "cos" not in names(after) and names(after)[0] == "sin"
    values = random_values(graph)
    a = np.sin(values["x"])
    np.testing.assert_allclose(run_graph(after, values)["out"], 2 * np.exp(-a) * values["scale"] + a, rtol=1e-6)


@pytest.mark.parametrize("order", [("sin", "cos", "mul"), ("mul", "cos", "sin"), ("cos", "mul", "sin")])
def test_chains_of_replacements_on_each_other_s_results(graph, order):
    """Every operand is named by the old graph's variables, in whatever order the replacements come."""
    replacements = {"sin": lambda x: x + 1.0, "cos": lambda a: a * a, "mul": lambda b, s: b - s}
    rewriter = Rewriter(graph)
    for name in order:
        match = eqn_match(graph, name)
        replacement = replacements[name]
        operands = match.operands
        if name == "mul":
            rewriter.replace(match, lambda b, s: b - jnp.broadcast_to(s, b.shape), [operands[0], graph.var("scale")])
        else:
            rewriter.replace(match, replacement, operands)
    after = rewriter.finish()
    assert_in_order(after)
    values = random_values(graph)
    a = values["x"] + 1
    np.testing.assert_allclose(run_graph(after, values)["out"], a * a - values["scale"] + a, rtol=1e-5)


def test_a_result_may_become_an_operand(graph):
    """Replacing by one of the operands leaves no equation behind."""
    rewriter = Rewriter(graph)
    rewriter.replace(eqn_match(graph, "cos"), lambda a: a, eqn_match(graph, "cos").operands)
    after = rewriter.finish()
    assert_in_order(after)
    assert "cos" not in names(after)


def test_an_output_is_replaced(graph):
    rewriter = Rewriter(graph)
    match = eqn_match(graph, "add")
    rewriter.replace(match, lambda a, b: a - b, match.operands)
    after = rewriter.finish()
    assert_in_order(after)
    assert names(after)[-1] == "sub"
    assert after.outputs == graph.outputs


def test_extra_results_come_back_as_atoms_for_outputs(graph):
    rewriter = Rewriter(graph)
    match = eqn_match(graph, "cos")
    (extra,) = rewriter.replace(match, lambda a: (jnp.cos(a), jnp.tanh(a)), match.operands)
    rewriter.add_output(Output("extra", spec((3, 4))), extra)
    after = rewriter.finish()
    assert_in_order(after)
    values = random_values(graph)
    np.testing.assert_allclose(run_graph(after, values)["extra"], np.tanh(np.sin(values["x"])), rtol=1e-6)


def test_results_that_do_not_fit(graph):
    match = eqn_match(graph, "cos")
    with pytest.raises(TypeError, match="cos: the replacement gives"):
        Rewriter(graph).replace(match, lambda a: a[:2], match.operands)
    with pytest.raises(TypeError, match="cos: the replacement gives"):
        Rewriter(graph).replace(match, lambda a: a.astype("bfloat16"), match.operands)
    with pytest.raises(TypeError, match="gives 0 results of 1"):
        Rewriter(graph).replace(match, lambda a: (), match.operands)


def test_a_result_is_replaced_once(graph):
    rewriter = Rewriter(graph)
    match = eqn_match(graph, "cos")
    rewriter.replace(match, jnp.tanh, match.operands)
    assert rewriter.is_replaced(match.results[0]) and not rewriter.is_replaced(graph.var("x"))
    with pytest.raises(ValueError, match="replaced already"):
        rewriter.replace(match, jnp.tanh, match.operands)


@pytest.mark.parametrize("target", ["cos", "sin"])
def test_a_replacement_that_reads_what_it_gives(graph, target):
    """Directly, or through an equation after it."""
    rewriter = Rewriter(graph)
    result = eqn_match(graph, "cos").results[0]
    rewriter.replace(eqn_match(graph, target), lambda b: b + 1.0, [result])
    with pytest.raises(ValueError, match="computed from its own result"):
        rewriter.finish()


def test_captured_constants_are_refused(graph):
    table = jnp.arange(4.0)
    match = eqn_match(graph, "cos")
    with pytest.raises(TraceError, match="captures a constant"):
        Rewriter(graph).replace(match, lambda a: a + table, match.operands)


def test_dead_parameters_and_equations_go():
    graph = make_graph(
        lambda v: (jnp.sin(v["x"]) @ v["dead"], v["x"] * v["live"])[1], {"dead": (4, 2), "live": (4,)}, {"x": (3, 4)}
    )
    assert "dot_general" in names(graph)
    after = eliminate_dead_code(graph)
    assert_in_order(after)
    assert paths(after) == ["live"] and "dot_general" not in names(after) and "sin" not in names(after)


def test_an_input_replaced_at_the_same_path(graph):
    rewriter = Rewriter(graph)
    wide = Input("scale", "param", spec((1, 4)), "one D")
    var = rewriter.add_input(wide)
    assert rewriter.add_input(wide) is var
    edit = WeightEdit(("scale",), ("scale",), lambda s: (s[None],))
    match = eqn_match(graph, "mul")
    broadcast = next(eqn for eqn in graph.eqns if eqn.primitive.name == "broadcast_in_dim")
    match = Match("mul", (match.operands[0], broadcast.invars[0]), (broadcast, *match.eqns), match.results)
    rewriter.replace(match, lambda b, s: b * s, [match.operands[0], var], [edit])
    after = rewriter.finish()
    assert_in_order(after)
    assert [(entry.path, entry.aval.shape, entry.axes) for entry in after.of_kind("param")] == [
        ("scale", (1, 4), "one D")
    ]
    values = random_values(graph)
    np.testing.assert_allclose(
        run_graph(after, {**values, "scale": values["scale"][None]})["out"], run_graph(graph, values)["out"], rtol=1e-6
    )


def test_an_input_that_differs_in_its_axes_alone_takes_the_place_too():
    """A square weight stored transposed has the same shape."""
    entries = (Input("w", "param", spec((4, 4)), "I O"), make_input("x", (3, 4)))
    from jaxserve.passes.trace import trace_graph

    graph = trace_graph(lambda v: v["x"] @ v["w"], entries)
    rewriter = Rewriter(graph)
    assert rewriter.add_input(entries[0]) is graph.var("w")
    assert rewriter.add_input(Input("w", "param", spec((4, 4)), "O I")) is not graph.var("w")


def test_inputs_are_listed_by_kind(graph):
    rewriter = Rewriter(graph)
    match = eqn_match(graph, "cos")
    arg = rewriter.add_input(make_input("shift", (4,)))
    cache = rewriter.add_input(make_input("cache", (4,), kind="cache"))
    param = rewriter.add_input(make_input("bias", (4,), kind="param"))
    rewriter.replace(match, lambda a, *rest: a + sum(rest), [*match.operands, arg, cache, param])
    after = rewriter.finish()
    assert [entry.path for entry in after.inputs] == ["scale", "bias", "cache", "x", "shift"]
    assert rewriter.has_input("cache") and not rewriter.has_input("other")


def test_an_edit_that_two_matches_share_is_taken_once():
    graph = make_graph(lambda v: (jnp.sin(v["x"]), jnp.cos(v["x"]))[0] + jnp.cos(v["x"]), {"s": (1,)}, {"x": (3,)})
    rewriter = Rewriter(graph)
    edit = WeightEdit(("s",), ("t",), lambda s: (s,))
    for name in ("sin", "cos"):
        match = eqn_match(graph, name)
        rewriter.replace(match, jnp.tanh, match.operands, [edit])
    assert rewriter.edits == [edit] and len(rewriter.replaced) == 2


def test_spliced_equations_stand_where_the_match_stood():
    def function(v):
        with jax.named_scope("model"):
            with jax.named_scope("a"):
                x = jnp.sin(v["x"])
            with jax.named_scope("b"):
                return jnp.cos(x)

    graph = make_graph(function, {}, {"x": (3,)})
    rewriter = Rewriter(graph)
    match = Match("both", (graph.var("x"),), tuple(graph.eqns), tuple(graph.eqns[-1].outvars))
    rewriter.replace(match, jnp.tanh, match.operands)
    assert str(rewriter.finish().eqns[0].source_info.name_stack) == "model"


def test_deep_graphs_do_not_recurse():
    def function(v):
        x = v["x"]
        for _ in range(1500):
            x = x + 1.0
        return x

    graph = make_graph(function, {}, {"x": (2,)})
    rewriter = Rewriter(graph)
    match = eqn_match(graph, "add", 0)
    rewriter.replace(match, lambda x, one: x - one, match.operands)
    after = rewriter.finish()
    assert len(after.eqns) == 1500
    assert_in_order(after)
