"""Drafts trained from a tiny model: what they learn, and that a killed run goes on."""

import asyncio
import json
import pathlib
import subprocess
import sys
import time
import types
from typing import Any

import numpy as np
import pytest

from jaxserve.cli import main
from jaxserve.distill import DistillOptions, distill
from jaxserve.distill_rows import Asked, Rows, _answers, answer_rows
from jaxserve.errors import UserError
from jaxserve.models.resolve import resolve
from jaxserve.ngram_draft import _texts as ngram_texts
from jaxserve.reporting import Reporter
from jaxserve.serving.ngram_table import NGRAMS, NgramTable
from jaxserve.serving.request import InvalidRequest, SamplingParams
from jaxserve.student import Batch, divergence
from tests.distill_support import write_stories

STEPS = 30


@pytest.fixture(scope="module")
def stories_model(shared) -> pathlib.Path:
    return shared / "fixtures" / "stories260K"


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> pathlib.Path:
    return write_stories(tmp_path_factory.mktemp("text") / "text.txt")


def options(model, text, output, **changes: Any) -> DistillOptions:
    usual: dict[str, Any] = dict(layers=2, length=32, batch=2, steps=STEPS, save_every=5)
    return DistillOptions(model=str(model), text=text, output=output, **usual | changes)


def weights(folder):
    checkpoint = resolve(folder)
    return {path: checkpoint.read(path) for path in checkpoint.specs()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, stories_model, text):
    folder = tmp_path_factory.mktemp("draft") / "draft"
    return folder, distill(options(stories_model, text, folder), Reporter(quiet=True))


def test_a_draft_learns_what_its_target_says(trained, stories_model):
    folder, summary = trained
    found = summary["acceptance"]["all"]
    assert summary["steps"] == STEPS and found["distilled"] > found["cut"] + 0.1
    assert found["expected_tokens"]["1"] == pytest.approx(1 + found["distilled"])
    target, draft = resolve(stories_model), resolve(folder)
    assert draft.config == target.config.with_layers(2) and draft.generation == target.generation
    table = "embed_tokens/embedding"
    np.testing.assert_array_equal(draft.read(table), target.read(table))
    assert not (folder / "training").exists() and (folder / "tokenizer.json").exists()


def test_a_killed_run_goes_on_to_the_same_weights(trained, tmp_path, stories_model, text):
    folder = tmp_path / "draft"
    flags = ["--layers", "2", "--length", "32", "--batch", "2", "--steps", str(STEPS), "--save-every", "5"]
    command = [sys.executable, "-m", "jaxserve.cli", "distill", str(stories_model), "-o", str(folder), *flags]
    process = subprocess.Popen([*command, "--text", str(text)], stderr=subprocess.DEVNULL)
    saved = folder / "training" / "steps" / "10"
    deadline = time.monotonic() + 120
    while not saved.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert (folder / "training").exists() and not (folder / "config.json").exists()
    with pytest.raises(UserError, match="unfinished run with other options"):
        distill(options(stories_model, text, folder, seed=1), Reporter(quiet=True))
    distill(options(stories_model, text, folder), Reporter(quiet=True))
    whole, resumed = weights(trained[0]), weights(folder)
    for path in whole:
        np.testing.assert_allclose(resumed[path], whole[path], rtol=0, atol=1e-5, err_msg=path)


def test_a_time_limit_ends_training(tmp_path, stories_model, text):
    summary = distill(options(stories_model, text, tmp_path / "draft", minutes=1e-9), Reporter(quiet=True))
    assert summary["steps"] == 0
    found = summary["acceptance"]["all"]
    assert found["cut"] == found["distilled"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(layers=5), "--layers 5 is not between 1 and 4"),
        (dict(batch=0), "--batch 0 is less than 1"),
        (dict(length=1), "--length 1 is not between 2 and 512"),
        (dict(length=512), "there is too little to train on: 1 sequences of 512 tokens"),
        (dict(text=None), "either --text FILE, or --prompts FILE, --invented N or both"),
        (dict(invented=3), "either --text FILE, or"),
        (dict(invented=-1), "--invented -1 is less than 0"),
        (dict(text=None, prompts=pathlib.Path("p.jsonl")), "prompts need --artifact DIR"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, stories_model, text, changes, message):
    short = tmp_path / "short.txt"
    short.write_text(text.read_text()[:1600])
    given = {"text": short} | changes
    with pytest.raises(UserError, match=message):
        distill(options(stories_model, given.pop("text"), tmp_path / "draft", **given), Reporter(quiet=True))
    assert not (tmp_path / "draft").exists()  # so that the same folder can be named again


def test_a_folder_that_is_taken_is_left_alone(tmp_path, stories_model, text, capsys):
    (tmp_path / "mine").write_text("x")
    flags = ["--layers", "2", "--text", str(text)]
    assert main(["distill", str(stories_model), "-o", str(tmp_path), *flags]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_command_prints_its_summary(tmp_path, stories_model, text, capsys):
    flags = ["--layers", "1", "--text", str(text), "--steps", "2", "--length", "32", "--batch", "1"]
    assert main(["distill", str(stories_model), "-o", str(tmp_path / "a"), *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 2
    assert main(["distill", str(stories_model), "-o", str(tmp_path / "b"), *flags]) == 0
    assert "distilled" in capsys.readouterr().out


def test_answers_are_wanted_and_prompts_are_not():
    rows = answer_rows([[1, 2, 3], [1, 2, 3, 4, 5]], [[7, 8], [9] * 6], ("a", "b"), 8, 4)
    assert rows.ids.tolist() == [[1, 2, 3, 7, 8, 0, 0, 0], [4, 5, 9, 9, 9, 9, 9, 9]]
    assert np.flatnonzero(rows.wanted[0]).tolist() == [2, 3]  # after 3 comes 7, after 7 comes 8
    assert np.flatnonzero(rows.wanted[1]).tolist() == [3, 4, 5, 6]
    batch = rows.batch([0, 1])
    assert batch.rows.tolist() == [2, 3, 0, 0, 11, 12, 13, 14] and batch.weights.sum() == 6
    assert batch.segments.tolist() == [0] * 8 + [1] * 8 and batch.positions.tolist() == [*range(8)] * 2


def test_each_kind_has_rows_that_are_held_out():
    rows = Rows(np.zeros((20, 2), np.int32), np.ones((20, 2), bool), ("a",) * 17 + ("b",) * 3)
    assert np.flatnonzero(rows.held_out()).tolist() == [0, 8, 16, 17]


@pytest.mark.parametrize("flags", [["--samples", "-1"], ["--samples", "2", "--text", "TEXT"]])
def test_further_answers_need_prompts(flags, tmp_path, stories_model, text, capsys):
    flags = [str(text) if flag == "TEXT" else flag for flag in flags]
    if "--text" not in flags:
        flags += ["--prompts", str(text)]
    assert main(["distill", str(stories_model), "-o", str(tmp_path / "a"), "--head", *flags]) == 2
    assert "--samples" in capsys.readouterr().err and not (tmp_path / "a").exists()


def test_divergence_is_that_of_the_distributions():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 3, 5)).astype(np.float32)
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (a, b))
    np.testing.assert_allclose(divergence(a, b), (p * np.log(p / q)).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(divergence(a, a), 0, atol=1e-6)
    assert Batch.of(np.zeros((1, 2), np.int32), np.zeros((1, 2), bool), 0).rows.size == 0


def test_a_prompt_that_the_target_refuses_is_told():
    async def submit(request):
        raise InvalidRequest("prompt", "holds token 600, the vocabulary has 512")
        yield

    asked = Asked((600,), "a", SamplingParams(max_tokens=8))
    with pytest.raises(UserError, match="prompt 0: prompt: holds token 600"):
        asyncio.run(_answers(types.SimpleNamespace(submit=submit), [asked], lambda: None))  # type: ignore[arg-type]


# ---- tables of n-grams


def test_ngrams_are_counted_and_held_out_texts_tell_how_right_they_are(tmp_path, stories_model, text, capsys):
    command = ["distill", str(stories_model), "-o", str(tmp_path / "a"), "--ngrams", "--text", str(text), "--json"]
    assert main(command) == 0
    summary = json.loads(capsys.readouterr().out)
    found = summary["acceptance"]["all"]
    assert found["known"] > 0.9 and found["right"] > 0.7, "the text repeats itself"
    assert summary["bytes"] == (tmp_path / "a" / NGRAMS).stat().st_size
    assert len(NgramTable.load(tmp_path / "a" / NGRAMS, 512)) == summary["entries"] > 50
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    assert main(command) == 2 and "exists and is not an empty folder" in capsys.readouterr().err
    (tmp_path / "b").mkdir()
    assert main([*command[:3], str(tmp_path / "b"), *command[4:-1]]) == 0
    assert "known" in capsys.readouterr().out


def test_of_a_row_only_what_the_target_said_is_counted():
    rows = answer_rows([[1, 2, 3]] * 9, [[7, 8]] * 9, ("a",) * 9, 8, 4)
    assert ngram_texts(rows, np.array([True] + [False] * 8)) == [([1, 2, 3, 7, 8, 0, 0, 0], [3, 4])]
    assert ngram_texts(rows, rows.held_out()) == [([1, 2, 3, 7, 8, 0, 0, 0], [3, 4])] * 2


def test_a_draft_is_trained_or_counted(tmp_path, stories_model, text, capsys):
    for flags in ([], ["--ngrams", "--layers", "2"]):
        with pytest.raises(SystemExit):
            main(["distill", str(stories_model), "-o", str(tmp_path / "a"), "--text", str(text), *flags])
        assert "--layers" in capsys.readouterr().err


def test_what_counting_does_not_take_is_refused_and_not_ignored(tmp_path, stories_model, text, capsys):
    command = ["distill", str(stories_model), "-o", str(tmp_path / "a"), "--ngrams", "--text", str(text)]
    for flags, words in (
        (["--length", "5", "--save-every", "9"], "--ngrams trains nothing: leave out --length, --save-every"),
        (["--artifact", str(tmp_path)], "--artifact answers prompts; with --text leave it out"),
        (["--answer-tokens", "-50"], "--answer-tokens -50 is less than 1"),
    ):
        assert main([*command, *flags]) == 2 and words in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_table_is_written_where_it_can_be_or_nowhere(tmp_path, stories_model, text, capsys, monkeypatch):
    command = ["distill", str(stories_model), "--ngrams", "--text", str(text), "-o"]
    (tmp_path / "file").touch()
    assert main([*command, str(tmp_path / "file" / "a")]) == 2
    assert "file/a: File exists; name another folder" in capsys.readouterr().err
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert main([*command, str(tmp_path / "link")]) == 0 and (tmp_path / "target" / NGRAMS).exists()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main([*command, "."]) == 0 and (tmp_path / "here" / NGRAMS).exists()
