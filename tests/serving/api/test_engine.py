"""The same server in front of the real engine, on a device that is not there."""

import dataclasses
import threading

import httpx
import pytest

from jaxserve.serving.engine import Engine
from jaxserve.serving.metrics import Metrics
from jaxserve.serving.request import SamplingParams
from tests.serving.api.support import EOS, LIMITS, Running, byte_tokenizer, serving, wait_for
from tests.serving.api.test_metrics import samples
from tests.serving.fake_device import Done, FakeRunner, alone

LIMIT = dataclasses.replace(LIMITS, num_pages=200, max_num_seqs=8, token_budget=64, score_budget=16)


class Gated(FakeRunner):
    """Steps wait until the gate is open."""

    def __init__(self) -> None:
        super().__init__(LIMIT)
        self.gate = threading.Event()
        self.gate.set()

    def dispatch(self, plan) -> Done:
        assert self.gate.wait(10)
        return super().dispatch(plan)


@pytest.fixture(scope="module")
def runner() -> Gated:
    return Gated()


@pytest.fixture(scope="module")
def real(runner: Gated):
    tokenizer, metrics = byte_tokenizer(), Metrics("tiny")
    engine = Engine(runner, tokenizer, LIMIT, metrics)
    engine.start()
    with serving(engine=engine, tokenizer=tokenizer, limits=LIMIT, metrics=metrics) as server:
        yield server
    assert not engine.healthy


def expected(prompt: str, index: int = 0, **options) -> list[int]:
    return alone(tuple(prompt.encode()), SamplingParams(**options), LIMIT, index)[0]


def test_tokens_and_text(real: Running):
    """Cases 10 and 18: streaming or not is the same text; choices with a seed are reproducible and distinct."""
    options = {"max_tokens": 40, "seed": 5}
    whole = real.complete("prompt", n=3, return_token_ids=True, **options)
    for choice in whole.choices:
        ids = expected("prompt", choice.index, **options)
        assert choice.token_ids == ids
        assert choice.text == byte_tokenizer().decode([token for token in ids if token != EOS])
        assert choice.finish_reason == ("stop" if ids[-1] == EOS else "length")
    texts = {0: "", 1: "", 2: ""}
    for chunk in real.complete("prompt", n=3, stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert len({choice.text for choice in whole.choices}) == 3
    assert whole.usage.completion_tokens == sum(len(choice.token_ids) for choice in whole.choices)


def test_cached_tokens_are_reported(real: Running):
    prompt = "a long prefix that fills several pages of the cache, and more"
    real.complete(prompt, max_tokens=1)
    assert real.complete(prompt, max_tokens=1).usage.prompt_tokens_details.cached_tokens >= 48
    salted = real.complete(prompt, max_tokens=1, cache_salt="other")
    assert salted.usage.prompt_tokens_details.cached_tokens == 0  # case 23


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echo_with_logprobs(real: Running, max_tokens: int, n: int):
    """Cases 5 and 6: the prompt in several score steps."""
    prompt = "x" * 50
    answer = real.complete(prompt, echo=True, logprobs=1, max_tokens=max_tokens, n=n, seed=1, ignore_eos=True)
    assert answer.usage.completion_tokens == max_tokens * n
    for choice in answer.choices:
        assert choice.text.startswith(prompt) and choice.finish_reason == "length"
        logprobs = choice.logprobs
        assert logprobs.tokens[:50] == ["x"] * 50 and len(logprobs.tokens) == 50 + max_tokens
        assert logprobs.token_logprobs[0] is None and all(value <= 0 for value in logprobs.token_logprobs[1:])
        assert logprobs.text_offset[:50] == list(range(50))


def test_zero_tokens(real: Running):
    assert real.complete("x", max_tokens=0).choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_frees_the_pages(real: Running, runner: Gated, stream: bool):
    """Case 17."""
    engine = real.engine
    runner.gate.clear()
    with httpx.Client(base_url=real.url, timeout=0.3) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json={"prompt": "y" * 90, "stream": stream, "n": 2, "max_tokens": 400})
    runner.gate.set()
    wait_for(lambda: engine.stats()["running"] == engine.stats()["waiting"] == 0)
    wait_for(lambda: engine.stats()["kv_usage"] == 0.0)


def test_metrics(real: Running):
    before = samples(real.http.get("/metrics").text)
    real.complete("abc", max_tokens=4, ignore_eos=True)
    wait_for(lambda: samples(real.http.get("/metrics").text) != before)
    after = samples(real.http.get("/metrics").text)

    def grown(*name: str) -> float:
        return after[name] - before[name]

    assert grown("generation_tokens_total") == 4 and grown("request_success_total", "length") == 1
    assert grown("time_to_first_token_seconds_count") == 1 and grown("inter_token_latency_seconds_count") == 3
    assert grown("e2e_request_latency_seconds_count") == grown("request_decode_time_seconds_count") == 1
    assert grown("request_queue_time_seconds_count") == grown("request_prefill_time_seconds_count") == 1
    assert after["kv_cache_usage_perc",] == 0


def test_dead_engine(monkeypatch: pytest.MonkeyPatch):
    """Cases 9 and 21: the running request ends with an error, /health says so, new ones get 503."""
    runner = FakeRunner(LIMIT)
    engine = Engine(runner, byte_tokenizer(), LIMIT)
    engine.start()
    with serving(engine=engine, limits=LIMIT) as server:

        def broken(plan):
            raise RuntimeError("/secret/device")

        monkeypatch.setattr(runner, "dispatch", broken)
        response = server.post("/v1/completions", {"prompt": "x"})
        assert response.status_code == 500 and "secret" not in response.text
        wait_for(lambda: server.http.get("/health").status_code == 503)
        assert server.post("/v1/completions", {"prompt": "x"}).status_code == 503


def test_non_finite_logits(real: Running, runner: Gated):
    """Case 9: that request ends with an error, the next one is served."""
    runner.not_finite = {ord("~")}
    response = real.post("/v1/completions", {"prompt": "x~"})
    runner.not_finite = set()
    assert response.status_code == 500 and response.json()["error"]["code"] == "generation_failed"
    assert real.complete("x", max_tokens=1).choices[0].finish_reason
