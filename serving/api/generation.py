"""One HTTP request's generations: admission, the engine's streams merged, cancelled when the client goes."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from jaxserve.serving.api.config import ServerConfig
from jaxserve.serving.api.errors import APIError, invalid, too_large, unavailable
from jaxserve.serving.request import GenerationRequest, Output, Usage
from jaxserve.text import Tokenizer


class OutputStream(Protocol):
    """What the engine returns for a request."""

    usage: Usage

    def __aiter__(self) -> AsyncIterator[Output]: ...

    def cancel(self) -> None: ...


class Engine(Protocol):
    """What the HTTP server needs of an engine."""

    @property
    def healthy(self) -> bool: ...

    def submit(self, request: GenerationRequest) -> OutputStream: ...

    def stats(self) -> Mapping[str, Any]: ...


class Service:
    """What the routes share. `active` counts generation requests whose answer is not finished."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, config: ServerConfig) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config
        self.started = int(time.time())
        self.draining = False
        self.active = 0

    @property
    def healthy(self) -> bool:
        """Ready for another request."""
        return self.engine.healthy and not self.draining

    def resolve_model(self, name: str | None) -> str:
        """The name an answer shows; 404 for a model that is not served."""
        names = self.config.served_model_names
        if name is None:
            return names[0]
        if name not in names:
            message = f"the model '{name[:100]}' does not exist here; served: {', '.join(names)}"
            raise APIError(404, message, param="model", code="model_not_found")
        return name

    def check_admission(self) -> None:
        """503 when no generation can be taken now."""
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down")
        if not self.engine.healthy:
            raise unavailable("the engine is not running", "engine_unavailable")
        if self.active >= self.config.max_active:
            raise unavailable(f"{self.active} requests are in progress, the limit of this server", "overloaded")

    def start(self, requests: Sequence[GenerationRequest]) -> "Generation":
        """Submits all or none."""
        self._check_size(requests)
        self.check_admission()
        streams: list[OutputStream] = []
        with contextlib.ExitStack() as undo:
            for request in requests:
                streams.append(self.engine.submit(request))
                undo.callback(streams[-1].cancel)
            undo.pop_all()
        return Generation(self, streams)

    def _check_size(self, requests: Sequence[GenerationRequest]) -> None:
        choices, most = sum(request.n for request in requests), self.config.max_choices
        if choices > most:
            raise invalid(f"{choices} choices in one request (prompts times n), at most {most} are allowed", "n")
        entries, most = sum(map(_logprob_entries, requests)), self.config.max_logprob_entries
        if entries > most:
            message = (
                f"this could report {entries} log-probabilities, at most {most} are allowed: "
                "lower logprobs, n, max_tokens or the number of prompts"
            )
            raise invalid(message, "logprobs")


class Generation:
    """The running generations of one HTTP request. `close` must be called; it cancels what still runs."""

    def __init__(self, service: Service, streams: list[OutputStream]) -> None:
        self._service = service
        self._streams = streams
        self._pumps: list[asyncio.Task[None]] = []
        self._closed = False
        service.active += 1

    def close(self) -> None:
        """Frees everything; harmless after the end and when called twice."""
        if not self._closed:
            self._closed = True
            self._service.active -= 1
            for pump in self._pumps:
                pump.cancel()
            for stream in self._streams:
                stream.cancel()

    def usage(self) -> dict[str, Any]:
        """The OpenAI usage object, over all prompts and choices so far."""
        prompt = sum(stream.usage.prompt_tokens for stream in self._streams)
        completion = sum(stream.usage.completion_tokens for stream in self._streams)
        cached = sum(stream.usage.cached_tokens for stream in self._streams)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
        """(which prompt, output) as they come; raises APIError when a choice fails."""
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                yield 0, _checked(output)
            return
        queue: asyncio.Queue[tuple[int, Output] | asyncio.Task[None]] = asyncio.Queue()
        for index, stream in enumerate(self._streams):
            pump = asyncio.create_task(_pump(index, stream, queue))
            pump.add_done_callback(queue.put_nowait)
            self._pumps.append(pump)
        running = len(self._pumps)
        while running:
            item = await queue.get()
            if isinstance(item, asyncio.Task):
                item.result()
                running -= 1
            else:
                yield item[0], _checked(item[1])

    async def collect(self) -> list[tuple[int, Output]]:
        """Every choice in one piece, sorted by prompt and choice."""
        pieces: dict[tuple[int, int], list[Output]] = {}
        async for prompt, output in self.outputs():
            pieces.setdefault((prompt, output.index), []).append(output)
        return [(key[0], merge(pieces[key])) for key in sorted(pieces)]


def merge(pieces: Sequence[Output]) -> Output:
    """All pieces of one choice as one."""
    logprobs = [token for piece in pieces for token in piece.logprobs or []]
    return dataclasses.replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        token_ids=[token for piece in pieces for token in piece.token_ids],
        logprobs=logprobs if any(piece.logprobs is not None for piece in pieces) else None,
        prompt_logprobs=pieces[0].prompt_logprobs,
    )


async def unless_disconnected[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; cancels it and raises ClientDisconnect when the client leaves first.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnection(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """The body; 413 beyond the limit (counted as it comes: a length header may lie), 408 when it comes too slowly."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # browsers can send other types across origins without asking
        raise APIError(415, "the body must be sent as 'Content-Type: application/json'", code="unsupported_media_type")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > config.max_body_bytes:
        raise too_large(config.max_body_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(config.body_timeout), contextlib.aclosing(request.stream()) as chunks:
            async for chunk in chunks:
                body += chunk
                if len(body) > config.max_body_bytes:
                    raise too_large(config.max_body_bytes)
    except TimeoutError:
        message = f"the body did not arrive within {config.body_timeout:g} seconds"
        raise APIError(408, message, code="request_timeout", headers={"connection": "close"}) from None
    return bytes(body)


def _logprob_entries(request: GenerationRequest) -> int:
    """Log-probabilities that the answer may hold; they cost far more memory than its tokens."""
    params, entries = request.params, 0
    if params.logprobs is not None:
        entries += params.max_tokens * (params.logprobs + 1)
    if params.prompt_logprobs is not None:
        entries += len(request.prompt_ids) * (params.prompt_logprobs + 1)
    return entries * request.n


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _pump(index: int, stream: OutputStream, queue: asyncio.Queue[Any]) -> None:
    async for output in stream:
        queue.put_nowait((index, output))


def _checked(output: Output) -> Output:
    if output.finish_reason == "error":
        raise APIError(
            500, "generation failed: " + (output.error or "the engine gave no reason"), code="generation_failed"
        )
    if output.finish_reason == "abort":
        raise unavailable("the server ended this request before it was finished", "aborted")
    return output
