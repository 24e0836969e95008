"""Pruning: exactly as many zeros as asked for, where the scores say, and only what one matmul reads."""

import numpy as np
import pytest

from jaxserve.errors import UserError
from jaxserve.lowering import trace_model
from jaxserve.pallas_kernels import QuantFormat, quantize_rtn
from jaxserve.passes.graph import Stored
from jaxserve.passes.pipeline import Context
from jaxserve.passes.prune import Prune, smallest
from jaxserve.passes.recipes import parse_spec
from jaxserve.passes.weights import ValueSource, WeightPlan, dense
from tests.passes.helpers import make_graph, pipeline, random_values, tiny, trace_tiny

DENSE = "canonicalize,lower-dense-matmul"
PATH = "layers_0/self_attn/o_proj/kernel"
SQUARE = f"stats/square/{PATH}"


def run(weight: np.ndarray, square: np.ndarray | None = None, **options) -> np.ndarray:
    """What the pass makes of one weight in a matmul of its own."""
    graph = make_graph(lambda v: v["x"] @ v[PATH].T, {PATH: weight.shape}, {"x": (3, weight.shape[1])})
    for step in (*parse_spec(DENSE), Prune(**options)):
        result = step.run(graph, Context())
        graph = result.graph
    (edit,) = result.edits
    values = {PATH: weight} | ({} if square is None else {SQUARE: square})
    assert edit.writes == (PATH,) and set(edit.reads) == set(values)
    (pruned,) = edit.function(*(values[path] for path in edit.reads))
    return dense(pruned)


@pytest.fixture
def weight() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(6, 40)).astype("float32")


@pytest.fixture
def square() -> np.ndarray:
    return np.exp(np.random.default_rng(1).normal(size=40) * 2).astype("float32")


def kept_as_it_was(pruned: np.ndarray, weight: np.ndarray) -> bool:
    return bool(np.array_equal(pruned[pruned != 0], weight[pruned != 0]))


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.5, 0.9])
def test_wanda_takes_the_same_part_of_every_row(weight, square, sparsity):
    pruned = run(weight, square, sparsity=sparsity)
    assert ((pruned == 0).sum(axis=1) == round(40 * sparsity)).all() and kept_as_it_was(pruned, weight)
    scores = np.abs(weight) * np.sqrt(square)
    for row in range(6):  # nothing that is kept scores less than what is gone
        gone = scores[row][pruned[row] == 0]
        assert gone.size == 0 or gone.max() <= scores[row][pruned[row] != 0].min()


@pytest.mark.parametrize("sparsity", [0.1, 0.5, 0.9])
def test_magnitude_takes_its_part_of_the_whole_weight(weight, sparsity):
    weight[0] *= 1e-6  # a row of small weights
    pruned = run(weight, method="magnitude", sparsity=sparsity)
    assert (pruned == 0).sum() == round(240 * sparsity) and kept_as_it_was(pruned, weight)
    assert np.abs(weight[pruned == 0]).max() <= np.abs(weight[pruned != 0]).min()
    assert (pruned[0] == 0).sum() == min(40, round(240 * sparsity))


def test_wanda_of_the_paper_by_hand():
    """Equal magnitudes are ranked by the norms of their inputs; a small weight on a loud input stays."""
    weight = np.array([[4, 1, 1, 3], [1, 1, 1, 1]], "float32")
    square = np.array([1, 100, 4, 1], "float32")  # norms 1, 10, 2, 1: scores 4 10 2 3 and 1 10 2 1
    np.testing.assert_array_equal(run(weight, square), [[4, 1, 0, 0], [0, 1, 1, 0]])
    np.testing.assert_array_equal(run(weight, method="magnitude"), [[4, 0, 0, 3], [0, 0, 1, 1]])


@pytest.mark.parametrize("method", ["wanda", "magnitude"])
def test_two_of_every_four(weight, square, method):
    pruned = run(weight, square if method == "wanda" else None, method=method, pattern="2:4")
    groups = pruned.reshape(-1, 4)
    assert ((groups == 0).sum(axis=1) == 2).all() and kept_as_it_was(pruned, weight)
    scores = (np.abs(weight) * (np.sqrt(square) if method == "wanda" else 1)).reshape(-1, 4)
    kept = np.where(groups != 0, scores, np.inf).min(axis=1)
    gone = np.where(groups == 0, scores, -np.inf).max(axis=1)
    assert (gone <= kept).all()


def test_ties_go_to_the_first():
    np.testing.assert_array_equal(
        smallest(np.zeros((2, 4)), 2), [[True, True, False, False], [True, True, False, False]]
    )


def test_outputs_are_as_near_as_they_can_be(weight, square):
    """Wanda's aim: on inputs of unequal norms its output error is below magnitude's."""
    x = np.random.default_rng(2).normal(size=(500, 40)) * np.sqrt(square)

    def error(pruned: np.ndarray) -> float:
        return float(np.linalg.norm(x @ (weight - pruned).T))

    assert error(run(weight, square)) < 0.9 * error(run(weight, method="magnitude"))


def test_a_weight_stored_in_blocks_is_pruned_dense():
    """The blocks are gone, so that `native` quantization does not take the weight for what the checkpoint stores."""
    form = QuantFormat(4, 32, "minimum", "float16")
    tensor = quantize_rtn(np.random.default_rng(0).normal(size=(32, 32)).astype("float32"), form)
    graph = trace_model(tiny(width=32, heads=2, head_dim=16, mlp=32), 4, 2, {PATH: form})
    assert next(entry for entry in graph.inputs if entry.path == PATH).stored == Stored(form)
    for step in (*parse_spec(DENSE), Prune(method="magnitude", targets="o_proj")):
        result = step.run(graph, Context())
        graph = result.graph
    assert next(entry for entry in graph.inputs if entry.path == PATH).stored is None
    values = {**random_values(graph), PATH: tensor}
    pruned = dict(WeightPlan(result.edits).materialize(graph, ValueSource(values)))[PATH]
    assert (pruned == 0).sum() >= pruned.size / 2
    np.testing.assert_array_equal(pruned[pruned != 0], tensor.dequantize()[pruned != 0])


def test_every_layer_weight_is_selected_and_asks_for_its_own_statistic():
    graph = trace_tiny()
    for step in (*parse_spec(DENSE), Prune()):
        before, result = graph, step.run(graph, Context())
        graph = result.graph
    wanted = [
        entry.path for entry in graph.of_kind("param") if entry.path.startswith("layers_0") and "proj" in entry.path
    ]
    assert len(wanted) == 7 and sorted(edit.writes[0] for edit in result.edits) == sorted(wanted)
    assert [statistic.path for statistic in result.statistics] == [edit.reads[1] for edit in result.edits]
    for statistic, edit in zip(result.statistics, result.edits, strict=True):
        (reader,) = before.users(before.var(edit.reads[0]))
        assert statistic.kind == "square" and statistic.var is reader.invars[0]
    assert Prune(method="magnitude").run(before, Context()).statistics == ()


def test_a_tied_embedding_is_left_alone():
    graph = trace_tiny(tied=True)
    for step in (*parse_spec(DENSE), Prune(targets="embed")):
        result = step.run(graph, Context())
        graph = result.graph
    assert [str(entry) for entry in result.report] == [
        "embed_tokens/embedding: no match, 1 matmuls and 1 lookups read it, where one matmul is wanted"
    ]
    assert result.edits == () and result.statistics == ()


@pytest.mark.parametrize("options", ["", "{pattern=2:4}", "{sparsity=0.9}", "{method=magnitude}"])
def test_regions_move_no_further_than_is_allowed(options):
    """The verifier runs every matmul with whole and with pruned weights on the same numbers."""
    result = pipeline(trace_tiny(), f"{DENSE},prune{options}")
    assert result.stages[-1].result.matches == 7


def test_infinite_weights_are_refused(weight):
    weight[1, 2] = np.inf
    with pytest.raises(UserError, match="o_proj/kernel holds infinities or NaN"):
        run(weight, method="magnitude")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sparsity=1", r"sparsity=1 is not in \[0, 1\)"),
        ("sparsity=-0.1", "sparsity=-0.1 is not in"),
        ("sparsity=nan", "sparsity=nan is not in"),
        ("pattern=2:4,sparsity=0.6", "pattern 2:4 means sparsity=0.5, not 0.6"),
        ("pattern=4:8", "allowed: unstructured, 2:4"),
        ("method=obs", "allowed: wanda, magnitude"),
        ("targets='('", r"targets='\(' is not a regular expression"),
    ],
)
def test_bad_options(text, message):
    with pytest.raises(UserError, match=message):
        parse_spec(f"prune{{{text}}}")


def test_the_text_form_parses_back():
    step = Prune(method="magnitude", pattern="2:4", targets="mlp/")
    assert str(step) == "prune{method=magnitude,pattern='2:4',targets='mlp/'}"
    assert parse_spec(str(step)) == (step,) and parse_spec("prune") == (Prune(),)
