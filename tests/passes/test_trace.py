"""Tracing: calls are inlined, constants and hidden ops refused, names kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve._compat import check_jaxpr
from jaxserve.lowering import trace_model
from jaxserve.passes.graph import Input, Stored
from jaxserve.passes.trace import TraceError, trace_graph
from tests.passes.helpers import make_graph, names, random_values, run_graph, spec, tiny, trace_tiny

CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call")


def assert_matches_function(function, graph):
    values = random_values(graph)
    expected = function({path: jnp.asarray(value) for path, value in values.items()})
    np.testing.assert_allclose(run_graph(graph, values)["out"], expected, rtol=1e-6)
    check_jaxpr(graph.jaxpr)
    assert not set(names(graph)) & set(CALLS)


@jax.jit
def scaled(x, y):
    return 2.0 * x - y


@jax.jit
def nested(x, y):
    return scaled(scaled(x, y), jax.nn.silu(y)) + scaled(y, x)


@jax.custom_jvp
def cubed(x):
    return x * x * x


cubed.defjvp(lambda primals, tangents: (cubed(*primals), 3 * primals[0] ** 2 * tangents[0]))


@pytest.mark.parametrize(
    "function",
    [
        lambda v: scaled(v["x"], v["y"]),
        lambda v: scaled(scaled(v["x"], v["y"]), scaled(v["y"], v["x"])),
        lambda v: nested(nested(v["x"], v["y"]), v["x"]) * nested(v["y"], v["y"]),
        lambda v: cubed(cubed(v["x"])) + jax.nn.relu(v["y"]),
        lambda v: jax.jit(lambda a, b: (b, a))(v["x"], v["y"])[0],  # a body that only passes its operands on
        lambda v: jax.jit(lambda a: (jnp.sort(a), 3.0))(v["x"])[1] * v["y"],  # a constant result, a dropped one
        lambda v: jnp.where(v["x"] > 0, 1.0, 0.0) * v["y"],  # weak types
        lambda v: jax.lax.top_k(v["x"], 2)[1] + 0 * v["y"][:, :2],  # a dropped result of an equation that stays
    ],
    ids=["once", "twice", "nested", "custom_jvp", "pass-through", "constant", "weak", "dropped"],
)
def test_calls_are_inlined(function):
    assert_matches_function(function, make_graph(function, {}, {"x": (3, 4), "y": (3, 4)}))


def test_a_call_of_a_call_keeps_name_stack():
    @jax.jit
    def inner(x):
        with jax.named_scope("inner"):
            return jnp.sin(x)

    def outer(values):
        with jax.named_scope("outer"):
            return inner(values["x"])

    graph = make_graph(outer, {}, {"x": (3,)})
    (eqn,) = graph.eqns
    assert str(eqn.source_info.name_stack).split("/")[0] == "outer"
    assert str(eqn.source_info.name_stack).split("/")[-1] == "inner"


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, lambda f: jax.jit(jax.jit(f))], ids=["top", "jit", "jit-jit"])
def test_constants_are_refused(wrap):
    table = jnp.arange(4.0)
    with pytest.raises(TraceError, match=r"constant of shape \(4,\): make it a parameter"):
        make_graph(lambda v: wrap(lambda x: x + table)(v["x"]), {}, {"x": (4,)})


def test_scalar_arrays_are_refused_and_python_numbers_are_not():
    two = jnp.float32(2.0) + 0.0
    with pytest.raises(TraceError, match="write it as a Python number"):
        make_graph(lambda v: v["x"] * two, {}, {"x": (4,)})
    assert names(make_graph(lambda v: v["x"] * 2.0, {}, {"x": (4,)})) == ["mul"]


def hide_in_scan(x, w):
    return jax.lax.scan(lambda carry, _: (carry @ w, None), x, None, length=2)[0]


def hide_in_while(x, w):
    return jax.lax.while_loop(lambda state: state[0, 0] < 1, lambda state: state @ w, x)


def hide_in_cond(x, w):
    return jax.lax.cond(x[0, 0] > 0, lambda: jax.jit(lambda: x @ w)(), lambda: x)


def hide_in_remat(x, w):
    return jax.checkpoint(lambda x: x @ w)(x)


@jax.custom_vjp
def custom(x, w):
    return x @ w


custom.defvjp(lambda x, w: (custom(x, w), (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


@pytest.mark.parametrize("hide", [hide_in_scan, hide_in_while, hide_in_cond, hide_in_remat, custom])
def test_a_matmul_hidden_in_a_body_is_refused(hide):
    with pytest.raises(TraceError, match="dot_general inside"):
        make_graph(lambda v: hide(v["x"], v["w"]), {"w": (4, 4)}, {"x": (4, 4)})


def test_an_op_of_ours_hidden_in_control_flow_is_refused():
    from jaxserve.pallas_kernels import rms_norm

    def function(values):
        body = lambda carry, _: (rms_norm(carry, values["w"], eps=1e-5), None)  # noqa: E731
        return jax.lax.scan(body, values["x"], None, length=2)[0]

    with pytest.raises(TraceError, match=r"jaxserve\.rms_norm inside 'scan'"):
        make_graph(function, {"w": (4,)}, {"x": (3, 4)})


def test_control_flow_that_hides_nothing_stays():
    function = lambda v: jax.lax.fori_loop(0, 3, lambda _, x: x + 1.0, v["x"])  # noqa: E731
    graph = make_graph(function, {}, {"x": (3,)})
    assert set(names(graph)) <= {"scan", "while"}
    assert_matches_function(function, graph)


def test_inputs_and_outputs_keep_names_order_and_axes():
    entries = (
        Input("b/kernel", "param", spec((3, 4)), "O I"),
        Input("a/kernel", "param", spec((4,)), "I"),
        Input("unused", "param", spec((7,))),
        Input("x", "arg", spec((2, 4)), "T I"),
    )
    graph = trace_graph(lambda v: {"second": v["x"] @ v["b/kernel"].T, "first": v["a/kernel"]}, entries)
    assert graph.inputs == entries
    assert [output.name for output in graph.outputs] == ["second", "first"]
    assert [output.aval.shape for output in graph.outputs] == [(2, 3), (4,)]
    assert graph.donated == ()
    values = random_values(graph)
    results = run_graph(graph, values)
    np.testing.assert_array_equal(results["first"], values["a/kernel"])
    np.testing.assert_allclose(results["second"], values["x"] @ values["b/kernel"].T, rtol=1e-5)


def test_graph_answers_who_produces_and_reads():
    graph = make_graph(lambda v: {"y": v["x"] @ v["w"], "w": v["w"]}, {"w": (4, 4)}, {"x": (3, 4)})
    (dot,) = graph.eqns
    w = graph.var("w")
    entry = graph.param_of(w)
    assert entry is not None and entry.path == "w"
    assert graph.param_of(graph.var("x")) is None
    assert graph.users(w) == [dot] and graph.producer(dot.outvars[0]) is dot and graph.producer(w) is None
    assert graph.only_user(w) is None  # it is an output too
    assert graph.only_user(graph.var("x")) is dot


def test_models_name_parameters_arguments_and_stored_forms():
    from jaxserve.pallas_kernels import QuantFormat

    form = QuantFormat(8, 32, "none", "float16")
    graph = trace_model(tiny(), 5, 3, {"lm_head/kernel": form}, "bfloat16")
    by_path = {entry.path: entry for entry in graph.inputs}
    assert by_path["lm_head/kernel"].stored == Stored(form) and by_path["norm/scale"].stored is None
    assert by_path["layers_0/mlp/down_proj/kernel"].axes == "D F"
    assert [entry.path for entry in graph.of_kind("arg")] == ["tokens", "positions", "segments", "logit_rows"]
    assert {entry.aval.dtype.name for entry in graph.of_kind("param")} == {"bfloat16"}
    assert [(output.name, output.aval) for output in graph.outputs] == [("logits", spec((3, 32)))]


def test_models_are_flat():
    assert not set(names(trace_tiny(qk_norm=True, qkv_bias=True, activation="gelu"))) & set(CALLS)
