"""Many requests at once on a real engine: nothing is compiled, nothing is lost, and nobody's text changes."""

import asyncio
import math
import pathlib
import random

from jaxserve.serving.request import SamplingParams
from jaxserve.serving.runner import CompileCounter
from tests.e2e.support import Ask, Live, ask, ask_one, greedy, load, settle


def random_request(rng: random.Random, vocab: int) -> Ask:
    prompt = [rng.randrange(3, vocab) for _ in range(min(400, 1 + int(rng.expovariate(1 / 40))))]
    max_tokens = rng.randrange(1, 90 if rng.random() < 0.2 else 20)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
        top_k=rng.choice([0, 0, 5]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.05]),
        seed=rng.choice([None, rng.randrange(2**32)]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        logit_bias=((rng.randrange(vocab), rng.uniform(-5, 5)),) if rng.random() < 0.2 else (),
        logprobs=rng.choice([None, None, 0, 20]),
        prompt_logprobs=rng.choice([None] * 9 + [3]),
        min_tokens=rng.randrange(0, max_tokens) if rng.random() < 0.2 else 0,
        stop=("the ",) if rng.random() < 0.2 else (),
        ignore_eos=rng.random() < 0.5,
    )
    cancel_after = rng.randrange(1, 4) if rng.random() < 0.15 else None
    return Ask(prompt, params, n=rng.choice([1, 1, 1, 1, 3]), cancel_after=cancel_after)


def test_300_random_requests_compile_nothing(stories_artifact: pathlib.Path):
    """Case 22. The pool is small, so that requests are preempted too."""
    rng = random.Random(0)
    counter = CompileCounter()
    session = load(stories_artifact, kv_tokens=512)
    requests = [random_request(rng, session.limits.vocab_size) for _ in range(300)]
    with session.running() as engine:
        for results, request in zip(ask(engine, *requests), requests, strict=True):
            for result in results:
                check(result, request)
        settle(engine)
        engine.scheduler.pool.check_integrity([])
        assert engine.stats()["preemptions"] > 0
    session.runner.close()
    counter.close()
    assert counter.count == 0


def check(result, request: Ask) -> None:
    params = request.params
    if result.finish_reason == "abort":
        assert request.cancel_after
        return
    assert result.finish_reason in ("stop", "length")
    assert params.min_tokens <= len(result.ids) <= params.max_tokens
    assert (len(result.ids) == params.max_tokens) or result.finish_reason == "stop"
    if params.logprobs is not None:
        assert len(result.logprobs) == len(result.ids)
        assert all(math.isfinite(entry.logprob) and len(entry.top) == params.logprobs for entry in result.logprobs)
    if result.prompt_logprobs:
        assert len(result.prompt_logprobs) == len(request.prompt)


def test_64_concurrent_requests_each_as_if_alone(stories: Live, story: list[int]):
    """Case 19, through the official asynchronous client."""
    prompts = [story[: 2 + i] if i % 2 else [1, *story[i + 1 :]] for i in range(64)]
    alone = [ask_one(stories.engine, prompt, greedy(24)).ids for prompt in prompts]

    async def together() -> list[list[int]]:
        async with stories.server.async_client() as client:
            answers = await asyncio.gather(
                *(
                    client.completions.create(
                        model="tiny",
                        prompt=prompt,
                        max_tokens=24,
                        temperature=0,
                        extra_body={"ignore_eos": True, "return_token_ids": True, "cache_salt": "together"},
                    )
                    for prompt in prompts
                )
            )
        return [answer.choices[0].model_dump()["token_ids"] for answer in answers]

    assert asyncio.run(together()) == alone
    settle(stories.engine)


def test_seeds_under_load(stories: Live, story: list[int]):
    """Case 18."""
    rng = random.Random(1)
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=7, ignore_eos=True)
    alone = ask_one(stories.engine, story[:9], params)
    noise = [random_request(rng, 512) for _ in range(12)]
    both = ask(stories.engine, Ask(story[:9], params), *noise, Ask(story[:9], params))
    assert both[0][0].ids == both[-1][0].ids == alone.ids
    other = SamplingParams(max_tokens=24, temperature=1.0, seed=8, ignore_eos=True)
    assert ask_one(stories.engine, story[:9], other).ids != alone.ids


def test_choices_of_a_seed_are_distinct_and_reproducible(stories: Live, story: list[int]):
    """Case 18."""
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=7, ignore_eos=True)
    first, second = ask(stories.engine, Ask(story[:9], params, n=4), Ask(story[:9], params, n=4))
    assert [choice.ids for choice in first] == [choice.ids for choice in second]
    assert len({tuple(choice.ids) for choice in first}) == 4
