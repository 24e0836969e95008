"""A look-ahead head from the step to the proposer: what it foresees, when it is asked, and what becomes of it."""

import dataclasses
import random
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.serving.head import HeadProposer
from jaxserve.serving.ngram_table import NgramTable
from jaxserve.serving.plan import Row, StepResult
from jaxserve.serving.request import Status
from jaxserve.serving.speculation import Speculation
from jaxserve.serving.step import Bucket, InputLayout, step_function, unpack_rows
from tests.serving import toy_model as toy
from tests.serving.simulation import LIMITS, Simulation, assert_as_alone, request
from tests.serving.test_speculation import CHEAP, SIZES, Fixed, measured, sequence

BUCKET = Bucket("step", 8, 4)


def foresight(limits=LIMITS, costs=CHEAP):
    speculation = Speculation(HeadProposer(), limits.row_sizes)
    speculation.costs = measured(**costs)
    return speculation


# ---- the step


@pytest.fixture(scope="module")
def compiled():
    limits = dataclasses.replace(toy.LIMITS, look_ahead=True)

    def forward(params, caches, args):
        caches, outputs = toy.toy_forward(params, caches, args)
        return caches, outputs | {"hidden": outputs["logits"][:, :3]}

    def head(rate, params, hidden, tokens):
        return tokens * 2 + params["offset"].astype(jnp.int32), rate + 0 * hidden[:, 0] * params["offset"]

    heads = {1: partial(head, 0.75), 4: partial(head, 0.25)}
    specs = (toy.PARAMS, toy.cache_specs(limits), toy.st.state_specs(limits), InputLayout.of(BUCKET, limits).spec)
    step = step_function(forward, BUCKET, limits, heads)
    program = jax.jit(step, donate_argnums=(1, 2)).lower(*specs).compile()
    return limits, program, toy.compile_others(limits)


def test_a_step_foresees_only_when_asked(compiled):
    limits, program, others = compiled
    runner = toy.make_runner({BUCKET: program}, others, limits)
    runner.warmup()
    seqs = [toy.make_sequence(str(i), [i + 1, 7], i, [i]) for i in range(3)]
    results: list[StepResult] = []
    for asked in (True, False):
        for seq in seqs:
            runner.admit(seq)
        plan = toy.step(*(toy.make_row(seq, 0, 2) for seq in seqs))
        plan.look_ahead = asked
        results.append(runner.dispatch(plan).result())
    assert results[0].tokens == results[1].tokens, "the head changes nothing of what is chosen"
    assert results[0].foreseen == [(2 * token, 0.25) for token in results[0].tokens]
    assert results[1].foreseen == [(0, 0.0)] * 3
    assert runner.compilations == 0
    runner.close()


def test_a_lone_sequence_asks_the_head_of_one_row_about_its_last_token(compiled):
    limits, program, others = compiled
    runner = toy.make_runner({BUCKET: program}, others, limits)
    seq, (first, second, *_) = toy.make_sequence("a", [3, 7], 0, range(3)), toy.generate([3, 7], 3)
    wrong = (second + 1) % toy.VOCAB
    runner.admit(seq)
    plan = toy.step(Row(seq, 0, 0, 4, (3, 7, first, wrong), 3, 0))
    plan.look_ahead = True
    result = runner.dispatch(plan).result()
    assert result.accepted == [True, True, False] and result.tokens[:2] == [first, second]
    assert result.foreseen == [(0, 0.0), (2 * second, 0.75), (0, 0.0)]
    runner.close()


def test_what_a_step_foresees_is_checked_by_the_next_without_the_host(compiled):
    limits, program, others = compiled
    runner = toy.make_runner({BUCKET: program}, others, limits)
    prompts = ([3, 7], [4, 9, 5])
    wanted = [toy.generate(prompt, 4) for prompt in prompts]
    (first, second, *_), other = wanted
    offset = second - 2 * first  # of the first sequence the head says the right token
    assert (2 * other[0] + offset) % toy.VOCAB != other[1]
    runner.params = {"offset": jax.device_put(np.float32(offset))}
    seqs = [toy.make_sequence(str(i), prompt, i, range(3 * i, 3 * i + 3)) for i, prompt in enumerate(prompts)]
    for seq in seqs:
        runner.admit(seq)
    asked = toy.step(*(toy.make_row(seq, 0, seq.prompt_len) for seq in seqs))
    asked.look_ahead = True
    runner.dispatch(asked)
    checked = runner.dispatch(toy.step(*(Row(seq, seq.slot, seq.prompt_len, 2, (), 2, 3) for seq in seqs)))
    result = checked.result()
    assert result.accepted == [True, True, True, False]
    assert result.tokens[:3] == [*wanted[0][1:3], wanted[1][1]]
    after = runner.dispatch(toy.step(*(toy.make_row(seq, 9, 1, from_state=True, pages_from=3) for seq in seqs)))
    assert after.result().tokens == [wanted[0][3], wanted[1][2]], "each goes on from what it generated"
    runner.close()


def test_rows_without_a_head_hold_no_more_than_before():
    assert len(unpack_rows(np.zeros((3, 4), np.int32))) == 4
    assert "look_ahead" not in InputLayout.of(BUCKET, toy.LIMITS).unpack(
        np.zeros(InputLayout.of(BUCKET, toy.LIMITS).size)
    )


# ---- when it is asked


def test_the_head_is_asked_where_its_word_would_pay():
    speculation = foresight()
    assert speculation.looks_ahead(1, 15)
    assert not speculation.looks_ahead(16, 0), "there is no room for proposals"
    assert not Speculation(Fixed({}), SIZES).looks_ahead(1, 15), "nobody reads what it says"
    dear = foresight(costs=dict(s1=1e-2, s2=2e-2, s4=4e-2, s8=8e-2, s16=16e-2))
    asked = [dear.looks_ahead(1, 15) for _ in range(200)]
    assert [place for place, each in enumerate(asked) if each] == [64, 129, 194], "a chance now and then"


def test_a_head_that_is_never_right_is_not_asked_any_more():
    speculation, seq = foresight(), sequence([1, 2, 3], 3)
    assert speculation.looks_ahead(1, 15)
    for _ in range(40):
        speculation.proposer.foresee(seq, len(seq.tokens), 5, 0.9)
        seq.tokens.append(6)
        speculation.proposer.rates(seq)
    assert not speculation.looks_ahead(1, 15)


# ---- what it says


def test_what_was_foreseen_is_proposed_and_learned():
    proposer, seq = HeadProposer(), sequence([1, 2, 3, 4], 3)
    proposer.foresee(seq, 4, 9, 0.6)
    [start] = proposer.rates(seq)
    assert start == pytest.approx(0.6) and proposer.propose({seq: 3}) == {seq: [9]}
    seq.tokens.append(9)
    for place in range(5, 25):
        proposer.foresee(seq, place, 50 + place, 0.6)
        [rate] = proposer.rates(seq)
        seq.tokens.append(50 + place)
    assert rate > 0.9, "of twenty that were as sure each was right"
    assert proposer.foresight > 0.8
    proposer.forget(seq)
    assert proposer.rates(seq) == []


@pytest.mark.parametrize("rate", [0.0, float("nan")])
def test_a_rate_that_is_none_says_nothing(rate):
    proposer, seq = HeadProposer(), sequence([1, 2, 3, 4], 3)
    proposer.foresee(seq, 4, 9, rate)
    assert proposer.rates(seq) == [] and proposer.propose({seq: 3}) == {seq: []}


def test_the_likelier_of_head_and_lookup_is_proposed():
    for rate, proposed in ((0.2, [4, 5]), (0.9, [8])):
        proposer, seq = HeadProposer(), sequence([1, 2, 3, 4, 5, 6, 1, 2, 3], 9)
        proposer.foresee(seq, 9, 8, rate)
        assert proposer.propose({seq: 2})[seq] == proposed


def test_a_table_is_asked_beside_the_head():
    table = NgramTable({(3,): (7, 0.5), (7,): (5, 0.9)})
    for rate, proposed, asked in ((0.2, [7, 5], 0.5), (0.9, [8], 0.9)):
        proposer, seq = HeadProposer(table), sequence([1, 2, 3], 3)
        proposer.foresee(seq, 3, 8, rate)
        assert proposer.propose({seq: 2})[seq] == proposed
        assert proposer.rates(seq)[0] == pytest.approx(asked)
        before = proposer.foresight
        seq.tokens.append(7)
        proposer.rates(seq)
        assert proposer.foresight < before, "the table was right, and the head was not"


def test_what_a_step_in_flight_foresees_is_checked_without_waiting_for_it():
    speculation, seq = foresight(), sequence([1, 2, 3], 3)
    seq.num_pending, seq.foreseen = 1, True
    assert not speculation.worth_waiting([seq], 1, 15)
    assert speculation.count_foreseen(1, 1, 15) == 1
    assert speculation.count_foreseen(1, 1, 0) == 0, "there is no room"
    dear = foresight(costs=dict(s1=1e-2, s2=2e-2, s4=4e-2, s8=8e-2, s16=16e-2))
    assert dear.count_foreseen(1, 1, 15) == 0
    # A text that repeats itself promises more than one token.
    copying = sequence([1, 2, 3, 4, 5, 6, 7, 8] * 3, 24)
    copying.num_pending, copying.foreseen = 2, True
    assert speculation.worth_waiting([copying], 1, 15)


def test_steps_overlap_while_the_head_proposes():
    simulation, proposed = Simulation(LIMITS, speculation=foresight()), []
    simulation.runner.foresees = lambda: True
    waits = simulation.scheduler.wants_results
    waited = []
    simulation.scheduler.wants_results = lambda: waited.append(waits()) or waited[-1]
    [seq] = simulation.add(request([2, 3], max_tokens=31, ignore_eos=True, seed=3))
    while simulation.scheduler.has_work:
        plan = simulation.turn()
        proposed += [(row.tokens, row.count, row.samples) for row in plan.rows] if plan else []
    assert_as_alone(seq, LIMITS)
    assert not any(waited), "nothing repeats itself here, so lookup has nothing to say"
    # The prompt's step samples the first token, and each of 15 steps two more.
    assert proposed == [((2, 3), 2, 1)] + [((), 2, 2)] * 15


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 1.0])
def test_answers_are_those_without(accuracy):
    chance = random.Random(1)
    simulation = Simulation(LIMITS, speculation=foresight())
    simulation.runner.foresees = lambda: chance.random() < accuracy
    seqs = [simulation.add(request([2, i], max_tokens=30, ignore_eos=True, seed=i))[0] for i in (3, 4)]
    simulation.run()
    for seq in seqs:
        assert_as_alone(seq, LIMITS)
    speculation = simulation.scheduler.speculation
    assert speculation is not None
    if accuracy == 1.0:
        assert speculation.num_accepted == speculation.num_proposed > 20, "each place's word must reach its place"
        assert simulation.turns < 30


def test_what_is_foreseen_of_a_sequence_that_gave_way_is_not_kept():
    """It is forgotten when it gives way, and the step in flight then still says something of it."""
    limits = dataclasses.replace(LIMITS, num_pages=6)
    simulation = Simulation(limits, False, foresight(limits))
    simulation.runner.foresees = lambda: True
    seqs = [simulation.add(request([2, i], max_tokens=20, ignore_eos=True, seed=i))[0] for i in (3, 4)]
    while simulation.scheduler.has_work:
        simulation.turn()
        for seq in seqs:
            if seq.status is Status.WAITING and seq.admitted_once:
                simulation.scheduler.finish(seq, "abort")
    assert simulation.scheduler.num_preemptions
    speculation = simulation.scheduler.speculation
    assert speculation is not None and isinstance(speculation.proposer, HeadProposer)
    assert not speculation.proposer._said.by_place and not speculation.proposer._indexes
