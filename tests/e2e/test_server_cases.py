"""Reported failures of other servers that only a real model can show (numbers: the cases they are filed under)."""

import contextlib
import dataclasses
import http.client
import itertools
import json
import math
import threading
import urllib.parse
from collections.abc import Callable

import numpy as np
import pytest

from jaxserve.serving.delivery import OutputStream
from jaxserve.serving.engine import Engine
from jaxserve.serving.plan import StepPlan
from jaxserve.serving.request import SamplingParams
from jaxserve.serving.runner import PendingStep
from tests.e2e.support import Live, ask_one, greedy
from tests.serving.api.support import wait_for

QUESTION = "Name three colours and say what each of them makes people think of."


def test_logprobs_of_a_prompt_as_long_as_the_model(stories: Live, story: list[int]):
    """Cases 5 and 6."""
    prompt = (story * 7)[:512]
    answer = stories.server.complete(prompt, echo=True, logprobs=5, max_tokens=0)
    (choice,) = answer.choices
    first, *rest = choice.logprobs.token_logprobs
    assert first is None and len(rest) == 511 and all(map(math.isfinite, rest))
    assert all(math.isfinite(value) for top in choice.logprobs.top_logprobs[1:] for value in top.values())
    assert choice.finish_reason == "length" and answer.usage.completion_tokens == 0
    short = stories.server.complete(prompt[:40], echo=True, logprobs=5, max_tokens=0)
    np.testing.assert_allclose(short.choices[0].logprobs.token_logprobs[1:], rest[:39], atol=1e-4)


def test_echo_joins_prompt_and_continuation(stories: Live, story: list[int]):
    """Case 5, with tokens after the prompt: one list, the prompt's part the same as without them."""
    scored = stories.server.complete(story[:20], echo=True, logprobs=1, max_tokens=0).choices[0]
    longer = stories.server.complete(story[:20], echo=True, logprobs=1, max_tokens=8, temperature=0).choices[0]
    assert len(longer.logprobs.token_logprobs) == 28
    np.testing.assert_allclose(longer.logprobs.token_logprobs[1:20], scored.logprobs.token_logprobs[1:], atol=1e-5)
    assert longer.text.startswith(scored.text) and len(longer.text) > len(scored.text)


def test_several_end_tokens(stories: Live, story: list[int]):
    """Case 12: min_tokens, ignore_eos and more than one EOS id."""
    prompt = story[:16]
    free = ask_one(stories.engine, prompt, greedy(40)).ids
    ends = tuple(sorted({free[3], free[9]} - {2}))
    assert len(ends) == 2
    engine = Engine(
        stories.session.runner,
        stories.session.tokenizer,
        dataclasses.replace(stories.session.limits, eos_ids=(2, *ends)),
    )
    wait_for(lambda: stories.idle)  # two engines share the runner: never at the same time
    engine.start()
    try:
        assert ask_one(engine, prompt, greedy(40)).ids == free
        stopped = ask_one(engine, prompt, SamplingParams(max_tokens=40, temperature=0.0))
        first = min(free.index(end) for end in ends)
        assert stopped.ids == free[: first + 1] and stopped.finish_reason == "stop"
        decode = stories.session.tokenizer.decode
        assert decode(prompt) + stopped.text == decode([*prompt, *free[:first]])
        for least in (1, first + 1, 20, 40):
            result = ask_one(engine, prompt, SamplingParams(max_tokens=40, temperature=0.0, min_tokens=least))
            assert not {2, *ends} & set(result.ids[:least])
            assert least <= len(result.ids) <= 40
            assert (result.finish_reason == "stop") == (result.ids[-1] in {2, *ends})
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def essay(sample: Live) -> list[str]:
    """What the sample model answers to the question, token by token."""
    answer = sample.server.chat(QUESTION, max_tokens=48, temperature=0, ignore_eos=True, return_token_ids=True)
    ids, decode = answer.choices[0].token_ids, sample.session.tokenizer.decode
    texts = [decode(ids[:end]) for end in range(len(ids) + 1)]
    assert texts[-1] == answer.choices[0].message.content
    return [longer[len(shorter) :] for shorter, longer in itertools.pairwise(texts)]


def test_stop_strings_that_span_tokens(sample: Live, essay: list[str]):
    """Cases 10 and 11: never leaked, the same text streaming or not, and what was held back arrives in the end."""
    whole = "".join(essay)
    across = ["".join(essay[i : i + 3])[1:-1] for i in (4, 12, 25)]
    never = [whole[-4:] + "\0", whole[5:12] + "\0"]
    for stops in ([across[0]], [across[2], across[1]], never, [never[0], across[2]]):
        assert all(stops)
        found = [stop for stop in stops if stop in whole]
        want = whole[: min(whole.index(stop) for stop in found)] if found else whole
        options = {"max_tokens": 48, "temperature": 0, "ignore_eos": True, "stop": stops}
        answer = sample.server.chat(QUESTION, **options).choices[0]
        assert answer.message.content == want
        assert answer.finish_reason == ("stop" if found else "length")
        pieces = [
            chunk.choices[0].delta.content or "" for chunk in sample.server.chat(QUESTION, stream=True, **options)
        ]
        assert "".join(pieces) == want


def test_min_tokens_on_the_sample_model(sample: Live):
    """Case 12 through the server: the model would end after a few tokens."""
    brief = {"temperature": 0, "messages": [{"role": "user", "content": "Say only: Yes."}]}
    short = sample.server.chat(max_tokens=40, **brief)
    assert short.choices[0].finish_reason == "stop" and short.usage.completion_tokens < 30
    longer = sample.server.chat(max_tokens=40, min_tokens=30, **brief)
    assert 30 <= longer.usage.completion_tokens <= 40


class Held:
    """A runner's `dispatch` that waits for permits, so that a request cannot end before its client has left."""

    def __init__(self, dispatch: Callable[[StepPlan], PendingStep], permits: int) -> None:
        self._dispatch = dispatch
        self.permits = threading.Semaphore(permits)
        self.steps = 0

    def __call__(self, plan: StepPlan) -> PendingStep:
        assert self.permits.acquire(timeout=60)
        self.steps += 1
        return self._dispatch(plan)


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_frees_blocks(stories: Live, story: list[int], stream: bool, monkeypatch: pytest.MonkeyPatch):
    """Case 17, on a pool that is really used."""
    body = {"prompt": story[:40], "max_tokens": 400, "temperature": 0, "ignore_eos": True, "n": 2, "stream": stream}
    wait_for(lambda: stories.idle)
    held = Held(stories.session.runner.dispatch, permits=30)
    cancelled, cancel = threading.Event(), OutputStream.cancel

    def cancel_and_tell(left: OutputStream) -> None:
        cancel(left)
        cancelled.set()

    monkeypatch.setattr(stories.session.runner, "dispatch", held)
    monkeypatch.setattr(OutputStream, "cancel", cancel_and_tell)
    address = urllib.parse.urlsplit(stories.server.url)
    with contextlib.closing(http.client.HTTPConnection(str(address.hostname), address.port)) as client:
        client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        if stream:
            assert client.getresponse().readline().startswith(b"data: ")
        wait_for(lambda: held.steps == 30)
        assert not stories.idle
    assert cancelled.wait(60)
    held.permits.release(400)
    wait_for(lambda: stories.idle)
    assert held.steps < 40
    stories.engine.scheduler.pool.check_integrity([])
