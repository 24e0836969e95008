"""Broken passes are caught, each by the check that is there for it; correct ones are not."""

import dataclasses
import tracemalloc
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve._compat import fresh_var
from jaxserve.pallas_kernels import kv_write
from jaxserve.passes.graph import Graph, Input, Output
from jaxserve.passes.match import Match
from jaxserve.passes.pipeline import Context, KvGeometry, Pass, PassResult, run_pipeline
from jaxserve.passes.recipes import RECIPES, parse_spec
from jaxserve.passes.rewrite import Rewriter
from jaxserve.passes.statistics import Statistic
from jaxserve.passes.verify import NumberCheck, Verifier, VerifyError, relative_error, verify_structure
from jaxserve.passes.weights import WeightEdit
from tests.passes.helpers import make_graph, spec, stage_of, trace_tiny


@dataclasses.dataclass(frozen=True)
class Broken(Pass):
    """Does to a rewriter, or to the finished graph, what a test asks."""

    name: ClassVar[str] = "broken"
    rewrite: Callable[[Rewriter], Any] = lambda rewriter: None
    finish: Callable[[Graph], Graph] = lambda graph: graph

    def __str__(self) -> str:
        return self.name

    def run(self, graph: Graph, context: Context) -> PassResult:
        rewriter = Rewriter(graph)
        self.rewrite(rewriter)
        result = PassResult.of(rewriter, [])
        return dataclasses.replace(result, graph=self.finish(result.graph))


def verify(graph: Graph, rewrite=lambda rewriter: None, finish=lambda graph: graph) -> NumberCheck:
    numbers = NumberCheck()
    run_pipeline(graph, [Broken(rewrite, finish)], Context(), [Verifier(numbers)])
    return numbers


def eqn_match(graph: Graph, name: str) -> Match:
    eqn = next(eqn for eqn in graph.eqns if eqn.primitive.name == name)
    return Match(name, tuple(eqn.invars), (eqn,), tuple(eqn.outvars))


def replace(name: str, new: Callable[..., Any], **options: Any) -> Callable[[Rewriter], Any]:
    def rewrite(rewriter: Rewriter) -> None:
        match = eqn_match(rewriter.graph, name)
        rewriter.replace(match, new, match.operands, **options)

    return rewrite


@pytest.fixture
def graph() -> Graph:
    return make_graph(lambda v: jnp.sin(v["x"] * v["w"]), {"w": (3, 4)}, {"x": (3, 4)})


@pytest.fixture
def cached() -> Graph:
    """Two caches, written by one op, and a result that reads them."""

    def function(v):
        k, v_ = kv_write(v["kc"], v["vc"], v["k"], v["k"], v["slots"])
        return {"out": k.sum() + v_.sum(), "kc": k, "vc": v_}

    cache = spec((2, 4, 1, 8))
    args = {"kc": cache, "vc": cache, "k": spec((3, 1, 8)), "slots": spec((3,), "int32")}
    graph = make_graph(function, {}, args)
    inputs = tuple(dataclasses.replace(e, kind="cache") if e.path in ("kc", "vc") else e for e in graph.inputs)
    outputs = tuple(dataclasses.replace(o, replaces=o.name if o.name != "out" else None) for o in graph.outputs)
    return Graph(inputs, outputs, graph.jaxpr)


def test_correct_passes_pass(graph, cached):
    assert verify(graph).checked == 0
    assert verify(graph, replace("sin", lambda x: jnp.cos(x - np.pi / 2))).checked == 1
    assert verify(cached).checked == 0


def test_changed_outputs(graph):
    def rename(after: Graph) -> Graph:
        return dataclasses.replace(after, outputs=(dataclasses.replace(after.outputs[0], name="other"),))

    def reshape(after: Graph) -> Graph:
        other = make_graph(lambda v: (v["x"] * v["w"])[:2], {"w": (3, 4)}, {"x": (3, 4)})
        return Graph(after.inputs, other.outputs, other.jaxpr)

    for finish in (rename, reshape):
        with pytest.raises(VerifyError, match="after broken: outputs changed"):
            verify(graph, finish=finish)


def test_added_outputs_must_be_declared(graph):
    def add(rewriter: Rewriter) -> None:
        rewriter.add_output(Output("more", spec((3, 4))), rewriter.graph.eqns[0].outvars[0])

    with pytest.raises(VerifyError, match="outputs were added"):
        verify(graph, add)

    class Declared(Broken):
        adds_outputs: ClassVar[bool] = True

    run_pipeline(graph, [Declared(add)], Context(), [Verifier()])


def test_a_graph_that_is_no_program(graph):
    def unordered(after: Graph) -> Graph:
        return dataclasses.replace(after, jaxpr=after.jaxpr.replace(eqns=list(reversed(after.eqns))))

    with pytest.raises(VerifyError, match="after broken"):
        verify(graph, finish=unordered)


def test_inputs_must_be_what_they_are_declared(graph):
    def declare(after: Graph) -> Graph:
        wrong = dataclasses.replace(after.inputs[0], aval=spec((3, 4), "bfloat16"))
        return dataclasses.replace(after, inputs=(wrong, *after.inputs[1:]))

    def share(after: Graph) -> Graph:
        wrong = dataclasses.replace(after.inputs[1], path="w")
        return dataclasses.replace(after, inputs=(after.inputs[0], wrong))

    with pytest.raises(VerifyError, match="input w is declared"):
        verify(graph, finish=declare)
    with pytest.raises(VerifyError, match=r"two inputs share a path: \['w'\]"):
        verify(graph, finish=share)


def change_outputs(*replaces: str | None) -> Callable[[Graph], Graph]:
    def finish(after: Graph) -> Graph:
        outputs = [dataclasses.replace(o, replaces=r) for o, r in zip(after.outputs, replaces, strict=True)]
        return dataclasses.replace(after, outputs=tuple(outputs))

    return finish


@pytest.mark.parametrize(
    ("replaces", "message"),
    [
        ((None, "kc", None), "cache vc is returned 0 times"),
        ((None, "kc", "kc"), "cache kc is returned 2 times"),
        ((None, "vc", "kc"), "cache kc is not written by one chain of ops that gives its output"),
        ((None, "kc", "other"), "vc replaces other, which is no input"),
        (("kc", None, "vc"), "out replaces kc, which is no input of its shape"),
    ],
)
def test_caches_are_returned_once_each(cached, replaces, message):
    broken = change_outputs(*replaces)(cached)
    stage = stage_of(Broken(), PassResult(broken))
    with pytest.raises(VerifyError, match=message):
        verify_structure(broken, stage)


def test_a_cache_is_written_by_one_chain(cached):
    def rewritten(function: Callable) -> None:
        def rewrite(rewriter: Rewriter) -> None:
            match = eqn_match(rewriter.graph, "jaxserve.kv_write")
            rewriter.replace(match, function, match.operands)

        run_pipeline(cached, [Broken(rewrite)], Context(), [Verifier()])

    def twice(kc, vc, k, v, slots):
        kc, vc = kv_write(kc, vc, k, v, slots)
        return kv_write(kc, vc, k + kc.sum(), v, slots)

    def aside(kc, vc, k, v, slots):
        return kv_write(kc, vc, k + 0 * kv_write(kc, vc, k, v, slots)[0].sum(), v, slots)

    def read_after(kc, vc, k, v, slots):
        written, vc = kv_write(kc, vc, k, v, slots)
        return kv_write(written, vc, k + kc.sum(), v, slots)

    rewritten(twice)
    for wrong in (aside, read_after):
        with pytest.raises(VerifyError, match="cache kc is not written by one chain of ops"):
            rewritten(wrong)


def test_a_dropped_cache(cached):
    def drop(rewriter: Rewriter) -> None:
        match = eqn_match(rewriter.graph, "jaxserve.kv_write")
        rewriter.replace(match, lambda *operands: (jnp.zeros((2, 4, 1, 8)), jnp.ones((2, 4, 1, 8))), match.operands)

    with pytest.raises(VerifyError, match="kc replaces kc, which is no input"):
        run_pipeline(cached, [Broken(drop)], Context(), [Verifier()])


@pytest.mark.parametrize(
    ("error", "allowed", "caught"), [(1e-3, 1.1e-3, False), (1e-3, 0.9e-3, True), (1e-6, 0.0, True)]
)
def test_numbers_move_no_more_than_the_pass_allows(graph, error, allowed, caught):
    rewrite = replace("sin", lambda x: jnp.sin(x) * (1 + error), tolerance=allowed)
    if caught:
        with pytest.raises(VerifyError, match=r"sin moved by .* \(relative norm\)"):
            verify(graph, rewrite)
    else:
        assert verify(graph, rewrite).checked == 1


def test_numbers_that_are_not_finite(graph):
    with pytest.raises(VerifyError, match="moved by inf"):
        verify(graph, replace("sin", lambda x: jnp.where(x > 0, jnp.nan, jnp.sin(x)), tolerance=1e9))
    assert relative_error(jnp.array([1.0, jnp.inf]), jnp.array([1.0, 1.0])) == float("inf")
    assert relative_error(jnp.array([3.0, 4.0]), jnp.array([3.0, 4.0])) == 0
    np.testing.assert_allclose(relative_error(jnp.array([1.1]), jnp.array([1.0])), 0.1, rtol=1e-5)


def test_integers_are_exact():
    graph = make_graph(lambda v: v["i"] * 2, {}, {"i": spec((3,), "int32")})
    assert verify(graph, replace("mul", lambda i, two: i + i)).checked == 1
    with pytest.raises(VerifyError, match="mul moved"):
        verify(graph, replace("mul", lambda i, two: i + i + 1))


def edited(function, shape=(3, 4), reads=("w",), writes=("half",), operand="half"):
    """x * w becomes x * (half + half) with a new parameter `half`."""

    def rewrite(rewriter: Rewriter) -> None:
        match = eqn_match(rewriter.graph, "mul")
        var = rewriter.add_input(Input(operand, "param", spec(shape)))
        edit = WeightEdit(reads, writes, function)
        new = lambda x, half: x * jnp.broadcast_to(half + half, (3, 4))  # noqa: E731
        rewriter.replace(match, new, [rewriter.graph.var("x"), var], [edit])

    return rewrite


def test_edits_that_fit(graph):
    assert verify(graph, edited(lambda w: (w / 2,))).checked == 1


@pytest.mark.parametrize(
    ("rewrite", "message"),
    [
        (edited(lambda w: (w / 3,)), "mul moved by"),
        (edited(lambda w: (w[:1] / 2,)), r"the edit of half gives \[1, 4\], the graph declares \[3, 4\]"),
        (edited(lambda w: (w / 2, w)), "the edit of half gives 2 values"),
        (edited(lambda w: (w / 2,), writes=("other",)), "no weight edit writes half, which the pass added or changed"),
        (edited(lambda w: (w / 2,), reads=("v",)), "the edit of half reads v, which is not there"),
        (edited(lambda w: (w / 2,), shape=(1, 4), operand="w", writes=("v",)), "no weight edit writes w"),
    ],
)
def test_edits_inconsistent_with_the_graph(graph, rewrite, message):
    with pytest.raises(VerifyError, match=message):
        verify(graph, rewrite)


def test_a_replacement_must_read_only_what_is_known(graph):
    """An input without numbers (no edit writes it, no example gives it) is an error, not a region left unchecked."""

    def rewrite(rewriter: Rewriter) -> None:
        match = eqn_match(rewriter.graph, "sin")
        var = rewriter.add_input(Input("extra", "arg", spec((3, 4))))
        rewriter.replace(match, lambda x, extra: jnp.sin(x) + 0 * extra, [*match.operands, var])

    with pytest.raises(VerifyError, match="sin reads extra, which no edit writes"):
        verify(graph, rewrite)


def test_examples_give_the_numbers(graph):
    def rewrite(given):
        def inner(rewriter: Rewriter) -> None:
            match = eqn_match(rewriter.graph, "sin")
            var = match.operands[0]
            rewriter.replace(match, lambda x: x, match.operands, examples=lambda rng, values: given(var))

        return inner

    zero = np.zeros((3, 4), np.float32)
    assert verify(graph, rewrite(lambda var: ({var: zero}, {var: zero}))).checked == 1  # sin 0 = 0
    assert verify(graph, rewrite(lambda var: None)).checked == 0  # no numbers can be made
    with pytest.raises(VerifyError, match="sin moved"):
        verify(graph, rewrite(lambda var: ({}, {})))


def test_numbers_are_checked_once_per_distinct_region():
    """Three equal layers cost as much as one: q, k and v, o, gate and up, down, and the head."""
    numbers = NumberCheck()
    passes = parse_spec(RECIPES["f32"].spec(page=4))
    run_pipeline(trace_tiny(layers=3), passes, Context(), [Verifier(numbers)])
    # Dense matmuls: [16,16] twice, [8,16], [32,16] at eight and at two rows, [16,32]; two fusions; one attention;
    # the norms, whose scales are stacked where there are several layers; one that takes its sum, and the first
    # one, which takes its layer; the activation; turning q and k.
    assert numbers.checked == 13
    run_pipeline(trace_tiny(layers=1), passes, Context(), [Verifier(alone := NumberCheck())])
    assert alone.checked == 11


@pytest.mark.parametrize(("recipe", "width"), [("w4a16", 0.5), ("w8a16", 1), ("fp8", 1)])
def test_weights_of_other_layers_take_no_memory(recipe: str, width: float):
    """The check of a stack needs the stack, of codes a byte each, but not all that it was made of as well."""
    peaks = {}

    class Measured(NumberCheck):
        def __call__(self, before, stage):
            tracemalloc.start()
            super().__call__(before, stage)
            peaks[stage.step.name] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()

    graph = trace_tiny(layers=24, width=128, mlp=1024)
    run_pipeline(graph, parse_spec(RECIPES[recipe].spec(page=4)), Context(), [Verifier(Measured())])
    codes = 24 * 2 * 1024 * 128 * width  # of gate and up
    assert peaks["stack-layers"] < 1.6 * codes


def test_regions_that_differ_in_wiring_or_constants_are_all_checked():
    def function(v):
        return v["x"] * v["y"] + 2.0 * (v["y"] * v["x"]) + 3.0 * v["x"]

    graph = make_graph(function, {}, {"x": (3,), "y": (3,)})
    numbers = NumberCheck()

    def rewrite(rewriter: Rewriter) -> None:
        for eqn in graph.eqns:
            if eqn.primitive.name == "mul":
                match = Match("mul", tuple(eqn.invars), (eqn,), tuple(eqn.outvars))
                rewriter.replace(match, lambda a, b: a * b, match.operands)

    run_pipeline(graph, [Broken(rewrite)], Context(), [Verifier(numbers)])
    assert numbers.checked == 3  # x*y and y*x are one, 2.0*z and 3.0*z are two


def test_a_bucket_that_cannot_hold_its_tokens_is_not_run():
    """The numbers of paged attention need pages; a bucket without enough of them is left to another bucket."""
    numbers = NumberCheck()
    context = Context(KvGeometry(num_pages=1, pages_per_seq=1, seqs=1))
    run_pipeline(trace_tiny(), parse_spec("insert-paged-kv{page=4,kv=f32}"), context, [Verifier(numbers)])
    assert numbers.checked == 0


def test_a_pool_that_fills_a_card_is_checked_in_little_memory():
    """The checks run where the model is compiled, which need not have the memory of the card that it is for."""
    numbers = NumberCheck()
    context = Context(KvGeometry(num_pages=2**40, pages_per_seq=4, seqs=2))
    run_pipeline(trace_tiny(), parse_spec("insert-paged-kv{page=4,kv=f32}"), context, [Verifier(numbers)])
    assert numbers.checked == 1


def test_paged_attention_that_forgets_the_window_is_caught(monkeypatch):
    from jaxserve.passes import insert_paged_kv

    real = insert_paged_kv.paged_attention
    monkeypatch.setattr(
        insert_paged_kv, "paged_attention", lambda *a, **options: real(*a, **{**options, "window": None})
    )
    passes = parse_spec("insert-paged-kv{page=4,kv=f32}")
    run_pipeline(trace_tiny(), passes, Context(), [Verifier(NumberCheck())])
    with pytest.raises(VerifyError, match="moved by"):
        run_pipeline(trace_tiny(windows=(2,)), passes, Context(), [Verifier(NumberCheck())])


# ---- edits that read statistics


def calibrated(
    function: Callable[..., Any], var: str = "x", path: str = "stats/absmax/w", tolerance: float = 0.0
) -> Callable[[Graph], PassResult]:
    """x * w becomes x * half + x * half, with half = function(w, absmax of a variable)."""

    def run(graph: Graph) -> PassResult:
        rewriter = Rewriter(graph)
        match = eqn_match(graph, "mul")
        half = rewriter.add_input(Input("half", "param", spec((3, 4))))
        edit = WeightEdit(("w", path), ("half",), function)
        rewriter.replace(match, lambda x, h: x * h + x * h, [match.operands[0], half], [edit], tolerance=tolerance)
        inner = graph.producer(graph.jaxpr.outvars[0])
        measured = {"x": graph.var("x"), "product": match.results[0], "sin": inner.outvars[0] if inner else None}
        statistics = (Statistic(path, measured.get(var, fresh_var(spec((3, 4)))), "absmax"),)
        return dataclasses.replace(PassResult.of(rewriter, []), statistics=statistics)

    return run


def check_calibrated(graph: Graph, run: Callable[[Graph], PassResult]) -> None:
    numbers = NumberCheck()
    Verifier(numbers)(graph, stage_of(Broken(), run(graph)))
    assert numbers.checked == 1


def test_statistics_are_those_of_the_numbers_that_the_region_runs_on(graph):
    """A region that is right only if the statistic is that of its own operand, or of what it computes itself."""
    seen: list[np.ndarray] = []

    def halve(w, absmax):
        seen.append(absmax)
        return (w / 2,)

    for var in ("x", "product", "sin"):
        check_calibrated(graph, calibrated(halve, var))
    x, product, sin = seen
    assert x.shape == product.shape == sin.shape == (4,) and x.dtype == np.float32
    rng = np.random.default_rng(0)  # as NumberCheck makes them: x, then w
    a, b = (rng.standard_normal((3, 4), np.float32) for _ in range(2))
    np.testing.assert_array_equal(x, np.abs(a).max(0))
    np.testing.assert_allclose(product, np.abs(a * b).max(0), rtol=1e-6)
    assert not np.allclose(sin, product)  # outside the region: of random numbers


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (calibrated(lambda w, absmax: (w / 3,)), "mul moved by"),
        (calibrated(lambda w, absmax: (w / 2 * absmax,)), "mul moved by"),
        (calibrated(lambda w, absmax: (w / 2,), var="nothing"), "stats/absmax/w is of a value that the graph before"),
        (calibrated(lambda w, absmax: (w / 2,), path="absmax/w"), "'absmax/w' could be taken for a parameter"),
    ],
)
def test_calibrated_passes_that_are_wrong(graph, run, message):
    with pytest.raises(VerifyError, match=message):
        check_calibrated(graph, run)


def test_a_statistic_that_nobody_declares(graph):
    result = dataclasses.replace(calibrated(lambda w, absmax: (w / 2,))(graph), statistics=())
    with pytest.raises(VerifyError, match="the edit of half reads stats/absmax/w, which is not there"):
        verify_structure(graph, stage_of(Broken(), result))
