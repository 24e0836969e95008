"""Shared prefixes are computed once, and preempted requests end as if nothing had happened."""

import pathlib

import numpy as np

from tests.e2e.support import Ask, Live, ask, ask_one, greedy, load, settle


def test_shared_prefix_is_computed_once(stories: Live, story: list[int]):
    """Case 19: a hit in the prefix cache gives what a cold run gives."""
    prefix = (story * 6)[:480]
    first, second = [*prefix, *story[5:15]], [*prefix, *story[20:30]]
    options = {"max_tokens": 20, "temperature": 0, "logprobs": 5, "ignore_eos": True, "return_token_ids": True}
    cold = stories.server.complete(second, cache_salt="cold", **options)
    assert cold.usage.prompt_tokens_details is None or cold.usage.prompt_tokens_details.cached_tokens == 0
    stories.server.complete(first, cache_salt="warm", **options)
    computed = stories.work.prompt_tokens
    hits = stories.engine.stats()["prefix_hits"]
    warm = stories.server.complete(second, cache_salt="warm", **options)
    assert warm.usage.prompt_tokens_details.cached_tokens == 480
    assert stories.engine.stats()["prefix_hits"] - hits == 480
    assert stories.work.prompt_tokens - computed == 10
    assert warm.choices[0].token_ids == cold.choices[0].token_ids
    np.testing.assert_allclose(
        warm.choices[0].logprobs.token_logprobs, cold.choices[0].logprobs.token_logprobs, atol=1e-4
    )


def test_whole_prompt_in_the_cache(stories: Live, story: list[int]):
    """Only the last token is computed again, on a page of its own."""
    prompt = story[:64]
    first = ask_one(stories.engine, prompt, greedy(16))
    computed = stories.work.prompt_tokens
    again = ask_one(stories.engine, prompt, greedy(16))
    assert stories.work.prompt_tokens - computed == 1 and again.usage.cached_tokens == 63
    assert again.ids == first.ids


def test_preempted_requests_end_as_they_would_have(stories: Live, stories_artifact: pathlib.Path, story: list[int]):
    """Case 19. Eight sequences of 10 pages each, and 16 pages."""
    requests = [Ask(story[: 60 + i], greedy(90)) for i in range(8)]
    alone = [ask_one(stories.engine, request.prompt, request.params).ids for request in requests]
    session = load(stories_artifact, kv_tokens=256)
    with session.running() as engine:
        crowded = ask(engine, *requests)
        settle(engine)
        engine.scheduler.pool.check_integrity([])
        assert engine.stats()["preemptions"] > 0
    session.runner.close()
    assert [result.ids for (result,) in crowded] == alone
