"""A byte tokenizer, a scripted engine and a real server on a loopback port."""

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import httpx
import openai

from jaxserve.serving.api import ServerConfig, create_app
from jaxserve.serving.metrics import Metrics
from jaxserve.serving.output import TextAssembler
from jaxserve.serving.request import (
    EngineClosed,
    GenerationRequest,
    Limits,
    Output,
    TokenLogprob,
    Usage,
)
from jaxserve.serving.server import Server, listen
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.pieces import LeadingSpace
from jaxserve.text.tokenizer import SpecialTokens, Tokenizer

BOS, EOS, TURN = 256, 257, 258
SPECIAL = {BOS: "<s>", EOS: "</s>", TURN: "<|turn|>"}
VOCAB = 259
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refuse' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|turn|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
    "{% if shout %}LOUD{% endif %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
LIMITS = Limits(
    max_num_seqs=64, max_model_len=512, page_size=16, num_pages=4096, vocab_size=VOCAB, token_budget=512, eos_ids=(EOS,)
)


class ByteBackend:
    """Each byte is a token, and there are three special ones."""

    vocab_size = VOCAB
    special_ids = frozenset(SPECIAL)
    leading_space = LeadingSpace()
    utf8_errors = "replace"

    def encode(self, text: str, special: bool) -> list[int]:
        for token, name in SPECIAL.items():
            before, found, after = text.partition(name)
            if special and found:
                return [*self.encode(before, special), token, *self.encode(after, special)]
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        return SPECIAL[token].encode() if token in SPECIAL else bytes([token])

    def token_id(self, piece: str) -> int | None:
        return next((token for token, name in SPECIAL.items() if name == piece), None)

    def added_around(self) -> tuple[list[int], list[int]]:
        return [], []

    def save(self, directory: Any) -> dict[str, Any]:
        raise NotImplementedError


def byte_tokenizer(*, bos: bool = False, chat: bool = True) -> Tokenizer:
    template = ChatTemplate(TEMPLATE, "<s>", "</s>") if chat else None
    prefix = (BOS,) if bos else ()
    return Tokenizer(ByteBackend(), SpecialTokens("<s>", "</s>"), prefix_ids=prefix, chat_template=template)


@dataclasses.dataclass
class Script:
    """What the model says: `reply` of a request's choice; then how the engine behaves while it does."""

    reply: Callable[[GenerationRequest, int], Sequence[int]] = lambda request, index: b"Hello, world!"
    delay: float = 0.0  # seconds between tokens
    fail_after: int | None = None  # tokens until the choice ends with an error
    gate: asyncio.Event | None = None  # waited for before each token
    cached: int = 0


class FakeStream:
    def __init__(self, engine: "FakeEngine", request: GenerationRequest) -> None:
        self.usage = Usage(prompt_tokens=len(request.prompt_ids), cached_tokens=engine.script.cached)
        self.cancelled = False
        self._queue: asyncio.Queue[Output | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(engine, request))

    def __aiter__(self) -> AsyncIterator[Output]:
        return self._items()

    async def _items(self) -> AsyncIterator[Output]:
        while (item := await self._queue.get()) is not None:
            yield item

    def cancel(self) -> None:
        if not self._task.done():
            self.cancelled = True
            self._task.cancel()

    @property
    def running(self) -> bool:
        return not self._task.done()

    def abort(self) -> None:
        """The engine's own end of it."""
        self._task.cancel()
        self._queue.put_nowait(Output(0, finish_reason="abort"))
        self._queue.put_nowait(None)

    async def _run(self, engine: "FakeEngine", request: GenerationRequest) -> None:
        await asyncio.gather(*(self._choice(engine, request, index) for index in range(request.n)))
        self._queue.put_nowait(None)

    async def _choice(self, engine: "FakeEngine", request: GenerationRequest, index: int) -> None:
        script, params = engine.script, request.params
        assembler = TextAssembler(engine.tokenizer, params)
        scores = _scores(request, index)
        if params.max_tokens == 0:
            self._queue.put_nowait(Output(index, prompt_logprobs=scores, finish_reason="length"))
            return
        reply = [*script.reply(request, index), EOS]
        for number, token in enumerate(reply[: params.max_tokens], 1):
            await asyncio.sleep(script.delay)
            if script.gate is not None:
                await script.gate.wait()
            if script.fail_after is not None and number > script.fail_after:
                self._queue.put_nowait(Output(index, finish_reason="error", error="non-finite logits"))
                return
            self.usage.completion_tokens += 1
            out = Output(index, token_ids=[token], prompt_logprobs=scores)
            scores = None
            if params.logprobs is not None:
                others = [(token, -0.5), *((other, -1.0 - other) for other in (0xE2, 65, 66))]
                out.logprobs = [TokenLogprob(token, -0.5, others[: params.logprobs])]
            if token == EOS:
                out.text, out.stop_reason = assembler.flush()
                out.finish_reason = "stop"
            else:
                out.text, out.stop_reason = assembler.push(token, number)
                if out.stop_reason is not None:
                    out.finish_reason = "stop"
                elif number == params.max_tokens:
                    out.text += assembler.flush()[0]
                    out.finish_reason = "length"
            self._queue.put_nowait(out)
            if out.finish_reason:
                return


def _scores(request: GenerationRequest, index: int) -> list[TokenLogprob] | None:
    if index or request.params.prompt_logprobs is None:
        return None
    first, *rest = request.prompt_ids
    top = request.params.prompt_logprobs
    return [
        TokenLogprob(first, None, []),
        *(TokenLogprob(token, float("-inf"), [(65, -0.1), (66, -0.2)][:top]) for token in rest),
    ]


class FakeEngine:
    """Says what its script says."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits = LIMITS) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self.script = Script()
        self.healthy = True
        self.closed = False
        self.stopped = False
        self.requests: list[GenerationRequest] = []
        self.streams: list[FakeStream] = []
        self.crash: Exception | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    def submit(self, request: GenerationRequest) -> FakeStream:
        if self.closed:
            raise EngineClosed("draining")
        if self.crash is not None:
            raise self.crash
        request.validate(self.limits)
        self.loop = asyncio.get_running_loop()
        self.requests.append(request)
        self.streams.append(FakeStream(self, request))
        return self.streams[-1]

    def stop(self) -> None:
        self.closed = self.stopped = True
        for stream in self.streams:
            if stream.running and self.loop is not None:
                self.loop.call_soon_threadsafe(stream.abort)

    def stats(self) -> dict[str, Any]:
        times = {"count": 3, "seconds": 0.5, "bounds": [0.1, 1.0], "buckets": [2, 1, 0]}
        return {
            "running": self.running,
            "waiting": 2,
            "kv_usage": 0.25,
            "prefix_queries": 100,
            "prefix_hits": 40,
            "preemptions": 1,
            "phases": {"host": times},
        }

    @property
    def running(self) -> int:
        return sum(stream.running for stream in self.streams)


@dataclasses.dataclass
class Running:
    """A server in a thread, and ways to talk to it."""

    engine: FakeEngine
    server: Server
    host: str
    port: int
    key: str | None
    thread: threading.Thread
    closing: contextlib.ExitStack

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def last(self) -> GenerationRequest:
        return self.engine.requests[-1]

    @functools.cached_property
    def client(self) -> openai.OpenAI:
        """The official client; it never retries."""
        key = self.key or "none"
        return self.closing.enter_context(
            openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=30)
        )

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key=self.key or "none", max_retries=0, timeout=60)

    @functools.cached_property
    def http(self) -> httpx.Client:
        return self.closing.enter_context(httpx.Client(base_url=self.url, timeout=30))

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return self.http.post(path, json=body, **kwargs)

    def chat(self, content: str = "hi", **options: Any) -> Any:
        """Through the official client; options it does not know go into the body."""
        known = inspect.signature(self.client.chat.completions.create).parameters
        extra = {name: options.pop(name) for name in list(options) if name not in known}
        messages: Any = options.pop("messages", [{"role": "user", "content": content}])
        return self.client.chat.completions.create(model="tiny", messages=messages, extra_body=extra, **options)

    def complete(self, prompt: Any = "hi", **options: Any) -> Any:
        known = inspect.signature(self.client.completions.create).parameters
        extra = {name: options.pop(name) for name in list(options) if name not in known}
        return self.client.completions.create(model="tiny", prompt=prompt, extra_body=extra, **options)


@contextlib.contextmanager
def serving(
    *,
    tokenizer: Tokenizer | None = None,
    limits: Limits = LIMITS,
    script: Script | None = None,
    engine: Any = None,
    drain_timeout: float = 5.0,
    metrics: Metrics | None = None,
    **config: Any,
) -> Iterator[Running]:
    """A server with a fake engine (unless one is given), stopped at the end."""
    tokenizer = tokenizer or byte_tokenizer()
    engine = engine or FakeEngine(tokenizer, limits)
    if script is not None:
        engine.script = script
    settings = ServerConfig(("tiny", "tiny-alias"), limits, **config)
    app = create_app(engine, tokenizer, settings, metrics=metrics)
    ready = threading.Event()
    bound = listen("127.0.0.1", 0)
    server = Server(app, engine, drain_timeout, on_ready=lambda host, port: ready.set())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, name="server")
    thread.start()
    try:
        assert ready.wait(10)
        host, port = bound.getsockname()
        with contextlib.ExitStack() as closing:
            yield Running(engine, server, host, port, settings.api_key, thread, closing)
    finally:
        server.begin_drain()
        server.begin_drain()
        thread.join(20)
        assert not thread.is_alive()


def error_of(
    response: httpx.Response, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The error object of an answer, checked to be one of the given status and field."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    return error


def events(text: str) -> list[str]:
    """Payloads of a server-sent event stream."""
    assert all(block.startswith("data: ") for block in text.strip().split("\n\n"))
    return [block.removeprefix("data: ") for block in text.strip().split("\n\n")]


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Returns once the condition holds; fails when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)
