"""Artifacts compiled for these tests, engines driven from plain code, and servers on them."""

import asyncio
import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from jaxserve.compile import compile_model
from jaxserve.plan import CompileOptions
from jaxserve.reporting import Reporter
from jaxserve.serving.engine import Engine
from jaxserve.serving.load import LowerLimits
from jaxserve.serving.request import GenerationRequest, SamplingParams, TokenLogprob, Usage
from jaxserve.serving.session import Session
from jaxserve.serving.stats import NullObserver
from tests.serving.api.support import Running, serving, wait_for


def compile_artifact(
    folder: pathlib.Path, model: str | pathlib.Path, recipe: str | None, **options: Any
) -> pathlib.Path:
    """Compiles a model into `folder` and returns it. Limits are small: each program costs seconds."""
    compile_model(CompileOptions(model=str(model), output=folder, recipe=recipe, **options), Reporter(quiet=True))
    return folder


def load(artifact: pathlib.Path, **lower: int) -> Session:
    """A session; rebuilding a program would be a compilation while serving, so that is an error."""

    def fail(line: str) -> None:
        raise AssertionError(line)

    return Session(artifact, LowerLimits(**lower), fail)


class Work(NullObserver):
    """Counts the prompt positions that the engine computes."""

    def __init__(self) -> None:
        self.prompt_tokens = 0

    def step(self, prompt_tokens: int, generated_tokens: int) -> None:
        self.prompt_tokens += prompt_tokens


@dataclasses.dataclass(frozen=True)
class Live:
    """An artifact's session with one engine and a server on it."""

    session: Session
    engine: Engine
    server: Running
    work: Work

    @property
    def idle(self) -> bool:
        return is_idle(self.engine)


def is_idle(engine: Engine) -> bool:
    """Whether nothing runs or waits, and no page is in use."""
    stats = engine.stats()
    return stats["running"] == stats["waiting"] == 0 and stats["kv_usage"] == 0


def settle(engine: Engine) -> None:
    """Returns once the engine is idle: a step may still be in flight, and hold pages, when the last answer is there."""
    wait_for(lambda: is_idle(engine))


@contextlib.contextmanager
def live(artifact: pathlib.Path) -> Iterator[Live]:
    session, work = load(artifact), Work()
    engine = session.engine(work)
    engine.start()
    with serving(tokenizer=session.tokenizer, limits=session.limits, engine=engine) as server:
        yield Live(session, engine, server, work)


@dataclasses.dataclass
class Result:
    """All outputs of one choice of a request, put together."""

    ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage: Usage = dataclasses.field(default_factory=Usage)


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request; `cancel_after` outputs its client leaves."""

    prompt: Sequence[int]
    params: SamplingParams
    n: int = 1
    cancel_after: int | None = None


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **params)


def ask(engine: Engine, *requests: Ask) -> list[list[Result]]:
    """Runs requests at once; the results of each request's choices."""

    async def everything() -> list[list[Result]]:
        return await asyncio.gather(*(answer(engine, request) for request in requests))

    return asyncio.run(everything())


def ask_one(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> Result:
    return ask(engine, Ask(prompt, params))[0][0]


async def answer(engine: Engine, request: Ask) -> list[Result]:
    stream = engine.submit(GenerationRequest("test", tuple(request.prompt), request.params, n=request.n))
    results = [Result(usage=stream.usage) for _ in range(request.n)]
    seen = 0
    async for output in stream:
        assert output.error is None, output.error
        result = results[output.index]
        result.ids += output.token_ids
        result.text += output.text
        result.logprobs += output.logprobs or []
        result.prompt_logprobs += output.prompt_logprobs or []
        result.finish_reason, result.stop_reason = output.finish_reason, output.stop_reason
        seen += 1
        if seen == request.cancel_after:
            stream.cancel()
    return results
