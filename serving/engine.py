"""The loop that keeps the device busy, and the streams that carry its results to the HTTP side.

One thread owns scheduler and runner. Each turn: take in what arrived, schedule and dispatch step N+1, then wait for
step N, confirm it, turn tokens into text and hand it over. So the device has step N+1 to do while the host does that.
"""

import asyncio
import dataclasses
import logging
import queue
import threading
import time
from typing import Any, Literal

from jaxserve.serving.blocks import BlockPool
from jaxserve.serving.output import TextAssembler, prompt_logprobs, token_logprob
from jaxserve.serving.plan import Pending, Runner, StepPlan, StepResult
from jaxserve.serving.request import EngineClosed, GenerationRequest, Limits, Output, Sequence, Status, Usage
from jaxserve.serving.scheduler import Scheduler
from jaxserve.serving.stats import PHASES, EngineObserver, NullObserver, PhaseTimes, RequestTimings
from jaxserve.text import Tokenizer

log = logging.getLogger(__name__)


class OutputStream:
    """The outputs of one request, for one asyncio task. Ends after every choice has finished."""

    def __init__(self, request: GenerationRequest, engine: "Engine"):
        self.request = request
        self.usage = Usage(prompt_tokens=len(request.prompt_ids))
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Output] = asyncio.Queue()
        self._unread = request.n  # choices whose end has not been read
        self._choices: list[_Choice] = []  # the engine thread's, like the next
        self._ended: set[int] = set()  # choices whose end was queued
        self._submitted = time.monotonic()

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> Output:
        if self._unread == 0:
            raise StopAsyncIteration
        output = await self._queue.get()
        self._unread -= output.finish_reason is not None
        self.usage.completion_tokens += len(output.token_ids)
        return output

    def cancel(self) -> None:
        """Ends what has not ended, with finish_reason 'abort'; its pages are free within a step. From any thread."""
        self._engine._inbox.put(("cancel", self))


@dataclasses.dataclass(eq=False, slots=True)
class _Choice:
    seq: Sequence
    stream: OutputStream
    text: TextAssembler
    prompt_sent: bool = False
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None


class Engine:
    """Runs requests on a runner. `submit` is for asyncio code; everything else may be called from any thread."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        limits: Limits,
        observer: EngineObserver | None = None,
        *,
        prefix_caching: bool = True,
        hang_seconds: float = 60.0,
    ):
        self.limits = limits
        self.scheduler = Scheduler(limits, BlockPool(limits.num_pages, limits.page_size, prefix_caching))
        self._runner = runner
        self._tokenizer = tokenizer
        self._observer = observer or NullObserver()
        self._hang_seconds = hang_seconds
        self._inbox: queue.SimpleQueue[tuple[Literal["submit", "cancel", "stop"], OutputStream | None]] = (
            queue.SimpleQueue()
        )
        self._choices: dict[Sequence, _Choice] = {}
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, Output]]] = {}
        self._phases = {name: PhaseTimes() for name in PHASES}
        self._used = 0.0  # processor seconds of the last dispatch
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._gate = threading.Lock()  # guards the next two: every stream that passes it is brought to an end
        self._closed: str | None = "the engine has not been started"
        self._open: set[OutputStream] = set()
        self._stopping = False
        self._failed = False
        self._busy_since: float | None = None  # when the turn in progress began; None: waiting for requests

    # ---- for the HTTP side

    def start(self) -> None:
        """Starts the loop's thread. Once; a stopped engine stays stopped."""
        self._closed = None
        self._thread.start()

    def submit(self, request: GenerationRequest) -> OutputStream:
        """Queues a request. Raises InvalidRequest if it can never run, EngineClosed if nothing can."""
        request.validate(self.limits)
        if self._hangs():
            raise EngineClosed("the engine does not respond")
        stream = OutputStream(request, self)
        with self._gate:
            if self._closed:
                raise EngineClosed(self._closed)
            self._open.add(stream)
            self._inbox.put(("submit", stream))
        return stream

    @property
    def healthy(self) -> bool:
        """False when the loop does not run (not started, stopped, died) or a step has not returned for hang_seconds."""
        return self._thread.is_alive() and not self._failed and not self._hangs()

    def drain(self, timeout: float) -> bool:
        """Refuses new requests and blocks until the accepted ones have ended. False when the timeout came first."""
        with self._gate:
            self._closed = self._closed or "the server is shutting down"
        deadline = time.monotonic() + timeout
        while self._open and self._thread.is_alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def stop(self, timeout: float = 10.0) -> None:
        """Ends every open stream with 'abort', and the thread after the step in flight."""
        with self._gate:
            self._closed = self._closed or "the server is shutting down"
        self._stopping = True
        self._inbox.put(("stop", None))
        if self._thread.is_alive():
            self._thread.join(timeout)

    def stats(self) -> dict[str, Any]:
        """running, waiting, kv_usage (0..1), prefix_queries and prefix_hits (tokens), preemptions, phases.

        phases: seconds a step for each of PHASES: count, seconds, mean, max, and a histogram (buckets below bounds).
        'wait' is the device's time that nothing hid; 'host' is the sum of the others. 'processor' is the engine
        thread's own processor time in schedule, prepare, dispatch and collect: less than theirs where the device's
        threads want the same cores.
        """
        scheduler = self.scheduler
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "kv_usage": scheduler.pool.usage,
            "prefix_queries": scheduler.pool.query_tokens,
            "prefix_hits": scheduler.pool.hit_tokens,
            "preemptions": scheduler.num_preemptions,
            "phases": {name: times.summary() for name, times in self._phases.items()},
        }

    @property
    def phases(self) -> dict[str, PhaseTimes]:
        """Seconds a step of each of PHASES; the engine's thread goes on writing them."""
        return self._phases

    def _hangs(self) -> bool:
        since = self._busy_since
        return since is not None and time.monotonic() - since > self._hang_seconds

    # ---- the loop

    def _run(self) -> None:
        reason, error = "abort", None
        try:
            self._loop()
        except Exception:  # whatever it was, nobody may be left waiting for the next token
            log.exception("the engine's loop died")
            self._failed = True
            reason, error = "error", "the engine failed; its log says why"
        self._end_everything(reason, error)

    def _end_everything(self, reason: str, error: str | None) -> None:
        """Ends every stream without trusting what may have failed: scheduler, runner, tokenizer."""
        with self._gate:
            self._closed = error or self._closed
            streams, self._open = self._open, set()
        self._busy_since = None
        for stream in streams:
            for index in set(range(stream.request.n)) - stream._ended:
                self._post(stream, Output(index, finish_reason=reason, error=error))
        self._hand_over()

    def _loop(self) -> None:
        in_flight: tuple[StepPlan, Pending] | None = None
        while not self._stopping:
            if in_flight is None and not self.scheduler.has_work:
                self._busy_since = None
                self._take_in(block=True)
            self._busy_since = time.monotonic()
            self._take_in(block=False)
            begin = time.perf_counter()
            dispatched = self._dispatch_next()
            if in_flight is not None:
                waited = self._collect(*in_flight)
                self._record(host=time.perf_counter() - begin - waited)
            elif dispatched is None and self.scheduler.has_work:
                raise RuntimeError("the scheduler has work, but nothing can run")
            in_flight = dispatched

    def _take_in(self, block: bool) -> None:
        """Handles the messages that are there; with `block`, waits for one first."""
        while block or not self._inbox.empty():
            kind, stream = self._inbox.get()
            block = False
            if stream is not None:
                self._accept(stream) if kind == "submit" else self._cancel(stream)
        self._hand_over()

    def _accept(self, stream: OutputStream) -> None:
        request = stream.request
        for index in range(request.n):
            parent = stream._choices[0].seq if index else None
            seq = Sequence.create(request, self.limits, index, parent)
            choice = _Choice(seq, stream, TextAssembler(self._tokenizer, request.params))
            stream._choices.append(choice)
            self._choices[seq] = choice
            self.scheduler.add(seq)
            if seq.status is Status.FINISHED:
                self._send_end(choice, Output(index))

    def _cancel(self, stream: OutputStream) -> None:
        for choice in stream._choices:
            if choice.seq in self._choices:
                self.scheduler.finish(choice.seq, "abort")
                self._send_end(choice, Output(choice.seq.index))

    def _dispatch_next(self) -> tuple[StepPlan, Pending] | None:
        begin, used = time.perf_counter(), time.thread_time()
        plan = self.scheduler.schedule()
        scheduled = time.perf_counter()
        if plan is None:
            return None
        for seq in plan.admits:
            self._runner.admit(seq)
            choice = self._choices[seq]
            choice.admitted = choice.admitted or time.monotonic()
            if seq.index == 0:
                choice.stream.usage.cached_tokens = seq.cached_tokens
        if plan.copies:
            self._runner.copy_pages(plan.copies)
        prepared = time.perf_counter()
        pending = self._runner.dispatch(plan)
        self._record(schedule=scheduled - begin, prepare=prepared - scheduled, dispatch=time.perf_counter() - prepared)
        self._used = time.thread_time() - used
        return plan, pending

    def _collect(self, plan: StepPlan, pending: Pending) -> float:
        """Confirms and delivers a step; returns the seconds spent waiting for the device."""
        begin = time.perf_counter()
        pending.wait()
        waited, used = time.perf_counter(), time.thread_time()
        result = pending.result()
        news = self.scheduler.confirm(plan, result)
        collected = time.perf_counter()
        self._record(processor=self._used + time.thread_time() - used)
        now = time.monotonic()
        for seq, row in news:
            self._send(self._choices[seq], row, result, now)
        generated = sum(row is not None for _, row in news)
        self._observer.step(plan.num_prompt_tokens, generated)
        self._hand_over()
        self._record(wait=waited - begin, collect=collected - waited, deliver=time.perf_counter() - collected)
        return waited - begin

    # ---- results

    def _send(self, choice: _Choice, row: int | None, result: StepResult, now: float) -> None:
        """Queues what one confirmed step brought for one choice, and looks for stop strings in it."""
        seq = choice.seq
        output = Output(seq.index)
        if row is not None:
            token = result.tokens[row]
            output.token_ids.append(token)
            if seq.params.logprobs is not None:
                output.logprobs = [token_logprob(seq, row, result)]
            ended_it = seq.finish_reason == "stop"  # an EOS or stop id: no stop string has been looked for yet
            if not ended_it or seq.params.include_stop_str_in_output:
                output.text, hit = choice.text.push(token, seq.num_outputs)
                if hit is not None:
                    self._stop_at(seq, hit)
            self._clock_token(choice, now)
        if seq.status is Status.FINISHED:
            self._send_end(choice, output)
        else:
            self._queue_output(choice, output)

    def _stop_at(self, seq: Sequence, stop: str) -> None:
        """A stop string was completed, maybe by the token that also was the last one allowed."""
        self.scheduler.finish(seq, "stop")
        seq.finish_reason, seq.stop_reason = "stop", stop

    def _send_end(self, choice: _Choice, output: Output) -> None:
        """Queues the last output of a choice, with all text that was held back unless a stop string cut it off."""
        seq = choice.seq
        if not isinstance(seq.stop_reason, str):
            text, hit = choice.text.flush()
            output.text += text
            if hit is not None and seq.finish_reason in ("stop", "length"):
                self._stop_at(seq, hit)
        output.finish_reason, output.stop_reason, output.error = seq.finish_reason, seq.stop_reason, seq.error
        self._queue_output(choice, output)
        del self._choices[seq]
        stream = choice.stream
        stream._ended.add(seq.index)
        if len(stream._ended) == stream.request.n:
            with self._gate:
                self._open.discard(stream)
        self._observer.request_finished(_timings(choice))

    def _queue_output(self, choice: _Choice, output: Output) -> None:
        if not choice.prompt_sent:
            choice.prompt_sent = True
            output.prompt_logprobs = prompt_logprobs(choice.seq)
        self._post(choice.stream, output)

    def _post(self, stream: OutputStream, output: Output) -> None:
        self._outbox.setdefault(stream._loop, []).append((stream, output))

    def _clock_token(self, choice: _Choice, now: float) -> None:
        if choice.last_token is None:
            choice.first_token = now
            self._observer.first_token(now - choice.stream._submitted)
        else:
            self._observer.inter_token(now - choice.last_token)
        choice.last_token = now

    def _hand_over(self) -> None:
        """One wake-up a loop, whatever the number of outputs."""
        for loop, outputs in self._outbox.items():
            try:
                loop.call_soon_threadsafe(_deliver, outputs)
            except RuntimeError:  # the loop is closed: nobody reads these streams any more
                for stream, _ in outputs:
                    stream.cancel()
        self._outbox.clear()

    def _record(self, **seconds: float) -> None:
        for name, value in seconds.items():
            self._phases[name].add(value)


def _deliver(outputs: list[tuple[OutputStream, Output]]) -> None:
    for stream, output in outputs:
        stream._queue.put_nowait(output)


def _timings(choice: _Choice) -> RequestTimings:
    submitted, seq = choice.stream._submitted, choice.seq

    def between(begin: float | None, end: float | None) -> float | None:
        return None if begin is None or end is None else end - begin

    return RequestTimings(
        finish_reason=seq.finish_reason or "abort",
        prompt_tokens=seq.prompt_len,
        generated_tokens=seq.num_outputs,
        queue=between(submitted, choice.admitted),
        prefill=between(choice.admitted, choice.first_token),
        decode=between(choice.first_token, choice.last_token),
        first_token=between(submitted, choice.first_token),
        end_to_end=time.monotonic() - submitted,
    )
