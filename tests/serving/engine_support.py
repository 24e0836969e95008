"""Engines on a fake device, and what requests to them must give."""

import asyncio
import dataclasses
import pathlib
import typing

from jaxserve.serving.delivery import OutputStream
from jaxserve.serving.engine import Engine
from jaxserve.serving.plan import Runner
from jaxserve.serving.request import GenerationRequest, Limits, Output, SamplingParams
from jaxserve.text.pieces import LeadingSpace
from jaxserve.text.tokenizer import SpecialTokens, Tokenizer
from tests.serving.fake_device import FakeRunner, alone

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


async def until(condition, seconds=10.0):
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "waited in vain"
        await asyncio.sleep(0.002)
