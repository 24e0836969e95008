"""The loop that keeps the device busy.

One thread owns scheduler and runner. Each turn: take in what arrived, schedule and dispatch step N+1, then wait for
step N, confirm it, turn tokens into text and hand it over. So the device has step N+1 to do while the host does that.
When proposals promise more than this overlap, step N is confirmed before N+1 is planned.
"""

import logging
import queue
import threading
import time
from typing import Any, Literal, NamedTuple

from jaxserve.serving.blocks import BlockPool
from jaxserve.serving.delivery import Delivery, OutputStream
from jaxserve.serving.plan import Pending, Runner, StepPlan, StepResult
from jaxserve.serving.rehearsal import step_seconds
from jaxserve.serving.request import EngineClosed, GenerationRequest, Limits, Output, Sequence
from jaxserve.serving.scheduler import Scheduler
from jaxserve.serving.speculation import Speculation
from jaxserve.serving.stats import PHASES, EngineObserver, NullObserver, PhaseTimes
from jaxserve.text import Tokenizer

log = logging.getLogger(__name__)


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
        speculation: Speculation | None = None,
        hang_seconds: float = 60.0,
    ):
        self.limits = limits
        pool = BlockPool(limits.num_pages, limits.page_size, prefix_caching)
        self.scheduler = Scheduler(limits, pool, speculation)
        self._runner = runner
        self._observer = observer or NullObserver()
        self._delivery = Delivery(self.scheduler, tokenizer, self._observer, self._forget)
        self._hang_seconds = hang_seconds
        self._inbox: queue.SimpleQueue[tuple[Literal["submit", "cancel", "stop"], OutputStream | None]] = (
            queue.SimpleQueue()
        )
        self._phases = {name: PhaseTimes() for name in PHASES}
        self._used = 0.0  # processor seconds of the last dispatch
        self._step_end = 0.0  # when the device had finished the last step that was confirmed
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
        stream = OutputStream(request, lambda stream: self._inbox.put(("cancel", stream)))
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
        """running, waiting, kv_usage (0..1), prefix_queries and prefix_hits (tokens), preemptions, phases; speculation:
        as Speculation.stats, or None.

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
            "speculation": scheduler.speculation.stats() if scheduler.speculation else None,
        }

    @property
    def phases(self) -> dict[str, PhaseTimes]:
        """Seconds a step of each of PHASES; the engine's thread goes on writing them."""
        return self._phases

    def _forget(self, stream: OutputStream) -> None:
        with self._gate:
            self._open.discard(stream)

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
            for index in set(range(stream.request.n)) - stream.ended:
                self._delivery.post(stream, Output(index, finish_reason=reason, error=error))
        self._delivery.hand_over()

    def _rehearse(self) -> None:
        """Measures what steps cost, for speculation, before the first request. One that comes before the programs are
        loaded does not wait for it: then the costs are learned from requests."""
        speculation = self.scheduler.speculation
        if speculation is None or speculation.costs.known:
            return
        while not self._runner.ready:
            if not self._inbox.empty():
                return
            time.sleep(0.005)
        self._busy_since = time.monotonic()
        speculation.costs.begin(step_seconds(self._runner, self.limits))

    def _loop(self) -> None:
        self._rehearse()
        in_flight: _InFlight | None = None
        while not self._stopping:
            if in_flight is None and not self.scheduler.has_work:
                self._busy_since = None
                self._take_in(block=True)
            self._busy_since = time.monotonic()
            self._take_in(block=False)
            begin, confirmed = time.perf_counter(), None
            if in_flight is not None and self.scheduler.wants_results():
                confirmed, in_flight = self._confirm(in_flight), None
            dispatched = self._dispatch_next()
            if in_flight is not None:
                confirmed = self._confirm(in_flight)
            if confirmed is not None:
                self._deliver(confirmed)
                self._record(host=time.perf_counter() - begin - confirmed.waited)
            elif dispatched is None and self.scheduler.has_work:
                raise RuntimeError("the scheduler has work, but nothing can run")
            in_flight = dispatched

    def _take_in(self, block: bool) -> None:
        """Handles the messages that are there; with `block`, waits for one first."""
        while block or not self._inbox.empty():
            kind, stream = self._inbox.get()
            block = False
            if stream is not None:
                if kind == "submit":
                    self._delivery.accept(stream, self.limits)
                else:
                    self._delivery.cancel(stream)
        self._delivery.hand_over()

    def _dispatch_next(self) -> "_InFlight | None":
        begin, used = time.perf_counter(), time.thread_time()
        plan = self.scheduler.schedule()
        scheduled = time.perf_counter()
        if plan is None:
            return None
        for seq in plan.admits:
            self._runner.admit(seq)
            self._delivery.admitted(seq)
        if plan.copies:
            self._runner.copy_pages(plan.copies)
        prepared = time.perf_counter()
        pending = self._runner.dispatch(plan)
        end = time.perf_counter()
        self._record(schedule=scheduled - begin, prepare=prepared - scheduled, dispatch=end - prepared)
        self._used = time.thread_time() - used
        return _InFlight(plan, pending, prepared)

    def _confirm(self, step: "_InFlight") -> "_Confirmed":
        begin = time.perf_counter()
        step.pending.wait()
        waited, used = time.perf_counter(), time.thread_time()
        result = step.pending.result()
        news = self.scheduler.confirm(step.plan, result)
        collected = time.perf_counter()
        self._record(processor=self._used + time.thread_time() - used)
        self._record(wait=waited - begin, collect=collected - waited)
        if (speculation := self.scheduler.speculation) is not None:
            if step.plan.kind == "score" or step.plan.num_prompt_tokens:
                speculation.costs.interrupt()
            else:
                idle = step.begin - self._step_end
                seconds = waited - max(step.begin, self._step_end)
                speculation.measured(step.plan.num_tokens, seconds, idle if idle > 0 else None)
        self._step_end = waited
        return _Confirmed(step.plan, result, news, waited - begin)

    def _deliver(self, step: "_Confirmed") -> None:
        begin, now = time.perf_counter(), time.monotonic()
        for seq, entries in step.news:
            self._delivery.send(seq, entries, step.result, now)
        generated = sum(len(entries) for _, entries in step.news)
        self._observer.step(step.plan.num_prompt_tokens, generated)
        self._delivery.hand_over()
        self._record(deliver=time.perf_counter() - begin)

    def _record(self, **seconds: float) -> None:
        for name, value in seconds.items():
            self._phases[name].add(value)


class _InFlight(NamedTuple):
    plan: StepPlan
    pending: Pending
    begin: float  # when it was handed to the device


class _Confirmed(NamedTuple):
    plan: StepPlan
    result: StepResult
    news: list[tuple[Sequence, range]]
    waited: float  # seconds, for the device
