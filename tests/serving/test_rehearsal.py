"""What steps cost is known before the first request, and nobody can tell that it was measured."""

import asyncio
import dataclasses
import time

import pytest

from jaxserve.serving import rehearsal
from jaxserve.serving.engine import Engine
from jaxserve.serving.rehearsal import step_seconds
from jaxserve.serving.speculation import StepCosts
from tests.serving.engine_support import LIMITS, TOKENIZER, expected, read, request, serve, until
from tests.serving.fake_device import FakeRunner
from tests.serving.proposals import guessing


class Clocked(FakeRunner):
    """A step of T tokens takes T + 4 ticks of `clock`, a first one twice as long."""

    def __init__(self, limits, tick):
        super().__init__(limits)
        self.clock, self.tick = 0.0, tick

    def dispatch(self, plan):
        first = plan.num_tokens not in [tokens for _, tokens in self.plans]
        self.clock += (plan.num_tokens + 4) * (1 + first) * self.tick
        return super().dispatch(plan)


@pytest.fixture
def clocked(monkeypatch):
    def make(limits, tick=1e-3):
        runner = Clocked(limits, tick)
        monkeypatch.setattr(rehearsal.time, "perf_counter", lambda: runner.clock)
        return runner

    return make


def test_sizes_take_what_undisturbed_steps_of_them_take(clocked):
    runner = clocked(LIMITS)
    assert step_seconds(runner, LIMITS) == pytest.approx({size: (size + 4) / 1000 for size in (1, 2, 4, 8, 16)})
    assert [tokens for _, tokens in runner.plans] == [1, 2, 4, 8, 16] * 3


def test_a_size_that_was_always_disturbed_takes_what_the_next_larger_does(clocked):
    runner = clocked(LIMITS)
    dispatch = runner.dispatch

    def disturbed(plan):
        runner.clock += 0.05 * (plan.num_tokens == 2)
        return dispatch(plan)

    runner.dispatch = disturbed
    assert step_seconds(runner, LIMITS)[2] == pytest.approx(0.008)


@pytest.mark.parametrize(
    ("lowered", "sizes"),
    [
        (dict(max_num_seqs=1), [1, 2, 4, 8, 16]),
        (dict(num_pages=1), [1, 2, 4]),
        (dict(max_model_len=9), [1, 2, 4, 8]),
        (dict(max_model_len=1, num_pages=1), [1]),
        (dict(token_budget=6), [1, 2, 4, 6]),
    ],
)
def test_what_does_not_fit_is_left_out(clocked, lowered, sizes):
    limits = dataclasses.replace(LIMITS, **lowered)
    assert list(step_seconds(clocked(limits), limits)) == sizes


def test_slow_steps_are_few(clocked):
    """Each is measured once as far as a quarter of a second goes, and one step more than that at most."""
    runner = clocked(LIMITS, tick=0.012)
    assert list(step_seconds(runner, LIMITS)) == [1, 2] and len(runner.plans) == 2


def test_costs_begin_with_what_was_measured_and_take_the_pace_of_requests():
    costs = StepCosts((1, 2, 4))
    gains = [0.9, 0.8, 0.7]
    assert not costs.known
    costs.begin({1: 0.5, 2: 0.6, 4: 5.0})
    assert costs.known and costs.best(1, gains, [0.0] * 3)[0] == 1
    costs.add(2, 1.2)
    assert (costs.seconds(1), costs.seconds(2), costs.seconds(4)) == pytest.approx((1.0, 1.2, 10.0))
    for _ in range(5):  # later steps say otherwise
        costs.add(1, 1.0)
        costs.add(4, 1.3)
    assert costs.seconds(4) == pytest.approx(1.3) and costs.best(1, gains, [0.0] * 3)[0] == 3
    nothing = StepCosts((1, 2, 4))
    nothing.begin({})
    assert not nothing.known and nothing.best(1, gains, [0.0] * 3)[0] == 0


ASKED = [request([2 + i % 5] * (1 + i * 3 % 20), n=1 + i % 2, max_tokens=9, seed=i, logprobs=i % 3) for i in range(12)]


async def first_answer(engine):
    return await read(engine.submit(ASKED[1]))


def test_no_trace_is_left_in_an_engine():
    """Pages, slots, statistics and what the observer is told are those of an engine that did nothing yet."""
    told = []

    class Observer:
        def __getattr__(self, name):
            return lambda *what: told.append((name, what))

    runner, speculation = FakeRunner(LIMITS), guessing(LIMITS, accuracy=0.6)
    fresh = Engine(FakeRunner(LIMITS), TOKENIZER, LIMITS, speculation=guessing(LIMITS, accuracy=0.6)).stats()

    async def main(engine):
        await until(lambda: speculation.costs.known and engine._busy_since is None)
        assert engine.stats() == fresh and not told and engine.healthy
        engine.scheduler.check_integrity()
        plans = len(runner.plans)
        answers = await asyncio.gather(*(read(engine.submit(each)) for each in ASKED))
        await until(lambda: engine.stats()["kv_usage"] == 0)
        return plans, answers, engine.stats()["prefix_queries"]

    plans, answers, queries = serve(main, runner, observer=Observer(), speculation=speculation)
    assert plans == 3 * len(LIMITS.row_sizes)
    for asked, choices in zip(ASKED, answers, strict=True):
        assert [choice.token_ids for choice in choices] == [expected(asked, i)[0] for i in range(asked.n)]
    assert queries == sum(len(asked.prompt_ids) for asked in ASKED)
    again = FakeRunner(LIMITS)  # what is known is not measured again
    serve(first_answer, again, speculation=speculation)
    assert again.plans[0] == ("step", len(ASKED[1].prompt_ids))


def test_without_speculation_nothing_is_measured():
    runner = FakeRunner(LIMITS)
    serve(first_answer, runner)
    assert runner.plans[0] == ("step", len(ASKED[1].prompt_ids))


def test_a_request_does_not_wait_for_programs_it_does_not_need():
    runner = FakeRunner(LIMITS)
    runner.ready = False
    serve(first_answer, runner, speculation=guessing(LIMITS, accuracy=0.6))
    assert runner.plans[0] == ("step", len(ASKED[1].prompt_ids))


def test_it_begins_when_the_programs_are_loaded():
    runner, speculation = FakeRunner(LIMITS), guessing(LIMITS, accuracy=0.6)
    runner.ready = False

    async def main(engine):
        await asyncio.sleep(0.02)
        assert not runner.plans
        runner.ready = True
        await until(lambda: speculation.costs.known)

    serve(main, runner, speculation=speculation)


def test_a_device_that_hangs_is_seen():
    runner = FakeRunner(LIMITS)
    dispatch = runner.dispatch

    def slow(plan):
        time.sleep(0.2)
        return dispatch(plan)

    async def main(engine):
        await until(lambda: not engine.healthy)
        await until(lambda: engine.healthy)

    runner.dispatch = slow
    serve(main, runner, speculation=guessing(LIMITS), hang_seconds=0.05)
