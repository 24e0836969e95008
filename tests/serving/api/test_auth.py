"""The API key (case 25)."""

import hmac

import openai
import pytest

from jaxserve.serving.metrics import Metrics
from tests.serving.api.support import byte_tokenizer, error_of, serving

PATHS = ["/v1/models", "/v1/models/tiny", "/metrics", "/version", "/nope", "/health/", "/v1/chat/completions"]


@pytest.fixture(scope="module")
def locked():
    with serving(api_key="clé-sécret", metrics=Metrics("tiny")) as server:
        yield server


def test_every_path_but_health(locked):
    assert locked.http.get("/health").status_code == 200
    for path in PATHS:
        error = error_of(locked.http.get(path), 401, None, "invalid_api_key")
        assert error["type"] == "invalid_request_error" and "sécret" not in error["message"]


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer wrong", "Basic clé-sécret", "Bearer clé-sécret x", "é"])
def test_wrong_keys(locked, value: str):
    response = locked.http.get("/v1/models", headers=[(b"authorization", value.encode())])
    error_of(response, 401)
    assert response.headers["www-authenticate"] == "Bearer"


def test_right_key(locked):
    for scheme in ("Bearer", "bearer"):
        headers = [(b"authorization", f"{scheme} clé-sécret".encode())]
        assert locked.http.get("/v1/models", headers=headers).status_code == 200
        assert locked.http.get("/metrics", headers=headers).status_code == 200


def test_official_client():
    with serving(api_key="sk-test") as server:
        assert server.chat().choices[0].message.content == "Hello, world!"
        wrong = openai.OpenAI(base_url=server.url + "/v1", api_key="sk-wrong", max_retries=0)
        with wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()


def test_compared_in_constant_time(locked, monkeypatch: pytest.MonkeyPatch):
    """Through hmac.compare_digest, on values of one length whatever the key's."""
    seen = []

    def compare(a: bytes, b: bytes) -> bool:
        seen.append((len(a), len(b)))
        return False

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for key in ("a", "a" * 1000):
        locked.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
    assert seen == [(32, 32)] * 2


def test_refusal_comes_before_the_body(locked):
    response = locked.http.post("/v1/completions", content=b"x" * 100_000, headers={"content-type": "application/json"})
    error_of(response, 401)
    assert response.headers["connection"] == "close"


def test_empty_key_is_refused_at_start():
    with pytest.raises(ValueError, match="api_key"), serving(tokenizer=byte_tokenizer(), api_key=""):
        pass
