"""The reference's greedy texts, token for token, through a server and the official client."""

import asyncio
import json
import pathlib
from typing import Any

import numpy as np
import pytest

from tests.e2e.support import Live

GREEDY: dict[str, Any] = {"max_tokens": 32, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="session")
def cases(shared: pathlib.Path) -> list[dict[str, Any]]:
    return json.loads((shared / "fixtures" / "expected_smollm2.json").read_text())["cases"]


def test_six_chats(sample: Live, cases: list[dict[str, Any]]):
    for case in cases:
        answer = sample.server.chat(messages=case["messages"], **GREEDY)
        assert answer.prompt_token_ids == case["prompt_ids"]
        (choice,) = answer.choices
        assert choice.token_ids == case["greedy_ids"]
        assert choice.message.content == sample.session.tokenizer.decode(case["greedy_ids"])
        assert choice.finish_reason == "length"
        assert answer.usage.completion_tokens == 32


def test_six_chats_at_once_streaming(sample: Live, cases: list[dict[str, Any]]):
    """More streams than the engine has slots for."""
    known = {name: GREEDY[name] for name in ("max_tokens", "temperature")}
    extra = {name: GREEDY[name] for name in ("ignore_eos", "return_token_ids")}

    async def everything() -> list[tuple[list[int], str]]:
        async with sample.server.async_client() as client:

            async def one(messages: Any) -> tuple[list[int], str]:
                ids, text = [], ""
                stream = await client.chat.completions.create(
                    model="tiny", messages=messages, stream=True, extra_body=extra, **known
                )
                async for chunk in stream:
                    for choice in chunk.choices:
                        ids += getattr(choice, "token_ids", [])
                        text += choice.delta.content or ""
                return ids, text

            return await asyncio.gather(*(one(case["messages"]) for case in cases))

    decode = sample.session.tokenizer.decode
    assert asyncio.run(everything()) == [(case["greedy_ids"], decode(case["greedy_ids"])) for case in cases]


def test_chat_ends_where_the_model_ends_it(sample: Live, cases: list[dict[str, Any]]):
    ended = [case for case in cases if case["first_eos_index"] is not None]
    assert len(ended) == 2
    for case in ended:
        answer = sample.server.chat(messages=case["messages"], max_tokens=32, temperature=0)
        assert answer.choices[0].message.content == case["text_before_eos"]
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == case["first_eos_index"] + 1


def test_small_model_writes_its_64_tokens(stories: Live, stories_model: pathlib.Path):
    expected = np.load(stories_model / "expected.npz")
    prompt, want = expected["input_ids"].tolist(), expected["greedy"].tolist()
    options = GREEDY | {"max_tokens": 64}
    answer = stories.server.complete(prompt, **options)
    assert answer.choices[0].token_ids == want
    ids, text = [], ""
    for chunk in stories.server.complete(prompt, stream=True, **options):
        ids += chunk.choices[0].token_ids
        text += chunk.choices[0].text
    assert ids == want
    decode = stories.session.tokenizer.decode
    assert text == answer.choices[0].text and decode(prompt) + text == decode([*prompt, *want])


def test_prompt_logprobs_are_the_references(stories: Live, stories_model: pathlib.Path):
    """Case 5: echo with max_tokens 0 gives the prompt's log-probabilities and no token."""
    expected = np.load(stories_model / "expected.npz")
    prompt, logits = expected["input_ids"].tolist(), expected["logits"].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    answer = stories.server.complete(prompt, echo=True, logprobs=2, max_tokens=0)
    found = answer.choices[0].logprobs
    assert found.token_logprobs[0] is None
    want = logprobs[np.arange(len(prompt) - 1), prompt[1:]]
    np.testing.assert_allclose(found.token_logprobs[1:], want, atol=2e-4, rtol=1e-4)
    assert answer.usage.completion_tokens == 0 and answer.usage.prompt_tokens == len(prompt)
    best = [max(top.values()) for top in found.top_logprobs[1:]]
    np.testing.assert_allclose(best, logprobs.max(1)[:-1], atol=2e-4, rtol=1e-4)
