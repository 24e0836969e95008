"""Negative log-likelihoods against numpy, differences in pairs, and what perplexity writes."""

import dataclasses
import json
import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from jaxserve.errors import UserError
from jaxserve.evaluate import Perplexity
from jaxserve.experiments import perplexity
from jaxserve.experiments.common import write_json
from jaxserve.experiments.pipelines import named_pipelines, one_pipeline
from jaxserve.experiments.scoring import Score, Windows, deliver, paired, window_nll
from jaxserve.passes.recipes import parse_spec


def test_nll_against_numpy():
    rng = np.random.default_rng(0)
    logits, ids = (10 * rng.normal(size=(7, 11))).astype("float32"), rng.integers(0, 11, 7).astype("int32")
    wide = logits.astype("float64")
    chances = np.exp(wide) / np.exp(wide).sum(axis=1, keepdims=True)
    expected = -np.mean([np.log(chances[t - 1, ids[t]]) for t in range(1, 7)])
    assert float(window_nll(logits, ids)) == pytest.approx(expected, rel=1e-6)


def test_pairs_take_out_what_windows_have_in_common():
    mean, error = paired([1.1, 5.2, 3.1, 9.2], [1.0, 5.0, 3.0, 9.0])
    assert mean == pytest.approx(0.15) and error == pytest.approx(np.std([0.1, 0.2, 0.1, 0.2], ddof=1) / 2)
    assert paired([2.0], [1.0])[0] == 1 and math.isnan(paired([2.0], [1.0])[1])


def test_perplexity_of_a_score():
    assert Score("a", "", (math.log(2), math.log(8)), 1, 1.0).perplexity == pytest.approx(4)
    assert Score("a", "", (math.nan,), 1, 1.0).perplexity == Score("a", "", (1e4,), 1, 1.0).perplexity == math.inf


def test_pipelines_by_name_label_and_text():
    spec = "canonicalize,lower-dense-matmul,insert-paged-kv{kv=f32,page=4}"
    found = named_pipelines(["f32, w4a16", spec, f"mine-1.0:{spec}"], activations="f32")
    assert list(found) == ["f32", "w4a16", spec, "mine-1.0"]
    assert found[spec] == found["mine-1.0"] == parse_spec(spec)
    assert [step.name for step in found["w4a16"]].count("narrow-matmul") == 0
    assert [step.name for step in named_pipelines(["w4a16"])["w4a16"]].count("narrow-matmul") == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["f32,f32"], "'f32' is given twice"),
        (["f32,w3"], r"--recipes f32,w3: 'w3' is no recipe; recipes: f32, bf16, .*`jaxserve passes`"),
        (["w3"], "'w3' is no recipe"),
        (["f32,canonicalize"], r"'canonicalize' is no recipe.*A pipeline of your own goes into a --recipes of its"),
        (["canonicalize,f33"], "--recipes canonicalize,f33: pipeline spec: unknown pass 'f33'; known: canonicalize"),
        (["a:canonicalize,quantize-matmul{rules=x}"], "is not REGEX=SCHEME"),
        ([":canonicalize"], "expected a pass name"),
        ([" "], "--recipes is empty"),
    ],
)
def test_bad_pipelines(values, message):
    with pytest.raises(UserError, match=message):
        named_pipelines(values)


def test_json_has_no_nan(tmp_path):
    write_json(tmp_path / "a.json", {"rows": [{"x": math.nan, "y": (math.inf, 1.5)}]})
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["rows"] == [{"x": None, "y": [None, 1.5]}] and "jax" in data["versions"]
    with pytest.raises(UserError, match=r"--json .*: No such file"):
        write_json(tmp_path / "no" / "a.json", {})


def test_a_run_and_another_against_it(parse, tmp_path, capsys):
    file, plot = tmp_path / "first.json", tmp_path / "first.svg"
    settings = parse(recipes=["f32,w4a16"], activations="f32", json=file, plot=plot)
    perplexity.run(settings)
    data = json.loads(file.read_text())
    exact, rounded = data["rows"]
    assert data["experiment"] == "perplexity"
    assert data["windows"].items() >= {"text": "story.txt", "context": 64, "windows": 3}.items()
    assert (exact["name"], rounded["name"]) == ("f32", "w4a16") and "insert-paged-kv" in exact["spec"]
    assert len(exact["nll"]) == 3 and exact["perplexity"] == pytest.approx(math.exp(np.mean(exact["nll"])))
    assert exact["nll"] != rounded["nll"] and np.allclose(exact["nll"], rounded["nll"], atol=0.3)
    assert exact["weight_bytes"] > 1.5 * rounded["weight_bytes"]
    assert len(list(ET.parse(plot).iter("{http://www.w3.org/2000/svg}rect"))) == 3  # paper and two bars
    assert f"{rounded['perplexity']:.5g}" in capsys.readouterr().out

    perplexity.run(parse(recipes=["w4a16"], activations="f32", against=file))
    name, _, mean, error, *_ = capsys.readouterr().out.splitlines()[-1].split()
    assert (name, mean, error) == ("w4a16", "0", "0")  # the same pipeline on the same windows


def test_who_is_compared_with_whom(parse, capsys):
    settings, windows = parse(), Windows("a.txt", 8, ((1, 2), (3, 4)))
    scores = [Score("a", "", (1.0, 2.0), 0, 0.0), Score("b", "", (1.5, 2.5), 0, 0.0)]

    def compared(reference: dict | None) -> list[str]:
        deliver("perplexity", scores, windows, settings, reference)
        lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
        assert all(len(line) in (4, 7) for line in lines)
        return [f"{line[2]} {line[4]}" if len(line) == 7 else "-" for line in lines]

    assert compared(None) == ["0 0", "0.5 64.872"]  # the first
    assert compared({"x": (0.0, 0.0)}) == ["1.5 348.17", "2 638.91"]  # the only one there is
    assert compared({"b": (0.0, 0.0), "x": (9.0, 9.0)}) == ["-", "2 638.91"]  # by name; nobody knows who else is meant


def test_kernels_against_their_references(parse, tmp_path, capsys):
    """Each pipeline on the same weights, compared with itself and not with the first one; and what a move does."""
    file = tmp_path / "run.json"
    perplexity.run(parse(recipes=["f32,w4a16"], activations="f32", references=True, json=file))
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows] == [
        f"{name}{what}" for name in ("f32", "w4a16") for what in ("", " (XLA)", " (moved)")
    ]
    for ours, theirs, moved in (rows[:3], rows[3:]):
        np.testing.assert_allclose(ours["nll"], theirs["nll"], rtol=1e-5)
        np.testing.assert_allclose(ours["nll"], moved["nll"], rtol=1e-5)
        assert ours["nll"] != moved["nll"]
        assert ours["weight_bytes"] == theirs["weight_bytes"] and ours["spec"] == theirs["spec"]
    assert abs(rows[0]["nll"][0] - rows[3]["nll"][0]) > 1e-3
    lines = [line for line in capsys.readouterr().out.splitlines()[2:] if "(XLA)" not in line]
    assert len(lines) == 4 and all(abs(float(line.replace(" (moved)", "").split()[4])) < 0.01 for line in lines)
    with pytest.raises(UserError, match="leave one out"):
        perplexity.run(parse(references=True, against=file))


def test_other_windows_are_not_compared(tmp_path):
    windows = Windows("a.txt", 8, ((1, 2), (3, 4)))
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"rows": [{"name": "f32", "nll": [1.0]}], "windows": {"text": "b.txt"}}))
    with pytest.raises(UserError, match=r"it was measured on \{'text': 'b.txt'\}, this run on"):
        perplexity.earlier_run(path, windows)
    path.write_text("[]")
    with pytest.raises(UserError, match="not the JSON of a perplexity run"):
        perplexity.earlier_run(path, windows)
    path.write_text(json.dumps({"rows": [{"name": "f32", "nll": [1.0]}], "windows": windows.to_json()}))
    assert perplexity.earlier_run(path, windows) == {"f32": [1.0]}
    others = dataclasses.replace(windows, ids=((9, 9), (3, 4)))  # another text of that name
    with pytest.raises(UserError, match="it was measured on"):
        perplexity.earlier_run(path, others)
    theirs = {name: value for name, value in windows.to_json().items() if name != "sha256"}  # another tool's
    path.write_text(json.dumps({"rows": [{"name": "f32", "nll": [1.0]}], "windows": theirs}))
    assert perplexity.earlier_run(path, windows) == {"f32": [1.0]}


def test_a_perplexity_that_no_float_holds():
    assert Perplexity.of(8000.0, 1, 10) == Perplexity(math.inf, 1, 10)
    assert Perplexity.of(10.0, 1, 10).perplexity == math.e


def test_one_pipeline():
    assert one_pipeline("f32") == named_pipelines(["f32"])["f32"]
    with pytest.raises(UserError, match=r"--pipeline f32,bf16: one recipe or pipeline is wanted, not 2"):
        one_pipeline("f32,bf16")


def test_fewer_windows_than_asked_for_are_told(parse, capsys):
    held = len(Windows.from_flags(parse(windows=1000)).ids)
    assert held < 1000
    assert f"--windows 1000: the text holds no more than {held} of 64 tokens\n" in capsys.readouterr().err
    Windows.from_flags(parse(windows=held))
    Windows.from_flags(parse(windows=0))
    assert not capsys.readouterr().err


def test_windows_are_no_longer_than_the_model_takes(parse):
    assert Windows.from_flags(parse(context=..., text=__file__)).context == 512
    with pytest.raises(UserError, match=r"--context 513 is more than 512, the model's own limit"):
        Windows.from_flags(parse(context=513))


def test_a_text_is_needed(parse):
    settings = parse(text="")
    with pytest.raises(UserError, match="--text: say which"):
        Windows.from_flags(settings)
    settings = parse(context=512)
    with pytest.raises(UserError, match="less than one window"):
        Windows.from_flags(settings)
