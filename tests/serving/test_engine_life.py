"""The engine's life: overlap, cancellation, crashes, hangs, draining, and what it measures."""

import asyncio
import dataclasses
import subprocess
import sys
import threading

import pytest

from jaxserve.serving.engine import Engine
from jaxserve.serving.plan import StepPlan, StepResult
from jaxserve.serving.request import EngineClosed, Limits
from jaxserve.serving.stats import BOUNDS, PhaseTimes, RequestTimings
from jaxserve.text.tokenizer import SpecialTokens, Tokenizer
from tests.serving.engine_support import (
    LIMITS,
    TOKENIZER,
    Pieces,
    read,
    request,
    serve,
    until,
)
from tests.serving.fake_device import FakeRunner


class Stepper(FakeRunner):
    """Finishes a step only when allowed to, or fails at the n-th."""

    def __init__(self, limits: Limits, fail_at: int | None = None):
        super().__init__(limits)
        self.permits = threading.Semaphore(0)
        self.fail_at = fail_at
        self.log: list[str] = []

    def dispatch(self, plan: StepPlan):
        number = len(self.plans)
        if number == self.fail_at:
            raise RuntimeError("out of memory at /secret/path")
        self.log.append(f"dispatch {number}")
        done = super().dispatch(plan)
        done.wait = self.permits.acquire  # type: ignore[method-assign]
        return done


def test_cancel_frees_the_pages_within_a_step():
    runner = Stepper(LIMITS)

    async def main(engine):
        stream = engine.submit(request([2] * 10, n=2, max_tokens=40, ignore_eos=True))
        runner.permits.release(6)
        await until(lambda: len(runner.plans) == 8)  # two in flight: six allowed, one waited for, one ahead
        assert engine.stats()["kv_usage"] > 0
        stream.cancel()
        stream.cancel()
        runner.permits.release(1)  # the loop is waiting for this one
        await until(lambda: engine.stats()["running"] == 0)
        runner.permits.release(1)
        await until(lambda: engine.stats()["kv_usage"] == 0)
        choices = await read(stream)
        assert {choice.last.finish_reason for choice in choices} == {"abort"}
        assert len(runner.plans) == 8

    serve(main, runner, prefix_caching=False)


def test_a_step_is_dispatched_before_the_one_before_is_delivered():
    runner = Stepper(LIMITS)
    runner.permits.release(100)

    class Observer:
        def step(self, prompt_tokens, generated_tokens):
            runner.log.append(f"deliver {prompt_tokens} {generated_tokens}")

        def first_token(self, seconds): ...

        def inter_token(self, seconds): ...

        def request_finished(self, timings): ...

    async def main(engine):
        await read(engine.submit(request([2, 3, 4], max_tokens=3, ignore_eos=True)))

    serve(main, runner, observer=Observer())
    assert runner.log == ["dispatch 0", "dispatch 1", "deliver 3 1", "dispatch 2", "deliver 0 1", "deliver 0 1"]


def test_one_wakeup_of_the_loop_a_step():
    async def main(engine):
        loop, wakeups = asyncio.get_running_loop(), []
        original = loop.call_soon_threadsafe

        def counted(callback, *args, **kwargs):
            wakeups.append(callback)
            return original(callback, *args, **kwargs)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        asked = [request([2, i], max_tokens=10, ignore_eos=True) for i in range(3, 7)]
        await asyncio.gather(*(read(engine.submit(each)) for each in asked))
        return len(wakeups)

    runner = FakeRunner(LIMITS)
    assert serve(main, runner) <= len(runner.plans)


def test_a_crash_ends_every_stream_and_the_engine():
    runner = Stepper(LIMITS, fail_at=3)
    runner.permits.release(100)

    async def main(engine):
        asked = [request([2, i], n=2, max_tokens=30, ignore_eos=True) for i in range(3, 9)]
        assert engine.healthy
        for choices in await asyncio.gather(*(read(engine.submit(each)) for each in asked)):
            for choice in choices:
                assert choice.last.finish_reason == "error"
                assert choice.last.error and "secret" not in choice.last.error
        await until(lambda: not engine.healthy)
        with pytest.raises(EngineClosed):
            engine.submit(request([2]))
        assert engine.drain(1)

    serve(main, runner)


def test_a_crash_while_a_request_is_taken_in_ends_all_of_it():
    class Broken(Tokenizer):
        @property
        def utf8_errors(self):
            raise RuntimeError("no tokenizer")

        @utf8_errors.setter
        def utf8_errors(self, value): ...

    async def main():
        engine = Engine(FakeRunner(LIMITS), Broken(Pieces(), SpecialTokens()), LIMITS)
        engine.start()
        for choice in await asyncio.wait_for(read(engine.submit(request([2], n=3))), 10):
            assert choice.last.finish_reason == "error"
        engine.stop()

    asyncio.run(main())


def test_a_hang_is_noticed_and_recovered_from():
    runner = Stepper(LIMITS)

    async def main(engine):
        stream = engine.submit(request([2, 3], max_tokens=2, ignore_eos=True))
        await until(lambda: not engine.healthy)
        with pytest.raises(EngineClosed, match="respond"):
            engine.submit(request([2]))
        runner.permits.release(10)
        await until(lambda: engine.healthy)
        [choice] = await read(stream)
        assert choice.last.finish_reason == "length"
        await asyncio.sleep(0.2)  # idle is not hanging
        assert engine.healthy

    serve(main, runner, hang_seconds=0.1)


def test_drain_finishes_what_runs_and_refuses_the_rest():
    runner = Stepper(LIMITS)

    async def main(engine):
        stream = engine.submit(request([2, 3], max_tokens=4, ignore_eos=True))
        assert not await asyncio.to_thread(engine.drain, 0.05)
        with pytest.raises(EngineClosed):
            engine.submit(request([2]))
        runner.permits.release(100)
        assert await asyncio.to_thread(engine.drain, 10)
        [choice] = await read(stream)
        assert len(choice.token_ids) == 4
        engine.stop()
        assert not engine.healthy

    serve(main, runner)


def test_stop_aborts_what_runs():
    runner = Stepper(LIMITS)

    async def main(engine):
        streams = [engine.submit(request([2, i], n=2, max_tokens=4)) for i in range(3, 9)]
        await until(lambda: len(runner.plans) == 2)
        stopping = asyncio.create_task(asyncio.to_thread(engine.stop))
        await asyncio.sleep(0.02)
        runner.permits.release(100)
        await stopping
        for stream in streams:
            assert {choice.last.finish_reason for choice in await read(stream)} == {"abort"}

    serve(main, runner)


def test_not_started_engine_refuses():
    engine = Engine(FakeRunner(LIMITS), TOKENIZER, LIMITS)

    async def main():
        with pytest.raises(EngineClosed, match="started"):
            engine.submit(request([2]))

    asyncio.run(main())
    assert not engine.healthy
    engine.stop()


def test_a_closed_loop_cancels_its_streams():
    runner = Stepper(LIMITS)

    async def leave():
        engine.submit(request([2, 3], max_tokens=50, ignore_eos=True))
        await until(lambda: len(runner.plans) > 0)

    engine = Engine(runner, TOKENIZER, LIMITS)
    engine.start()
    asyncio.run(leave())
    runner.permits.release(100)
    assert engine.drain(10)
    assert len(runner.plans) < 10 and engine.healthy
    engine.stop()


# ---- measurements


def test_the_observer_hears_of_every_request():
    timings: list[RequestTimings] = []
    gaps: list[float] = []

    class Observer:
        def step(self, prompt_tokens, generated_tokens): ...

        def first_token(self, seconds):
            gaps.append(seconds)

        def inter_token(self, seconds):
            gaps.append(seconds)

        def request_finished(self, timings_):
            timings.append(timings_)

    async def main(engine):
        await read(engine.submit(request([2, 3, 4], n=2, max_tokens=3, ignore_eos=True)))
        await read(engine.submit(request([2, 3], max_tokens=0)))
        return engine.stats()

    stats = serve(main, observer=Observer())
    assert [(each.finish_reason, each.prompt_tokens, each.generated_tokens) for each in timings] == [
        ("length", 3, 3),
        ("length", 3, 3),
        ("length", 2, 0),
    ]
    for each in timings[:2]:
        parts = (each.queue, each.prefill, each.decode)
        assert None not in parts
        assert 0 <= sum(part or 0 for part in parts) <= each.end_to_end
    assert timings[2].queue is None and timings[2].first_token is None
    assert len(gaps) == 6 and all(gap >= 0 for gap in gaps)
    assert stats["phases"]["wait"]["count"] == stats["phases"]["schedule"]["count"] > 0


def test_phase_histogram():
    times = PhaseTimes()
    for seconds in (0.0, 9.9e-6, 1.1e-5, BOUNDS[-1] * 0.99, BOUNDS[-1] * 1.01, 1e6):
        times.add(seconds)
    assert times.buckets[0] == 2 and times.buckets[1] == 1
    assert times.buckets[-2] == 1 and times.buckets[-1] == 2
    assert times.summary()["count"] == sum(times.buckets)


class Instant:
    """A device that takes no time at all, so that what is left is the host's."""

    ready = True

    def admit(self, seq): ...

    def copy_pages(self, copies): ...

    def dispatch(self, plan):
        return self

    def wait(self): ...

    def result(self) -> StepResult:
        return StepResult([5] * 32, [-1.0] * 32, None, [True] * 32, [True] * 32)


def test_host_work_of_a_step_with_32_sequences():
    """Counted in calls that the engine's thread makes: a time would change with what else the machine does."""
    limits = dataclasses.replace(
        LIMITS, max_num_seqs=32, max_model_len=600, page_size=16, num_pages=1200, token_budget=512
    )
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    async def main(engine):
        asked = [request([2 + i % 20] * 40, max_tokens=400, ignore_eos=True, stop=("xyz",)) for i in range(32)]
        await asyncio.gather(*(read(engine.submit(each)) for each in asked))
        return engine.stats()["phases"]["host"]["count"]

    threading.setprofile(count)  # of threads that start from here on
    try:
        steps = serve(main, Instant(), limits)
    finally:
        threading.setprofile(None)
    assert 0 < calls / steps / 32 < 60, "a step calls 53 functions for each sequence, and more would slow every token"


def test_the_host_side_needs_no_jax():
    code = "import sys, jaxserve.serving.engine; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
