"""Requests to an OpenAI-compatible server, and when their tokens came.

Prompts are token ids, so that every system computes the same, and generation runs to the wanted length (`ignore_eos`).
"""

import asyncio
import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.errors import UserError

TIMEOUT = 3600.0  # seconds a request may take


@dataclasses.dataclass(frozen=True)
class Load:
    """`requests` prompts of `prompt` random token ids, each asking for `output` tokens.

    `rate` is the mean number of arrivals a second of a Poisson process (infinite: all at once), `concurrency` the most
    requests in flight (0: no limit), and `sampling` goes into every request (temperature, top_p).
    """

    requests: int
    prompt: int
    output: int
    rate: float = math.inf
    concurrency: int = 0
    sampling: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"temperature": 0.0})

    def prompts(self, vocab: int, seed: int = 0) -> list[list[int]]:
        """The prompts; the same for the same seed."""
        return np.random.default_rng(seed).integers(0, vocab, (self.requests, self.prompt)).tolist()

    def arrivals(self, seed: int = 0) -> np.ndarray:
        """Seconds from the start at which each request arrives [requests]; the first does at once."""
        if math.isinf(self.rate):
            return np.zeros(self.requests)
        gaps = np.random.default_rng(seed).exponential(1 / self.rate, self.requests)
        return np.cumsum(gaps) - gaps[0]


@dataclasses.dataclass
class Timing:
    """One request: the clock when it was sent, when each piece of text came, and how many tokens it was.

    `sent` is when the request was let go: waiting for a free place under `concurrency` is not in it, as in vLLM's
    benchmark. `error` says why the request failed.
    """

    sent: float
    prompt: int
    pieces: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Answers:
    """What a load gave: a timing for each request, and seconds from the first arrival to the last token."""

    timings: Sequence[Timing]
    duration: float


def run_load(url: str, model: str, load: Load, prompts: Sequence[Sequence[int]]) -> Answers:
    """Sends the prompts as `load` says. UserError when aiohttp is missing or every request failed."""
    answers = asyncio.run(_run(url, model, load, prompts))
    if all(timing.error for timing in answers.timings):
        raise UserError(f"{url}: every request failed; the first: {answers.timings[0].error}")
    return answers


async def _run(url: str, model: str, load: Load, prompts: Sequence[Sequence[int]]) -> Answers:
    try:
        import aiohttp
    except ImportError:
        raise UserError("a benchmark over HTTP needs aiohttp: pip install 'jaxserve[bench]'") from None
    places = asyncio.Semaphore(load.concurrency or len(prompts))
    start = time.perf_counter()
    limits = aiohttp.ClientTimeout(total=TIMEOUT)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # some servers end a kept connection without a word
    async with aiohttp.ClientSession(timeout=limits, connector=connector) as session:

        async def one(prompt: Sequence[int], arrival: float) -> Timing:
            await asyncio.sleep(max(0.0, start + arrival - time.perf_counter()))
            async with places:
                timing = Timing(time.perf_counter(), len(prompt))
                try:
                    async with session.post(f"{url}/v1/completions", json=_body(model, load, prompt)) as response:
                        if response.status != 200:
                            timing.error = f"status {response.status}: {(await response.text())[:200]}"
                        else:
                            await _read(response.content, timing)
                except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                    timing.error = f"{type(error).__name__}: {error}"
                return timing

        timings = await asyncio.gather(*(one(*pair) for pair in zip(prompts, load.arrivals(), strict=True)))
    return Answers(timings, time.perf_counter() - start)


def _body(model: str, load: Load, prompt: Sequence[int]) -> dict[str, Any]:
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, "prompt": prompt, "max_tokens": load.output, "ignore_eos": True, **stream, **load.sampling}


async def _read(lines: Any, timing: Timing) -> None:
    """Server-sent events: a time for each with a choice, the number of tokens from the usage or else their number."""
    async for line in lines:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        data = json.loads(line[len(b"data: ") :])
        if "error" in data:
            timing.error = str(data["error"])[:200]
            return
        if any(choice.get("text") for choice in data.get("choices", ())):
            timing.pieces.append(time.perf_counter())
        if data.get("usage"):
            timing.tokens = data["usage"]["completion_tokens"]
    timing.tokens = timing.tokens or len(timing.pieces)
    if not timing.pieces:
        timing.error = "the answer held no text"
