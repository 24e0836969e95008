"""Calibration: the statistics are those of a whole forward pass, layers see what was done to the layers before them."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import layerwise
from jaxserve._compat import Var, vars_of
from jaxserve.calibration import CalibrationOptions, is_calibrated, read_calibration
from jaxserve.errors import UserError
from jaxserve.models.config import ModelConfig
from jaxserve.passes.graph import Graph, Output
from jaxserve.passes.match import Match
from jaxserve.passes.pipeline import Context, PassResult, run_pipeline
from jaxserve.passes.recipes import RECIPES, parse_spec
from jaxserve.passes.rewrite import Rewriter
from jaxserve.passes.statistics import Statistic, StatisticKind
from jaxserve.passes.weights import ValueSource, WeightEdit, WeightPlan
from tests.calibration_support import DENSE, Model, Shrink, Watch, calibrated, lay_out, shrink
from tests.passes.helpers import tiny

KINDS: tuple[StatisticKind, ...] = ("absmax", "absmean", "square", "range", "gram")


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(tiny(layers=3))


@pytest.fixture(scope="module")
def ids(model: Model) -> np.ndarray:
    return model.ids(6, 10)


def activations(model: Model, weights: dict[str, np.ndarray], ids: np.ndarray) -> dict[str, np.ndarray]:
    """Inputs of every matmul by the path of its weight, [all tokens, I]: whole forward passes, one sequence each."""
    graph = run_pipeline(model.trace(ids.shape[1]), DENSE, Context()).graph
    rewriter, paths = Rewriter(graph), []
    for eqn in graph.eqns:
        if eqn.primitive.name == "jaxserve.dense_matmul":
            entry = graph.param_of(eqn.invars[1])
            assert entry is not None
            paths.append(entry.path)
            rewriter.add_output(Output(entry.path, jax.ShapeDtypeStruct((), "float32")), eqn.invars[0])
    call, index = jax.jit(rewriter.finish().call), np.arange(ids.shape[1], dtype=np.int32)
    found = []
    for row in ids:
        found.append(call({**weights, "tokens": row, "positions": index, "segments": 0 * index, "logit_rows": index}))
    return {path: np.concatenate([result[path] for result in found]) for path in paths}


def direct(kind: StatisticKind, x: np.ndarray) -> np.ndarray:
    """The statistic of x [T, I], in float64."""
    x = x.astype(np.float64)
    return {
        "absmax": lambda: np.abs(x).max(0),
        "absmean": lambda: np.abs(x).mean(0),
        "square": lambda: (x**2).mean(0),
        "range": lambda: np.array([x.min(), x.max()]),
        "gram": lambda: x.T @ x / len(x),
    }[kind]()


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_those_of_whole_forward_passes(model, ids, kind, tmp_path):
    step = Watch(kind)
    final = calibrated(model, [*DENSE, step], ids, ValueSource(model.weights), tmp_path)
    want = activations(model, model.weights, ids)
    assert len(step.seen) == 3 * 7
    for path, found in step.seen.items():
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, direct(kind, want[path]), rtol=2e-5, atol=1e-6)
    for path, value in final.items():
        np.testing.assert_array_equal(value, model.weights[path])


def test_a_layer_sees_what_was_done_to_the_layers_before_it(model, ids, tmp_path):
    """By hand: layer after layer, with whole forward passes of the weights as they are by then."""
    step = Shrink("absmean")
    final = calibrated(model, [*DENSE, step], ids, ValueSource(model.weights), tmp_path)
    weights = dict(model.weights)
    for layer in range(3):
        inputs = activations(model, weights, ids)  # of this layer: from itself unchanged and those before it changed
        for path in [path for path in weights if path.startswith(f"layers_{layer}/") and path.endswith("kernel")]:
            statistic = direct("absmean", inputs[path])
            np.testing.assert_allclose(step.seen[path], statistic, rtol=2e-5, err_msg=path)
            weights[path] = shrink(weights[path], statistic).astype(np.float32)
    for path, value in final.items():
        np.testing.assert_allclose(value, weights[path], rtol=2e-5, atol=1e-7, err_msg=path)
    unchanged = direct("absmean", activations(model, model.weights, ids)["layers_2/mlp/down_proj/kernel"])
    assert not np.allclose(step.seen["layers_2/mlp/down_proj/kernel"], unchanged, rtol=0.05)


def test_stages_go_on_from_each_other_and_from_the_passes_between_them(model, ids, tmp_path):
    """Shrink, stack, watch: the second statistics are of the stacked, shrunk model."""
    first, last = Shrink("absmean"), Watch("gram")
    passes = [*DENSE, first, *parse_spec("fuse-qkv,fuse-gate-up"), last]
    final = calibrated(model, passes, ids, ValueSource(model.weights), tmp_path)
    assert len(first.seen) == 21 and len(last.seen) == 12
    alone = calibrated(model, [*DENSE, Shrink("absmean")], ids, ValueSource(model.weights), tmp_path / "alone")
    want = activations(model, alone, ids)
    stacked = [alone[f"layers_1/self_attn/{name}_proj/kernel"] for name in "qkv"]
    np.testing.assert_array_equal(final["layers_1/self_attn/qkv_proj/kernel"], np.concatenate(stacked))
    gram = direct("gram", want["layers_1/self_attn/q_proj/kernel"])
    np.testing.assert_allclose(last.seen["layers_1/self_attn/qkv_proj/kernel"], gram, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("sequences", "length"), [(6, 10), (7, 100), (3, 300), (2, 700), (5, 200)])
def test_the_size_of_a_step_does_not_matter(sequences, length, tmp_path):
    """Several sequences a step, one, and one that is longer than a step usually is."""
    config = dataclasses.replace(tiny(layers=1), max_positions=1024)
    model = Model(config)
    ids, step = model.ids(sequences, length), Watch("square")
    calibrated(model, [*DENSE, step], ids, ValueSource(model.weights), tmp_path)
    want = activations(model, model.weights, ids)
    for path, found in step.seen.items():
        np.testing.assert_allclose(found, direct("square", want[path]), rtol=1e-4)


def programs_of(model: Model, passes, ids, folder, monkeypatch) -> int:
    made: list[layerwise.Programs] = []

    class Recorded(layerwise.Programs):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr("jaxserve.calibration.Programs", Recorded)
    calibrated(model, passes, ids, ValueSource(model.weights), folder)
    (programs,) = made
    for function in programs.known.values():
        assert function._cache_size() == 1  # pyright: ignore[reportFunctionMemberAccess]
    return len(programs.known)


@pytest.mark.parametrize("step", [Shrink("gram"), Watch("gram")], ids=["shrink", "watch"])
def test_compilations_do_not_grow_with_layers(step, tmp_path, monkeypatch):
    counts = []
    for layers in (3, 4):
        step.seen.clear()
        model = Model(tiny(layers=layers))
        folder = tmp_path / str(layers)
        counts.append(programs_of(model, [*DENSE, step], model.ids(4, 8), folder, monkeypatch))
    assert (
        counts[0] == counts[1] <= 4
    )  # the embedding, a layer before and after, and the last one, which hands nothing on


def test_memory_holds_one_layer(ids, tmp_path):
    """Parameters are read when their layer comes up, and what is made of them does not stay in memory."""
    model = Model(tiny(layers=4, width=128, mlp=512, head_dim=64))
    order: list[str] = []

    class Reading(ValueSource):
        def read_native(self, path):
            order.append(path)
            return super().read_native(path)

    step = Shrink("absmax")
    seen_at: list[int] = []

    def edit(weight: np.ndarray, statistic: np.ndarray) -> np.ndarray:
        seen_at.append(len(order))
        return shrink(weight, statistic)

    passes = [*DENSE, dataclasses.replace(step, edit=edit)]
    final = calibrated(model, passes, ids, Reading(model.weights), tmp_path)
    layers = [path.split("/")[0] for path in order[: seen_at[-1]]]
    assert layers == sorted(layers) and layers[0] == "embed_tokens" and layers[-1] == "layers_3"
    files = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    large = [value for path, value in final.items() if path.startswith("layers_") and value.nbytes >= 1 << 16]
    assert files == sum(value.nbytes for value in large) > 0


def test_a_tied_embedding_is_changed_once_for_both_of_its_readers(ids, tmp_path):
    """Quantized before a calibrated pass and read by the first segment and the last; so are codes of a layer."""
    tied = Model(dataclasses.replace(tiny(layers=2), tied=True))
    step = Shrink("absmean", targets="mlp")
    passes = [*DENSE, *parse_spec("quantize-matmul{rules='embed|self_attn=w8a16'}"), step]
    final = calibrated(tied, passes, ids, ValueSource(tied.weights), tmp_path)
    plan = WeightPlan(lay_out(tied, passes[:-1]).edits)
    plain = dict(plan.materialize(lay_out(tied, passes[:-1]).graph, ValueSource(tied.weights)))
    assert final.keys() == plain.keys() and "embed_tokens/embedding/codes" in final
    for path, value in final.items():
        assert np.array_equal(value, plain[path]) == ("mlp" not in path), path
    dequantized = {path: value for path, value in tied.weights.items()}
    for path in [path for path in dequantized if f"{path}/codes" in final]:
        dequantized[path] = (final[f"{path}/codes"] * final[f"{path}/scale"]).astype(np.float32)
    want = activations(tied, dequantized, ids)["layers_0/mlp/up_proj/kernel"]
    np.testing.assert_allclose(step.seen["layers_0/mlp/up_proj/kernel"], direct("absmean", want), rtol=1e-4)


def test_a_calibrated_pass_may_quantize_the_embedding_too(ids, tmp_path):
    """Its lookup, which hands on to the first layer, becomes another equation: as if a pass before had done it."""
    tied = Model(dataclasses.replace(tiny(layers=2), tied=True))
    method = "method=gptq,act-order=static"
    specs = (
        f"quantize-matmul{{rules='.*=w8a16',{method}}}",
        f"quantize-matmul{{rules='embed=w8a16'}},quantize-matmul{{rules='layers=w8a16',{method}}}",
    )
    found = [
        calibrated(tied, [*DENSE, *parse_spec(spec)], ids, ValueSource(tied.weights), tmp_path / str(index))
        for index, spec in enumerate(specs)
    ]
    assert found[0].keys() == found[1].keys() and "embed_tokens/embedding/codes" in found[0]
    for path, value in found[0].items():
        np.testing.assert_array_equal(value, found[1][path], err_msg=path)


class OfTheResidual(Shrink):
    """Shrinks layer 1's down_proj by what layer 0 hands on."""

    def run(self, graph: Graph, context: Context):
        result = super().run(graph, context)
        (norm,) = graph.users(graph.var("layers_1/input_layernorm/scale"))
        residual, path = norm.invars[0], "stats/absmean/residual"
        assert isinstance(residual, Var)
        edits = [
            dataclasses.replace(edit, reads=(edit.reads[0], path) if "layers_1" in edit.writes[0] else edit.reads)
            for edit in result.edits
        ]
        statistics = (Statistic(path, residual, "absmean"), *result.statistics)
        return dataclasses.replace(result, edits=tuple(edits), statistics=statistics)


def test_a_statistic_of_what_an_earlier_layer_hands_on(ids, tmp_path):
    """It is of the changed layer: the weight that asks for it is the next layer's."""
    found = []
    for keeps, folder in ((False, "changes"), (True, "keeps")):
        model = Model(tiny(layers=2))
        kind = type("Kind", (OfTheResidual,), {"keeps_numbers": keeps})
        step = kind("absmean", targets="down_proj", edit=shrink if not keeps else (lambda weight, statistic: weight))
        calibrated(model, [*DENSE, step], ids, ValueSource(model.weights), tmp_path / folder)
        found.append(step.seen["layers_1/mlp/down_proj/kernel"])
        assert found[-1].shape == (model.config.width,)
    assert not np.allclose(found[0], found[1], rtol=1e-3)


# ---- what cannot be done


def test_a_weight_that_is_read_before_its_statistics_are_known(model, ids, tmp_path):
    tied = Model(dataclasses.replace(tiny(layers=2), tied=True))
    step = TiedHead("absmean")
    with pytest.raises(UserError, match="tokens/embedding is read by the embedding already, and cannot wait for"):
        calibrated(tied, [*DENSE, step], ids, ValueSource(tied.weights), tmp_path)


class TiedHead(Shrink):
    """Shrinks the embedding by what its other reader, the head, multiplies it with."""

    def run(self, graph: Graph, context: Context):
        rewriter, path = Rewriter(graph), "embed_tokens/embedding"
        (head,) = [eqn for eqn in graph.eqns if eqn.primitive.name == "jaxserve.dense_matmul"][-1:]
        (activation, _) = vars_of(head.invars)
        statistic = Statistic("stats/absmean/head", activation, "absmean")
        rewriter.edits.append(WeightEdit((path, statistic.path), (path,), lambda w, s: (w,)))
        return dataclasses.replace(PassResult.of(rewriter, []), statistics=(statistic,))


def test_statistics_of_the_head(model, ids, tmp_path):
    """The head belongs to the last layer; its input is computed for every row."""
    step = Watch("absmean", targets="lm_head")
    calibrated(model, [*DENSE, step], ids, ValueSource(model.weights), tmp_path)
    want = direct("absmean", activations(model, model.weights, ids)["lm_head/kernel"])
    np.testing.assert_allclose(step.seen["lm_head/kernel"], want, rtol=2e-5)


def test_calibrating_through_the_cache_is_refused(model, ids, tmp_path):
    passes = [*DENSE, *parse_spec("insert-paged-kv{page=4,kv=f32}"), Shrink()]
    with pytest.raises(UserError, match="shrink reads statistics, so it goes before insert-paged-kv"):
        calibrated(model, passes, ids, ValueSource(model.weights), tmp_path)


def test_a_pass_that_replaces_what_layers_hand_on(model, ids, tmp_path):
    class Replace(Shrink):
        """Doubles and halves the residual stream, so that every layer gets another variable than before."""

        def run(self, graph: Graph, context: Context):
            result = super().run(graph, context)
            rewriter = Rewriter(result.graph)

            for eqn in result.graph.eqns:
                if eqn.primitive.name == "add":
                    match = Match("add", tuple(eqn.invars), (eqn,), tuple(eqn.outvars))
                    rewriter.replace(match, lambda a, b: jnp.add(b, a), match.operands)
            return dataclasses.replace(result, graph=rewriter.finish())

    with pytest.raises(ValueError, match=r"shrink replaces the value float32\[60,16\] that layer 2 is computed from"):
        calibrated(model, [*DENSE, Replace()], ids, ValueSource(model.weights), tmp_path)


# ---- the text


class Letters:
    """A tokenizer for which every byte is a token."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token_text(self, token: int) -> str:
        return f"the byte {token}"


CONFIG = dataclasses.replace(tiny(), max_positions=1000, vocab=256)


def read(options: CalibrationOptions, config: ModelConfig = CONFIG):
    return read_calibration(options, Letters(), config)  # pyright: ignore[reportArgumentType]


def test_texts_of_another_vocabulary(tmp_path: pathlib.Path):
    file = tmp_path / "text.txt"
    file.write_text("abc\u00fc")
    with pytest.raises(
        UserError, match=r"token id 195 \('the byte 195'\) of the text, .* vocabulary has 128: take the"
    ):
        read(CalibrationOptions(file, sequences=1, length=2), dataclasses.replace(CONFIG, vocab=128))
    assert read(CalibrationOptions(file, sequences=1, length=2), dataclasses.replace(CONFIG, vocab=196)).ids.size == 2


def test_a_file_is_cut_into_rows(tmp_path: pathlib.Path):
    file = tmp_path / "text.txt"
    file.write_text("abcdefghij")
    text = read(CalibrationOptions(file, sequences=3, length=3))
    assert bytes(text.ids.reshape(-1).tolist()) == b"abcdefghi" and text.ids.shape == (3, 3)
    assert text.ids.dtype == np.int32 and str(text.record) == "3 sequences of 3 tokens of text.txt"
    assert text.record.sha256 == "72399361da6a7754fec986dca5b7cbaf1c810a28ded4abaf56b2106d06cb78b0"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abcdefgh", r"--calibration: text\.txt has 8 tokens, less than 3 sequences of 3"),
        (b"", "has 0 tokens"),
        (b"abc\xff", "is not UTF-8 at byte 3"),
        (None, "No such file or directory"),
    ],
)
def test_texts_that_will_not_do(tmp_path: pathlib.Path, content, message):
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(CalibrationOptions(file, sequences=3, length=3))


@pytest.mark.parametrize("sizes", [{"sequences": 0}, {"length": 0}, {"sequences": -4}])
def test_sizes_that_will_not_do(sizes):
    with pytest.raises(UserError, match="is not at least 1"):
        CalibrationOptions(**sizes)


def test_the_built_in_sample_gives_what_it_has():
    text = read(CalibrationOptions(sequences=3, length=20))
    assert bytes(text.ids.reshape(-1).tolist()).startswith(b"The Harbour Clock") and text.complete
    assert text.record.text == "built-in sample"
    text = read(CalibrationOptions(sequences=64, length=1000))
    assert 20 < len(text.ids) == text.record.sequences < 64 and not text.complete


def test_a_row_is_no_longer_than_the_model_can_be():
    with pytest.raises(UserError, match="--calibration-length 1001 is more than 1000, the model's own limit"):
        read(CalibrationOptions(length=1001))


def test_nothing_is_calibrated_for_plain_recipes(model):
    for name in ("f32", "bf16", "w8a16", "w4a16", "native"):
        assert not is_calibrated(lay_out(model, parse_spec(RECIPES[name].spec(page=4)), 4).stages)
    assert is_calibrated(lay_out(model, [*DENSE, Watch()], 4).stages)
