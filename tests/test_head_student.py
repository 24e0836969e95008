"""Heads trained from a tiny model: what they learn and from what, and that a killed run goes on."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxserve import distill as module
from jaxserve.calibration import open_tokenizer
from jaxserve.cli import main
from jaxserve.distill import HeadOptions, distill
from jaxserve.distill_rows import Rows, answer_rows, text_rows
from jaxserve.errors import UserError
from jaxserve.head_student import HeadBatch, HeadStudent, frequent_tokens, teacher_states
from jaxserve.models.family import apply_params
from jaxserve.models.look_ahead import FROZEN, LOOK_AHEAD, Head
from jaxserve.models.registry import make_module
from jaxserve.models.resolve import resolve
from jaxserve.reporting import Reporter
from jaxserve.student import State, make_agreement, make_step
from tests.distill_support import write_stories

QUIET = Reporter(quiet=True)
STEPS, VOCAB = 40, 200


@pytest.fixture(scope="module")
def stories_model(shared) -> pathlib.Path:
    return shared / "fixtures" / "stories260K"


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> pathlib.Path:
    return write_stories(tmp_path_factory.mktemp("text") / "text.txt")


def options(model, text, output, **changes: Any) -> HeadOptions:
    usual: dict[str, Any] = dict(head_vocab=VOCAB, length=32, batch=128, steps=STEPS, save_every=10, learning_rate=3e-3)
    return HeadOptions(model=str(model), text=text, output=output, **usual | changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, stories_model, text):
    folder = tmp_path_factory.mktemp("head") / "head"
    return folder, distill(options(stories_model, text, folder), QUIET)


def load(folder: pathlib.Path) -> Head:
    return Head.load(folder / LOOK_AHEAD, 64, 512)


def test_a_head_learns_what_its_target_says_next_but_one(trained, stories_model):
    folder, summary = trained
    found = summary["acceptance"]["all"]
    assert summary["steps"] == STEPS and found["distilled"] > found["begun"] + 0.15
    assert found["expected_tokens"] == {"1": pytest.approx(1 + found["distilled"])}
    head, target = load(folder), resolve(stories_model)
    assert head.tokens.size == VOCAB and head.module.mlp == 128
    table = target.read("embed_tokens/embedding")[head.tokens]
    np.testing.assert_array_equal(head.params[FROZEN], table.astype(np.float16))
    assert not (folder / "training").exists() and (folder / "tokenizer.json").exists()
    assert [path.name for path in folder.glob("*.npz")] == [LOOK_AHEAD]


class Killed(BaseException):
    pass


def test_a_killed_run_goes_on_to_the_same_head(trained, tmp_path, stories_model, text, monkeypatch):
    folder, saved = tmp_path / "head", module._save

    def save_and_die(steps, done, state, loss):
        saved(steps, done, state, loss)
        raise Killed

    monkeypatch.setattr(module, "_save", save_and_die)
    with pytest.raises(Killed):
        distill(options(stories_model, text, folder), QUIET)
    monkeypatch.undo()
    assert (folder / "training" / "states.npy").exists() and not (folder / LOOK_AHEAD).exists()
    with pytest.raises(UserError, match="unfinished run with other options"):
        distill(options(stories_model, text, folder, head_width=64), QUIET)
    monkeypatch.setattr("jaxserve.head_student.logits_and_hidden", None)  # the teacher is not asked again
    distill(options(stories_model, text, folder), QUIET)
    whole, resumed = load(trained[0]), load(folder)
    for path, value in whole.params.items():
        np.testing.assert_allclose(resumed.params[path], value, rtol=0, atol=2e-3, err_msg=path)  # of float16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(head_vocab=0), "--head-vocab 0 is not between 1 and 512"),
        (dict(head_vocab=513), "--head-vocab 513 is not between 1 and 512"),
        (dict(head_width=0), "--head-width 0 is less than 1"),
        (dict(batch=0), "--batch 0 is less than 1"),
        (dict(length=1), "--length 1 is not between 2 and 512"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, stories_model, text, changes, message):
    with pytest.raises(UserError, match=message):
        distill(options(stories_model, text, tmp_path / "head", **changes), QUIET)
    assert not (tmp_path / "head").exists()


def test_the_command_trains_one_kind_of_draft_and_takes_its_flags_alone(tmp_path, stories_model, text, capsys):
    command = ["distill", str(stories_model), "-o", str(tmp_path / "a"), "--text", str(text)]
    for other in (["--layers", "2"], ["--ngrams"]):
        with pytest.raises(SystemExit):
            main([*command, "--head", *other])
        assert "not allowed with argument" in capsys.readouterr().err
    for flags, words in (
        (["--layers", "2", "--head-vocab", "9"], "--layers trains no head: leave out --head-vocab"),
        (["--ngrams", "--head-width", "9"], "--ngrams trains nothing: leave out --head-width"),
    ):
        assert main([*command, *flags]) == 2 and words in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
    few = ["--head", "--steps", "2", "--length", "32", "--batch", "8"]
    assert main([*command, *few, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] == 2 and load(tmp_path / "a").tokens.size == 512  # all that there are
    assert main([*command[:3], str(tmp_path / "b"), *command[4:], *few]) == 0
    told = "".join(capsys.readouterr())
    assert "begun" in told and f"next: jaxserve compile {stories_model} --look-ahead {tmp_path / 'b'}" in told


def test_answers_of_one_token_are_too_little(tmp_path, stories_model, text, monkeypatch):
    rows = answer_rows([[1, 2, 3]] * 9, [[7]] * 9, ("a",) * 9, 32, 1)
    monkeypatch.setattr(module, "make_rows", lambda *_: rows)
    with pytest.raises(UserError, match="needs answers of two tokens"):
        distill(options(stories_model, text, tmp_path / "head"), QUIET)


# ---- what it is asked and what it is told


def test_of_an_answer_all_but_the_first_token_is_wanted_and_of_a_prompt_all_but_the_first_helps():
    rows = answer_rows([[1, 2, 3], [1], [1, 2]], [[7, 8, 9], [5] * 9, []], ("a",) * 3, 8, 4).without_first()
    assert [np.flatnonzero(each).tolist() for each in rows.wanted] == [[3, 4], [4, 5, 6], []]
    assert [np.flatnonzero(each).tolist() for each in rows.early()] == [[1, 2], [1, 2, 3], []]
    rows = Rows(np.zeros((1, 4), np.int32), np.ones((1, 4), bool), ("text",)).without_first()
    assert rows.wanted.tolist() == [[False, True, True, True]] and not rows.early().any()


def test_a_head_knows_what_is_said_most_in_the_rows_it_learns_from():
    held, learned = [3, 3, 4, 4, 4, 4], [3, 6, 5, 9, 9, 8]
    rows = answer_rows([held[:3], learned[:3]], [held[3:], learned[3:]], ("a", "a"), 6, 3).without_first()
    # Of the answer 9 and 8 count one each, of the prompt 5 and the answer's first 9 half as much.
    assert frequent_tokens(rows, 12, 1).tolist() == [9]
    assert frequent_tokens(rows, 12, 3).tolist() == [5, 8, 9]
    assert frequent_tokens(rows, 12, 5).tolist() == [0, 1, 5, 8, 9]  # the lowest fill up; 4 is held out


@pytest.fixture(scope="module")
def begun(tmp_path_factory, stories_model, text):
    checkpoint = resolve(stories_model)
    rows = text_rows(open_tokenizer(checkpoint), 512, text.read_text(), 32).without_first()
    states = teacher_states(checkpoint, rows, "float32", tmp_path_factory.mktemp("states") / "states.npy", QUIET)
    return checkpoint, rows, states, HeadStudent.of(checkpoint, rows, states, VOCAB, 32, 0)


def test_states_are_what_the_target_makes_its_logits_of(begun, stories_model):
    checkpoint, rows, states, _ = begun
    model, index = make_module(checkpoint.config, np.dtype("float32")), jnp.arange(32, dtype=jnp.int32)
    params = {path: jnp.asarray(checkpoint.read(path)) for path in checkpoint.specs()}
    for number in (0, len(rows.ids) - 1):
        want = apply_params(model, params, jnp.asarray(rows.ids[number]), index, jnp.zeros_like(index), index)
        have = states[number].astype(np.float32) @ checkpoint.read("embed_tokens/embedding").T
        np.testing.assert_allclose(have, want, atol=0.02)


def test_a_position_is_read_with_the_state_before_it_and_none_is_held_out(begun):
    _, rows, states, (student, _, _) = begun
    pool = student.pool(rows)
    numbers, places = np.divmod(pool, 32)
    assert places.min() == 1 and not rows.held_out()[numbers].any()
    assert set(numbers.tolist()) == set(np.flatnonzero(~rows.held_out()).tolist())
    batch = student.batch(rows, pool[[5, 40]])
    for at, position in enumerate((5, 40)):
        row, place = numbers[position], places[position]
        np.testing.assert_array_equal(batch.before[at], states[row, place - 1])
        np.testing.assert_array_equal(batch.at[at], states[row, place])
        assert student.tokens[batch.tokens[at]] == rows.ids[row, place]
    answered = answer_rows([[1, 2, 3]] * 2, [[7, 8, 9]] * 2, ("a",) * 2, 32, 3).without_first()
    assert student.batch(answered, student.pool(answered)).weights.tolist() == [0.5, 0.5, 1, 1]
    assert student.wanted(answered, 0).weights.tolist() == [1, 1]


def test_a_token_that_the_head_does_not_know_is_a_miss(begun):
    checkpoint, rows, states, (student, fixed, params) = begun
    logits = states[0].astype(np.float32) @ checkpoint.read("embed_tokens/embedding").T
    said = logits[rows.wanted[0]].argmax(axis=-1)
    perfect = {**params, "mix/kernel": 40 * params["mix/kernel"]}

    def agreed(tokens: np.ndarray) -> float:
        """How often a head of these tokens is right that reads the very state which decides."""
        known = checkpoint.read("embed_tokens/embedding")[tokens].astype(np.float32)
        of = HeadStudent(student.module.clone(vocab=tokens.size), tokens, student.places, states)
        batch = of.wanted(rows, 0)
        batch = batch._replace(before=batch.at)
        fixed_ = fixed._replace(student={FROZEN: jnp.asarray(known)})
        return float(make_agreement(of)(fixed_, perfect, batch)[0])

    everything, rest = np.arange(512, dtype=np.int32), np.setdiff1d(np.arange(512), said[:1]).astype(np.int32)
    assert agreed(everything) == len(said)
    assert agreed(rest) == (said != said[0]).sum() < len(said)


def test_positions_of_no_weight_teach_nothing(begun):
    _, rows, _, (student, fixed, params) = begun
    optimizer = optax.sgd(0.1)
    step = make_step(student, optimizer)
    batch, key = student.batch(rows, student.pool(rows)[:16]), jax.random.key(0)
    half = batch._replace(weights=np.repeat([1, 0], 8).astype(np.float32))
    counted = half.weights[:, None] > 0
    other = half._replace(before=np.where(counted, half.before, 1), at=np.where(counted, half.at, 1))

    def after(which: HeadBatch, key: jax.Array = key) -> jax.Array:
        state = State(jax.tree.map(jnp.copy, params), optimizer.init(params))
        return step(fixed, state, which, key)[0].params["down/kernel"]

    np.testing.assert_array_equal(after(half), after(other))
    assert not np.array_equal(after(half), after(batch))
    assert not np.array_equal(after(half), after(half, jax.random.key(1))), "dropout follows the key"
