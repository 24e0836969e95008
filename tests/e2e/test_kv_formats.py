"""Artifacts with a quantized KV cache: nearly float32's numbers, and the same text whatever becomes of a page."""

import dataclasses
import math
import pathlib
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.cli import main
from jaxserve.serving.request import SamplingParams
from jaxserve.serving.session import Session
from tests.e2e.support import Ask, Live, ask, ask_one, compile_artifact, greedy, load
from tests.e2e.test_memory import nbytes
from tests.e2e.test_recipes import prompt_logprobs

BITS = {"int8": 8, "int4": 4}


@pytest.fixture(scope="module")
def int4_artifact(artifacts: pathlib.Path, stories_model: pathlib.Path) -> pathlib.Path:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "kv_tokens": 1024}
    return compile_artifact(artifacts / "kv-int4", stories_model, "f32", kv_dtype="int4", **limits)


@dataclasses.dataclass(frozen=True)
class Quantized:
    form: str
    folder: pathlib.Path
    session: Session


@pytest.fixture(scope="module", params=["int8", pytest.param("int4", marks=pytest.mark.slow)])
def quantized(request: pytest.FixtureRequest) -> Iterator[Quantized]:
    """A session whose cache is full of NaN and of codes that mean nothing."""
    folder = request.getfixturevalue(f"{request.param}_artifact")
    session = load(folder)
    runner = session.runner
    runner.caches = {
        name: jnp.full(array.shape, 0xB7 if array.dtype == jnp.uint8 else jnp.nan, array.dtype)
        for name, array in runner.caches.items()
    }
    yield Quantized(request.param, folder, session)
    runner.close()


def test_manifest_counts_every_array(quantized: Quantized, capsys: pytest.CaptureFixture[str]):
    """5 layers, keys and values, 4 heads of 8: codes, and a scale and a minimum in float16."""
    manifest = quantized.session.manifest
    (group,) = manifest.cache_groups
    assert group.format == quantized.form
    assert group.bytes_per_token == 5 * 2 * 4 * (8 * BITS[quantized.form] // 8 + 2 + 2)
    assert group.bytes_per_token * manifest.limits.kv_tokens == nbytes(manifest.caches)
    assert len(manifest.caches) == 2 * 3  # of all layers in one
    assert {name: array.nbytes for name, array in quantized.session.runner.caches.items()} == {
        spec.name: nbytes([spec]) for spec in manifest.caches
    }
    assert main(["inspect", str(quantized.folder)]) == 0
    assert (
        f"1024 tokens in {quantized.form}, pages of 16, {nbytes(manifest.caches) / 1e6:.1f} MB"
        in capsys.readouterr().out
    )


def test_near_the_numbers_of_float32(quantized: Quantized, stories: Live, story: list[int]):
    exact = ask_one(stories.engine, story, SamplingParams(max_tokens=0, prompt_logprobs=0)).prompt_logprobs[1:]
    want = np.array([entry.logprob for entry in exact])
    have = prompt_logprobs(quantized.session, story)
    most, mean = {"int8": (0.1, 0.002), "int4": (4.0, 0.25)}[quantized.form]  # heads of 8 leave int4 little to go by
    assert 0 < np.abs(have - want).max() < most
    assert abs(have.mean() - want.mean()) < mean


def test_int8_picks_the_tokens_of_float32(int8_artifact: pathlib.Path, stories: Live, story: list[int]):
    session, prompts = load(int8_artifact), [story[:n] for n in (1, 5, 17, 40)]
    with session.running() as engine:
        for prompt in prompts:
            assert ask_one(engine, prompt, greedy(60)).ids == ask_one(stories.engine, prompt, greedy(60)).ids
    session.runner.close()


def test_cached_prefixes_and_copied_pages_change_nothing(quantized: Quantized, story: list[int]):
    """A prompt computed in one go; with its pages found in the cache; and by four choices that share its last page."""
    prompt, tail = story[:70], SamplingParams(max_tokens=20, temperature=1.0, seed=7, ignore_eos=True)
    with quantized.session.running(prefix_caching=False) as engine:
        cold, sampled = ask_one(engine, prompt, greedy(20)), ask_one(engine, prompt, tail)
    with quantized.session.running() as engine:
        ask_one(engine, [*prompt[:64], *story[5:15]], greedy(4))
        warm = ask_one(engine, prompt, greedy(20))
        assert warm.usage.cached_tokens == 64
        (choices,) = ask(engine, Ask(prompt, tail, n=4))
        engine.scheduler.pool.check_integrity([])
    assert warm.ids == cold.ids
    assert choices[0].ids == sampled.ids and len({tuple(choice.ids) for choice in choices}) == 4


def test_preempted_requests_end_as_they_would_have(quantized: Quantized, story: list[int]):
    """Eight sequences of 10 pages each, and 16 pages."""
    requests = [Ask(story[: 60 + i], greedy(90)) for i in range(8)]
    with quantized.session.running() as engine:
        alone = [ask_one(engine, request.prompt, request.params).ids for request in requests]
    session = load(quantized.folder, kv_tokens=256)
    with session.running() as engine:
        crowded = ask(engine, *requests)
        stats = engine.stats()
    session.runner.close()
    assert stats["preemptions"] > 0 and stats["kv_usage"] == 0
    assert [result.ids for (result,) in crowded] == alone


@pytest.mark.slow
def test_fp8_serves(artifacts: pathlib.Path, stories_model: pathlib.Path, stories: Live, story: list[int]):
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 32, "kv_tokens": 512}
    session = load(compile_artifact(artifacts / "kv-fp8", stories_model, "bf16", kv_dtype="fp8", **limits))
    (group,) = session.manifest.cache_groups
    assert (group.format, group.bytes_per_token) == ("fp8", 5 * 2 * 4 * (8 + 2))
    exact = ask_one(stories.engine, story, SamplingParams(max_tokens=0, prompt_logprobs=0)).prompt_logprobs[1:]
    want = np.mean([entry.logprob for entry in exact if entry.logprob is not None])
    assert 0 < abs(math.exp(want - prompt_logprobs(session, story).mean()) - 1) < 0.05
    session.runner.close()
