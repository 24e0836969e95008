import asyncio
import dataclasses
import pathlib
import subprocess
import sys
import threading
import typing

import pytest

from jaxserve.serving.engine import Engine, OutputStream
from jaxserve.serving.plan import Runner, StepPlan, StepResult
from jaxserve.serving.request import EngineClosed, GenerationRequest, InvalidRequest, Limits, Output, SamplingParams
from jaxserve.serving.stats import BOUNDS, PhaseTimes, RequestTimings
from jaxserve.text.pieces import LeadingSpace
from jaxserve.text.tokenizer import SpecialTokens, Tokenizer
from tests.serving.fake_device import FakeRunner, alone, token_logprob, top_logprobs

LIMITS = Limits(
    max_num_seqs=4,
    max_model_len=64,
    page_size=4,
    num_pages=24,
    vocab_size=30,
    token_budget=16,
    eos_ids=(0, 1),
    score_budget=5,
    max_logprobs=3,
)


class Pieces:
    """A tokenizer's backend: two special tokens, letters, and bytes that make a character only together."""

    vocab_size = 30
    special_ids = frozenset({0, 1})
    leading_space = LeadingSpace("keep")
    utf8_errors = "replace"

    def encode(self, text: str, special: bool) -> list[int]:
        raise NotImplementedError

    def token_bytes(self, token: int) -> bytes:
        halves = [b"\xc3", b"\xa9", b"\xe2\x80", b"\xa6", b" ", b"ab", b"b c", "漢".encode()]
        return [b"<0>", b"<1>", *(bytes([97 + i]) for i in range(20)), *halves][token]

    def token_id(self, piece: str) -> int | None:
        return None

    def added_around(self) -> tuple[list[int], list[int]]:
        return [], []

    def save(self, directory: pathlib.Path) -> dict[str, typing.Any]:
        raise NotImplementedError


TOKENIZER = Tokenizer(Pieces(), SpecialTokens())


def decode(ids: list[int]) -> str:
    return b"".join(Pieces().token_bytes(token) for token in ids if token > 1).decode(errors="replace")


def request(prompt, n=1, **params) -> GenerationRequest:
    params.setdefault("max_tokens", 8)
    params.setdefault("seed", 7)
    return GenerationRequest("r", tuple(prompt), SamplingParams(**params), n)


@dataclasses.dataclass
class Choice:
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list = dataclasses.field(default_factory=list)
    last: Output = dataclasses.field(default_factory=lambda: Output(0))
    prompt_logprobs: list | None = None


async def read(stream: OutputStream) -> list[Choice]:
    choices = [Choice() for _ in range(stream.request.n)]
    async for output in stream:
        choice = choices[output.index]
        assert choice.last.finish_reason is None
        if output.prompt_logprobs is not None:
            assert choice.prompt_logprobs is None
            choice.prompt_logprobs = output.prompt_logprobs
        choice.text += output.text
        choice.token_ids += output.token_ids
        choice.logprobs += output.logprobs or []
        choice.last = output
    assert all(choice.last.finish_reason for choice in choices)
    return choices


def serve(main, runner: Runner | None = None, limits=LIMITS, **options) -> typing.Any:
    """Runs `main(engine)` with a started engine, and leaves nothing behind."""
    engine = Engine(runner or FakeRunner(limits), TOKENIZER, limits, **options)
    engine.start()
    try:
        return asyncio.run(asyncio.wait_for(main(engine), 60))
    finally:
        engine.stop()


def serve_one(asked: GenerationRequest, **options) -> list[Choice]:
    async def main(engine):
        return await read(engine.submit(asked))

    return serve(main, **options)


def expected(asked: GenerationRequest, index: int, limits: Limits = LIMITS) -> tuple[list[int], str, str, typing.Any]:
    """(ids, text, finish reason, stop reason), with the stop strings looked for in the whole text after every token."""
    ids, reason, stop_reason = alone(asked.prompt_ids, asked.params, limits, index)
    for count in range(1, len(ids) + 1):
        text = decode(ids[:count])
        found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in asked.params.stop if stop in text]
        if found:
            _, start, stop = min(found)
            return ids[:count], text[:start], "stop", stop
    ends_in_stop_id = reason == "stop"
    return ids, decode(ids[:-1] if ends_in_stop_id else ids), reason, stop_reason


# ---- results


def test_concurrent_requests_equal_the_same_alone():
    stops = ((), ("a",), ("ab", "q"), ("cd", "é", "b c"), ("nothing like it",))
    asked = [
        request(
            [2 + i % 5] * (1 + i * 7 % 20),
            n=1 + i % 3,
            max_tokens=1 + i * 5 % 23,
            seed=i,
            stop=stops[i % 5],
            ignore_eos=i % 2 == 0,
            stop_token_ids=(9,) if i % 4 == 0 else (),
        )
        for i in range(60)
    ]

    async def main(engine):
        answers = await asyncio.gather(*(read(engine.submit(each)) for each in asked))
        await until(lambda: engine.stats()["kv_usage"] == 0)  # a step may still be in flight
        assert engine.stats()["preemptions"] > 0
        return answers

    limits = dataclasses.replace(LIMITS, num_pages=12)
    for each, choices in zip(asked, serve(main, limits=limits), strict=True):
        for index, choice in enumerate(choices):
            got = (choice.token_ids, choice.text, choice.last.finish_reason, choice.last.stop_reason)
            assert got == expected(each, index)


def test_stop_strings_hit_at_the_last_token_and_can_be_kept():
    full = request([2, 3, 4], max_tokens=12, ignore_eos=True, seed=3)
    [plain] = serve_one(full)
    stop = plain.text[-2:]
    asked = dataclasses.replace(full, params=dataclasses.replace(full.params, stop=(stop,)))
    [cut] = serve_one(asked)
    assert (cut.text, cut.last.finish_reason, cut.last.stop_reason) == (plain.text[:-2], "stop", stop)
    kept = dataclasses.replace(asked.params, include_stop_str_in_output=True)
    [whole] = serve_one(dataclasses.replace(asked, params=kept))
    assert whole.text == plain.text


def test_min_tokens_looks_for_no_stop_string_in_the_first_tokens():
    plain = request([2, 3, 4], max_tokens=12, ignore_eos=True, seed=3)
    [free] = serve_one(plain)
    stop = decode(free.token_ids[:1])
    [stopped] = serve_one(request([2, 3, 4], max_tokens=12, ignore_eos=True, seed=3, stop=(stop,)))
    assert len(stopped.token_ids) == 1
    [held] = serve_one(request([2, 3, 4], max_tokens=12, ignore_eos=True, seed=3, stop=(stop,), min_tokens=5))
    assert len(held.token_ids) > 5


def test_logprobs_usage_and_cached_tokens():
    prompt = tuple(range(2, 14))
    asked = request(prompt, n=2, max_tokens=5, ignore_eos=True, logprobs=2)

    async def main(engine):
        first = await read(engine.submit(request(prompt, max_tokens=1)))
        stream = engine.submit(asked)
        return first, await read(stream), stream.usage

    first, choices, usage = serve(main)
    assert first[0].logprobs == [] and first[0].prompt_logprobs is None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (12, 10, 11)
    for choice in choices:
        assert len(choice.logprobs) == 5
        for i, entry in enumerate(choice.logprobs):
            prefix = (*prompt, *choice.token_ids[:i])
            assert (entry.id, entry.logprob) == (choice.token_ids[i], token_logprob(prefix, entry.id))
            assert entry.top == top_logprobs(prefix, LIMITS)[:2]


def test_echo_gives_prompt_logprobs_and_no_token():
    prompt = tuple(range(2, 15))
    one, two = serve_one(request(prompt, n=2, max_tokens=0, prompt_logprobs=1))
    for choice in (one, two):
        assert (choice.token_ids, choice.text, choice.last.finish_reason) == ([], "", "length")
    assert two.prompt_logprobs is None and one.prompt_logprobs is not None
    assert [entry.id for entry in one.prompt_logprobs] == list(prompt)
    assert (one.prompt_logprobs[0].logprob, one.prompt_logprobs[0].top) == (None, [])
    for i, entry in enumerate(one.prompt_logprobs[1:], 1):
        assert entry.logprob == token_logprob(prompt[:i], prompt[i])
        assert entry.top == top_logprobs(prompt[:i], LIMITS)[:1]


def test_nothing_to_generate_is_an_empty_answer():
    [choice] = serve_one(request([2, 3], max_tokens=0))
    assert (choice.text, choice.token_ids, choice.last.finish_reason) == ("", [], "length")
    [scored] = serve_one(request([2], max_tokens=0, prompt_logprobs=0))
    assert scored.prompt_logprobs is not None and len(scored.prompt_logprobs) == 1


def test_not_finite_ends_only_that_request():
    runner = FakeRunner(LIMITS)
    runner.not_finite = {29}
    good, bad = request([2, 3], stop_token_ids=(29,)), request([2, 29])

    async def main(engine):
        return await asyncio.gather(read(engine.submit(bad)), read(engine.submit(good)))

    [ended], [fine] = serve(main, runner)
    assert (ended.last.finish_reason, ended.token_ids) == ("error", [])
    assert "not finite" in (ended.last.error or "")
    assert fine.token_ids == expected(good, 0)[0]


def test_what_can_be_known_is_refused_at_once():
    async def main(engine):
        with pytest.raises(InvalidRequest) as caught:
            engine.submit(request([]))
        assert caught.value.param == "prompt"
        return await read(engine.submit(request([2])))

    assert serve(main)[0].token_ids


# ---- life and death


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


async def until(condition, seconds=10.0):
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "waited in vain"
        await asyncio.sleep(0.002)


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

    def admit(self, seq): ...

    def copy_pages(self, copies): ...

    def dispatch(self, plan):
        return self

    def wait(self): ...

    def result(self) -> StepResult:
        return StepResult([5] * 32, [-1.0] * 32, None, [True] * 32)


def test_host_time_of_a_step_with_32_sequences():
    limits = dataclasses.replace(
        LIMITS, max_num_seqs=32, max_model_len=600, page_size=16, num_pages=1200, token_budget=512
    )

    async def main(engine):
        asked = [request([2 + i % 20] * 40, max_tokens=400, ignore_eos=True, stop=("xyz",)) for i in range(32)]
        await asyncio.gather(*(read(engine.submit(each)) for each in asked))
        return engine.stats()["phases"]["host"]

    host = serve(main, Instant(), limits)
    below = sum(host["buckets"][: 1 + next(i for i, bound in enumerate(BOUNDS) if bound > 0.6e-3)])
    assert below > host["count"] / 2, f"half of the steps must stay below 1 ms: {host}"


def test_the_host_side_needs_no_jax():
    code = "import sys, jaxserve.serving.engine; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
