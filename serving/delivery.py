"""From confirmed tokens to the streams that clients read: text, stop strings, log-probabilities, ends."""

import asyncio
import dataclasses
import time
from collections.abc import Callable

from jaxserve.serving.output import TextAssembler, prompt_logprobs, token_logprob
from jaxserve.serving.plan import StepResult
from jaxserve.serving.request import GenerationRequest, Limits, Output, Sequence, Status, Usage
from jaxserve.serving.scheduler import Scheduler
from jaxserve.serving.stats import EngineObserver, RequestTimings
from jaxserve.text import Tokenizer


class OutputStream:
    """The outputs of one request, for one asyncio task. Ends after every choice has finished."""

    def __init__(self, request: GenerationRequest, cancel: Callable[["OutputStream"], None]):
        self.request = request
        self.usage = Usage(prompt_tokens=len(request.prompt_ids))
        self.choices: list[Choice] = []  # the engine thread's, like the next
        self.ended: set[int] = set()  # choices whose end was queued
        self.submitted = time.monotonic()
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Output] = asyncio.Queue()
        self._unread = request.n  # choices whose end has not been read

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
        self._cancel(self)


@dataclasses.dataclass(eq=False, slots=True)
class Choice:
    """One sequence of a stream, and what was sent of it."""

    seq: Sequence
    stream: OutputStream
    text: TextAssembler
    prompt_sent: bool = False
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None


class Delivery:
    """The choices that have not ended. Belongs to the engine's thread, but for `post` and `hand_over` after its end.

    on_end is called with each stream whose last choice has ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        observer: EngineObserver,
        on_end: Callable[[OutputStream], None],
    ):
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._observer = observer
        self._on_end = on_end
        self._choices: dict[Sequence, Choice] = {}
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, Output]]] = {}

    def accept(self, stream: OutputStream, limits: Limits) -> None:
        """Makes the sequences of a new request and queues them."""
        request = stream.request
        for index in range(request.n):
            parent = stream.choices[0].seq if index else None
            seq = Sequence.create(request, limits, index, parent)
            choice = Choice(seq, stream, TextAssembler(self._tokenizer, request.params))
            stream.choices.append(choice)
            self._choices[seq] = choice
            self._scheduler.add(seq)
            if seq.status is Status.FINISHED:
                self._end(choice, Output(index))

    def cancel(self, stream: OutputStream) -> None:
        """Ends the stream's choices that have not ended with 'abort'."""
        for choice in stream.choices:
            if choice.seq in self._choices:
                self._scheduler.finish(choice.seq, "abort")
                self._end(choice, Output(choice.seq.index))

    def admitted(self, seq: Sequence) -> None:
        """A sequence got its slot."""
        choice = self._choices[seq]
        choice.admitted = choice.admitted or time.monotonic()
        if seq.index == 0:
            choice.stream.usage.cached_tokens = seq.cached_tokens

    def send(self, seq: Sequence, entries: range, result: StepResult, now: float) -> None:
        """Queues what one confirmed step brought for one choice, and looks for stop strings in it.

        entries: of the result, those whose tokens were just appended to the sequence's. Tokens after a stop string are
        taken back.
        """
        choice, output = self._choices[seq], Output(seq.index)
        appended = seq.num_outputs - len(entries)
        if seq.params.logprobs is not None and entries:
            output.logprobs = []
        for number, entry in enumerate(entries, appended + 1):
            token = result.tokens[entry]
            output.token_ids.append(token)
            if output.logprobs is not None:
                output.logprobs.append(token_logprob(seq, entry, result))
            last = number == seq.num_outputs
            ended_it = last and seq.finish_reason == "stop"  # EOS or stop id: no stop string was looked for yet
            if not ended_it or seq.params.include_stop_str_in_output:
                text, hit = choice.text.push(token, number)
                output.text += text
                if hit is not None:
                    del seq.tokens[seq.prompt_len + number :]
                    self._stop_at(seq, hit)
                    break
        if entries:
            self._clock_tokens(choice, now, len(output.token_ids))
        if seq.status is Status.FINISHED:
            self._end(choice, output)
        else:
            self._queue(choice, output)

    def post(self, stream: OutputStream, output: Output) -> None:
        """Queues an output for the next hand_over."""
        self._outbox.setdefault(stream._loop, []).append((stream, output))

    def hand_over(self) -> None:
        """One wake-up a loop, whatever the number of outputs."""
        for loop, outputs in self._outbox.items():
            try:
                loop.call_soon_threadsafe(_deliver, outputs)
            except RuntimeError:  # the loop is closed: nobody reads these streams any more
                for stream, _ in outputs:
                    stream.cancel()
        self._outbox.clear()

    def _stop_at(self, seq: Sequence, stop: str) -> None:
        """A stop string was completed, maybe by the token that also was the last one allowed."""
        self._scheduler.finish(seq, "stop")
        seq.finish_reason, seq.stop_reason = "stop", stop

    def _end(self, choice: Choice, output: Output) -> None:
        """Queues the last output of a choice, with all text that was held back unless a stop string cut it off."""
        seq = choice.seq
        if not isinstance(seq.stop_reason, str):
            text, hit = choice.text.flush()
            output.text += text
            if hit is not None and seq.finish_reason in ("stop", "length"):
                self._stop_at(seq, hit)
        output.finish_reason, output.stop_reason, output.error = seq.finish_reason, seq.stop_reason, seq.error
        self._queue(choice, output)
        del self._choices[seq]
        stream = choice.stream
        stream.ended.add(seq.index)
        if len(stream.ended) == stream.request.n:
            self._on_end(stream)
        self._observer.request_finished(_timings(choice))

    def _queue(self, choice: Choice, output: Output) -> None:
        if not choice.prompt_sent:
            choice.prompt_sent = True
            output.prompt_logprobs = prompt_logprobs(choice.seq)
        self.post(choice.stream, output)

    def _clock_tokens(self, choice: Choice, now: float, count: int) -> None:
        """`count` tokens that came at once share the time since the one before them."""
        if choice.last_token is None:
            choice.first_token = choice.last_token = now
            self._observer.first_token(now - choice.stream.submitted)
            count -= 1
        for _ in range(count):
            self._observer.inter_token((now - choice.last_token) / count)
        choice.last_token = now


def _deliver(outputs: list[tuple[OutputStream, Output]]) -> None:
    for stream, output in outputs:
        stream._queue.put_nowait(output)


def _timings(choice: Choice) -> RequestTimings:
    submitted, seq = choice.stream.submitted, choice.seq

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
