"""Steps that check proposals give the very tokens of steps that do not."""

from typing import Any

import numpy as np
import pytest

from jaxserve.serving.step import Bucket
from tests.serving import toy_model as toy

PROMPT = [3, 1, 4, 1, 5]
OPTIONS: list[dict[str, Any]] = [
    dict(temperature=0.0),
    dict(temperature=6.0, seed=1),
    dict(temperature=3.0, seed=2, top_p=0.9, presence_penalty=1.5, frequency_penalty=0.5),
    dict(temperature=0.0, repetition_penalty=3.0, presence_penalty=2.0, frequency_penalty=2.0),
    dict(temperature=4.0, seed=3, top_k=3, min_p=0.01, logit_bias=((7, 9.0), (8, 9.0)), repetition_penalty=2.0),
]


@pytest.fixture(scope="module")
def runner():
    buckets = (Bucket("step", 1, 1), Bucket("step", 8, 8), Bucket("step", 32, 16))
    runner = toy.make_runner({bucket: toy.compile_step(bucket) for bucket in buckets}, toy.compile_others())
    runner.warmup()
    yield runner
    assert runner.compilations == 0
    runner.close()


def sequence(slot, **params):
    return toy.make_sequence(str(slot), PROMPT, slot, range(8 * slot, 8 * slot + 8), max_tokens=40, **params)


def run(runner, *rows):
    return runner.dispatch(toy.step(*rows)).result()


def decode(runner, seq, count):
    """`count` tokens, one a step."""
    runner.admit(seq)
    row, tokens = toy.make_row(seq, 0, len(PROMPT)), []
    for _ in range(count):
        tokens += run(runner, row).tokens
        row = toy.make_row(seq, len(PROMPT) + len(tokens) - 1, 1, from_state=True, pages_from=8)
    return tokens


def propose(runner, seq, proposed, from_state=False):
    """One step after what seq holds; the tokens it generated. Appends them."""
    start = len(seq.tokens) - 1
    last = -1 if from_state else seq.tokens[-1]
    row = toy.Row(seq, seq.slot, start, 1 + len(proposed), (last, *proposed), 1 + len(proposed), 8)
    result = run(runner, row)
    made = result.tokens[: sum(result.accepted)]
    seq.tokens += made
    return made


@pytest.mark.parametrize("options", OPTIONS)
def test_proposals_change_no_token_whatever_the_options(runner, options):
    rng = np.random.default_rng(0)
    plain = decode(runner, sequence(1, **options), 30)
    seq = sequence(2, **options)
    runner.admit(seq)
    seq.tokens += run(runner, toy.make_row(seq, 0, len(PROMPT))).tokens
    lengths = []
    while seq.num_outputs < 24:
        right = plain[seq.num_outputs : seq.num_outputs + rng.integers(0, 6)]
        proposed = [token if rng.random() < 0.8 else int(rng.integers(toy.VOCAB)) for token in right]
        lengths.append((len(proposed), len(propose(runner, seq, proposed, from_state=bool(rng.integers(2))))))
    assert seq.output_ids == plain[: seq.num_outputs]
    assert any(made == count + 1 > 2 for count, made in lengths), "everything accepted at least once"
    assert any(1 < made <= count for count, made in lengths), "some accepted, then a rejection"
    state = {name: np.asarray(array)[2] for name, array in runner.state.items()}
    assert state["length"] == len(seq.tokens) - 1 and state["last_token"] == seq.tokens[-1]
    if seq.params.uses_penalties:
        np.testing.assert_array_equal(state["counts"], np.bincount(seq.output_ids, minlength=toy.VOCAB))


def test_proposals_beside_a_prompt_and_plain_decoding(runner):
    plain = toy.generate(PROMPT, 12)
    one, two, three = (sequence(slot) for slot in range(3))
    for seq in (one, two):
        runner.admit(seq)
        seq.tokens += run(runner, toy.make_row(seq, 0, len(PROMPT))).tokens
    runner.admit(three)
    proposed = (plain[1], plain[2], (plain[3] + 1) % toy.VOCAB, plain[4])
    result = run(
        runner,
        toy.make_row(three, 0, 3, samples=0),
        toy.Row(one, 0, len(PROMPT), 5, (plain[0], *proposed), 5, 8),
        toy.make_row(two, len(PROMPT), 1, from_state=True, pages_from=8),
    )
    assert len(result.tokens) == 6 and result.tokens[:3] == plain[1:4] and result.tokens[5] == plain[1]
    assert np.asarray(runner.state["length"])[:3].tolist() == [len(PROMPT) + 3, len(PROMPT) + 1, 3]
    one.tokens += plain[1:4]
    result = run(
        runner,
        toy.make_row(one, len(PROMPT) + 3, 1, from_state=True, pages_from=8),
        toy.make_row(three, 3, 2, pages_from=8),
    )
    assert result.tokens == [plain[4], plain[0]]


def test_log_probabilities_of_every_row(runner):
    seq = sequence(0, logprobs=2)
    runner.admit(seq)
    plain = toy.generate(PROMPT, 4)
    seq.tokens += run(runner, toy.make_row(seq, 0, len(PROMPT))).tokens
    row = toy.Row(seq, 0, len(PROMPT), 3, (plain[0], plain[1], plain[2]), 3, 8)
    result = run(runner, row)
    assert result.tokens == plain[1:4] and result.top is not None
    assert [top[0][0] for top in result.top] == plain[1:4] and {len(top) for top in result.top} == {2}
    np.testing.assert_allclose(result.logprob, [10 - toy.LOG_TOTAL] * 3, atol=1e-6)


def test_min_tokens_hold_for_each_row(runner):
    """The stop id is the likeliest token after each accepted proposal, and banned before min_tokens."""
    plain = toy.generate(PROMPT, 4)
    seq = sequence(0, min_tokens=3, stop_token_ids=(plain[2], plain[1]))
    runner.admit(seq)
    seq.tokens += run(runner, toy.make_row(seq, 0, len(PROMPT))).tokens
    second = (plain[1] + 1) % toy.VOCAB  # the toy's second best
    row = toy.Row(seq, 0, len(PROMPT), 3, (plain[0], second, 9), 3, 8)
    chosen = run(runner, row).tokens
    assert chosen[0] == second and chosen[1] == toy.checksum([*PROMPT, plain[0], second])
