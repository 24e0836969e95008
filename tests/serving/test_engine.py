"""What the engine gives for requests: tokens, text, log-probabilities, errors."""

import asyncio
import dataclasses

import pytest

from jaxserve.serving.request import InvalidRequest
from tests.serving.engine_support import (
    LIMITS,
    decode,
    expected,
    read,
    request,
    serve,
    serve_one,
    until,
)
from tests.serving.fake_device import FakeRunner, token_logprob, top_logprobs
from tests.serving.proposals import guessing


def test_concurrent_requests_equal_the_same_alone():
    stops = ((), ("a",), ("ab", "q"), ("cd", "é", "b c"), ("nothing like it",))
    asked = [
        request(
            [2 + i % 5] * (1 + i * 7 % 20),
            n=1 + i % 3,
            max_tokens=1 + i * 5 % 23,
            seed=i,
            stop=stops[i % 5],
            ignore_eos=i % 2 == 0,
            stop_token_ids=(9,) if i % 4 == 0 else (),
        )
        for i in range(60)
    ]

    async def main(engine):
        answers = await asyncio.gather(*(read(engine.submit(each)) for each in asked))
        await until(lambda: engine.stats()["kv_usage"] == 0)  # a step may still be in flight
        assert engine.stats()["preemptions"] > 0
        return answers

    limits = dataclasses.replace(LIMITS, num_pages=12)
    for each, choices in zip(asked, serve(main, limits=limits), strict=True):
        for index, choice in enumerate(choices):
            got = (choice.token_ids, choice.text, choice.last.finish_reason, choice.last.stop_reason)
            assert got == expected(each, index)


def test_stop_strings_hit_at_the_last_token_and_can_be_kept():
    full = request([2, 3, 4], max_tokens=12, ignore_eos=True, seed=3)
    [plain] = serve_one(full)
    stop = plain.text[-2:]
    asked = dataclasses.replace(full, params=dataclasses.replace(full.params, stop=(stop,)))
    [cut] = serve_one(asked)
    assert (cut.text, cut.last.finish_reason, cut.last.stop_reason) == (plain.text[:-2], "stop", stop)
    kept = dataclasses.replace(asked.params, include_stop_str_in_output=True)
    [whole] = serve_one(dataclasses.replace(asked, params=kept))
    assert whole.text == plain.text


def test_min_tokens_looks_for_no_stop_string_in_the_first_tokens():
    plain = request([2, 3, 4], max_tokens=12, ignore_eos=True, seed=3)
    [free] = serve_one(plain)
    stop = decode(free.token_ids[:1])
    [stopped] = serve_one(request([2, 3, 4], max_tokens=12, ignore_eos=True, seed=3, stop=(stop,)))
    assert len(stopped.token_ids) == 1
    [held] = serve_one(request([2, 3, 4], max_tokens=12, ignore_eos=True, seed=3, stop=(stop,), min_tokens=5))
    assert len(held.token_ids) > 5


def test_logprobs_usage_and_cached_tokens():
    prompt = tuple(range(2, 14))
    asked = request(prompt, n=2, max_tokens=5, ignore_eos=True, logprobs=2)

    async def main(engine):
        first = await read(engine.submit(request(prompt, max_tokens=1)))
        stream = engine.submit(asked)
        return first, await read(stream), stream.usage

    first, choices, usage = serve(main)
    assert first[0].logprobs == [] and first[0].prompt_logprobs is None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (12, 10, 11)
    for choice in choices:
        assert len(choice.logprobs) == 5
        for i, entry in enumerate(choice.logprobs):
            prefix = (*prompt, *choice.token_ids[:i])
            assert (entry.id, entry.logprob) == (choice.token_ids[i], token_logprob(prefix, entry.id))
            assert entry.top == top_logprobs(prefix, LIMITS)[:2]


def test_echo_gives_prompt_logprobs_and_no_token():
    prompt = tuple(range(2, 15))
    one, two = serve_one(request(prompt, n=2, max_tokens=0, prompt_logprobs=1))
    for choice in (one, two):
        assert (choice.token_ids, choice.text, choice.last.finish_reason) == ([], "", "length")
    assert two.prompt_logprobs is None and one.prompt_logprobs is not None
    assert [entry.id for entry in one.prompt_logprobs] == list(prompt)
    assert (one.prompt_logprobs[0].logprob, one.prompt_logprobs[0].top) == (None, [])
    for i, entry in enumerate(one.prompt_logprobs[1:], 1):
        assert entry.logprob == token_logprob(prompt[:i], prompt[i])
        assert entry.top == top_logprobs(prompt[:i], LIMITS)[:1]


def test_nothing_to_generate_is_an_empty_answer():
    [choice] = serve_one(request([2, 3], max_tokens=0))
    assert (choice.text, choice.token_ids, choice.last.finish_reason) == ("", [], "length")
    [scored] = serve_one(request([2], max_tokens=0, prompt_logprobs=0))
    assert scored.prompt_logprobs is not None and len(scored.prompt_logprobs) == 1


def test_not_finite_ends_only_that_request():
    runner = FakeRunner(LIMITS)
    runner.not_finite = {29}
    good, bad = request([2, 3], stop_token_ids=(29,)), request([2, 29])

    async def main(engine):
        return await asyncio.gather(read(engine.submit(bad)), read(engine.submit(good)))

    [ended], [fine] = serve(main, runner)
    assert (ended.last.finish_reason, ended.token_ids) == ("error", [])
    assert "not finite" in (ended.last.error or "")
    assert fine.token_ids == expected(good, 0)[0]


def test_what_can_be_known_is_refused_at_once():
    async def main(engine):
        with pytest.raises(InvalidRequest) as caught:
            engine.submit(request([]))
        assert caught.value.param == "prompt"
        return await read(engine.submit(request([2])))

    assert serve(main)[0].token_ids


def test_proposals_change_no_answer():
    """Stop strings and ids, EOS, max_tokens, min_tokens, log-probabilities: all in the middle of accepted proposals."""
    stops = ((), ("a",), ("ab", "q"), ("cd", "é", "b c"))
    asked = [
        request(
            [2 + i % 5] * (1 + i * 7 % 20),
            n=1 + i % 2,
            max_tokens=1 + i * 5 % 23,
            seed=i,
            stop=stops[i % 4],
            ignore_eos=i % 2 == 0,
            stop_token_ids=(9,) if i % 4 == 0 else (),
            min_tokens=min(3, i * 5 % 23) if i % 3 == 0 else 0,
            logprobs=1 if i % 2 else None,
        )
        for i in range(40)
    ]

    async def main(engine):
        answers = await asyncio.gather(*(read(engine.submit(each)) for each in asked))
        await until(lambda: engine.stats()["kv_usage"] == 0)
        seen = [
            (each.text, each.token_ids, each.logprobs, each.last.finish_reason, each.last.stop_reason)
            for choices in answers
            for each in choices
        ]
        return seen, engine.stats()["speculation"]

    plain, nothing = serve(main)
    assert nothing is None
    for accuracy in (0.6, 1.0):
        answers, stats = serve(main, speculation=guessing(LIMITS, accuracy=accuracy))
        assert answers == plain
        assert 0 < stats["num_accepted"] <= stats["num_proposed"]


def test_tokens_after_a_stop_string_are_taken_back():
    full = request([2, 3, 4], max_tokens=14, ignore_eos=True, seed=3)
    [plain] = serve_one(full)
    asked = dataclasses.replace(full, params=dataclasses.replace(full.params, stop=(plain.text[3:5],)))

    async def main(engine):
        stream = engine.submit(asked)
        [choice] = await read(stream)
        return choice, stream.usage.completion_tokens

    choice, counted = serve(main, speculation=guessing(LIMITS, accuracy=1.0))
    [wanted] = serve_one(asked)
    assert (choice.token_ids, choice.text, choice.last.stop_reason) == (
        wanted.token_ids,
        wanted.text,
        wanted.last.stop_reason,
    )
    assert counted == len(wanted.token_ids) < 14


def test_not_finite_in_the_middle_of_proposals_keeps_the_tokens_before():
    plain = request([2, 3], max_tokens=10, ignore_eos=True)
    [free] = serve_one(plain)
    poison = free.token_ids[4]
    runners = [FakeRunner(LIMITS), FakeRunner(LIMITS)]
    for runner in runners:
        runner.not_finite = {poison}

    async def main(engine):
        return await read(engine.submit(plain))

    [wanted] = serve(main, runners[0])
    [got] = serve(main, runners[1], speculation=guessing(LIMITS, accuracy=1.0))
    assert (got.token_ids, got.text, got.last.error) == (wanted.token_ids, wanted.text, wanted.last.error)
    assert 0 < len(got.token_ids) <= 5
