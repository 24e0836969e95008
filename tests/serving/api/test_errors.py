"""Refusals: one body shape, the field named, the server alive and the next request served."""

import dataclasses
import json

import httpx
import openai
import pytest

from jaxserve.serving.request import InvalidRequest
from tests.serving.api.support import LIMITS, Running, Script, error_of, serving, wait_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BASE = {CHAT: {"messages": [{"role": "user", "content": "x"}]}, COMPLETIONS: {"prompt": "x"}}


def refused(server: Running, path: str, extra: dict, param: str | None) -> dict:
    error = error_of(server.post(path, BASE[path] | extra), 400, param)
    assert error["type"] == "invalid_request_error"
    assert server.post(path, BASE[path]).status_code == 200  # the next one is served
    return error


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "auto"),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("best_of", 3),
        ("suffix", "end"),
        ("audio", {"voice": "a"}),
        ("modalities", ["text", "audio"]),
        ("store", True),
        ("metadata", {"a": "b"}),
        ("logits_processors", ["x"]),
        ("allowed_token_ids", [1]),
        ("guided_json", {}),
        ("structured_outputs", {"regex": "("}),
        ("chat_template", "{{ x }}"),
        ("prediction", {}),
        ("reasoning_effort", "low"),
        ("service_tier", "flex"),
        ("prompt_logprobs", 1),
        ("store", 0),
    ],
)
def test_unsupported_fields(server: Running, path: str, field: str, value):
    """Case 29 (and 15, 30 until they are implemented: a 400, engine alive)."""
    error = refused(server, path, {field: value}, field)
    assert error["code"] == "unsupported_parameter" and "not supported" in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_values_that_ask_for_nothing_are_accepted(server: Running, path: str):
    neutral = {"tools": None, "response_format": {"type": "text"}, "best_of": 2, "n": 2, "suffix": None, "store": False}
    harmless = {"tool_choice": "none", "modalities": ["text"], "user": "me", "safety_identifier": "me"}
    assert server.post(path, BASE[path] | neutral | harmless).status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_unknown_fields(server: Running, path: str):
    """Case 29."""
    assert refused(server, path, {"temprature": 1}, "temprature")["code"] == "unknown_parameter"
    extra = {"stream": True, "stream_options": {"include_usage": True, "continuous": True}}
    assert refused(server, path, extra, "stream_options.continuous")["code"] == "unknown_parameter"
    assert len(refused(server, path, {"x" * 5000: 1}, "x" * 64)["message"]) < 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": "2"}, "n"),
        ({"n": True}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 513}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": list(range(17))}, "stop_token_ids"),
        ({"stop_token_ids": [259]}, "stop_token_ids"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ({"logit_bias": {"259": 1}}, "logit_bias"),  # case 4
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": 1, "01": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e9}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 10**30}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1, "min_tokens": 2}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"user": "x" * 513}, "user"),
    ],
)
def test_bounds(server: Running, path: str, extra: dict, param: str):
    """Case 24: sizes and ranges of the fields that chat and completions share."""
    refused(server, path, extra, param)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt": [259]}, "prompt"),  # case 4
        ({"prompt": [[1], [-1]]}, "prompt"),
        ({"prompt": [2**80]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1.0]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["x"] * 257}, "prompt"),
        ({"prompt": ["x"] * 100, "n": 3}, "n"),
        ({"n": 128, "max_tokens": 400, "prompt": ["x"] * 2, "logprobs": 20, "echo": True}, "logprobs"),
    ],
)
def test_completions_bounds(server: Running, extra: dict, param: str):
    refused(server, COMPLETIONS, extra, param)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}] * 2049}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "name": "n"}]}, "messages[0].name"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content"),
        ({"chat_template_kwargs": {str(i): 1 for i in range(17)}}, "chat_template_kwargs"),
    ],
)
def test_chat_bounds(server: Running, extra: dict, param: str):
    """Images and audio included: no URL is ever fetched (case 26)."""
    refused(server, CHAT, extra, param)


def test_field_missing(server: Running):
    for path, field in ((CHAT, "messages"), (COMPLETIONS, "prompt")):
        assert error_of(server.post(path, {}), 400, field)["code"] == "missing_required_parameter"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff", b"[1]", b'"x"', b"[" * 100_000, b'{"prompt": "\\ud800"}', b'{"prompt": "x", "top_p": NaN}'],
)
def test_bodies_that_are_no_request(server: Running, body: bytes):
    response = server.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    param = "top_p" if b"NaN" in body else None
    error_of(response, 400, param)
    assert server.post(COMPLETIONS, {"prompt": "x"}).status_code == 200


def test_content_type_is_required(server: Running):
    """A page on another site can send text/plain, never application/json, without the browser asking first."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = server.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers={"content-type": kind})
        error_of(response, 415, None, "unsupported_media_type")
    kind = "application/json; charset=utf-8"
    assert server.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers={"content-type": kind}).status_code == 200


def test_unknown_model(server: Running):
    for path in (CHAT, COMPLETIONS):
        error_of(server.post(path, BASE[path] | {"model": "gpt-9"}), 404, "model", "model_not_found")
        assert server.post(path, BASE[path] | {"model": "tiny-alias"}).json()["model"] == "tiny-alias"
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("gpt-9")
    error_of(server.post("/tokenize", {"prompt": "x", "model": "gpt-9"}), 404, "model", "model_not_found")
    error_of(server.post("/detokenize", {"tokens": [1], "model": "gpt-9"}), 404, "model", "model_not_found")


def test_unknown_route_and_method(server: Running):
    error_of(server.http.get("/v1/nope"), 404, None, "unknown_url")
    error_of(server.http.get("/v1/models/"), 404, "model", "model_not_found")
    response = server.http.get(CHAT)
    error_of(response, 405, None, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    error_of(server.http.delete("/v1/models"), 405, None, "method_not_allowed")


def test_models(server: Running):
    assert [card.id for card in server.client.models.list()] == ["tiny", "tiny-alias"]
    card = server.client.models.retrieve("tiny-alias")
    assert card.object == "model" and card.owned_by == "jaxserve" and card.model_dump()["max_model_len"] == 512


def test_body_size(server: Running):
    """Case 24: by the header, and by counting when the header is missing."""
    body = json.dumps({"prompt": "x" * (4 * 2**20)}).encode()
    kind = {"content-type": "application/json"}
    error_of(server.http.post(COMPLETIONS, content=body, headers=kind), 413, None, "request_too_large")

    def pieces():
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    with httpx.Client(base_url=server.url) as client:
        error_of(client.post(COMPLETIONS, content=pieces(), headers=kind), 413, None, "request_too_large")
    assert server.post(COMPLETIONS, {"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_failed_generation(server: Running, path: str, stream: bool):
    """Case 9, the HTTP half: a choice that ends with an error is an error, not a text."""
    server.engine.script = Script(fail_after=3)
    ask = server.chat if path == CHAT else server.complete
    if stream:
        with pytest.raises(openai.APIError, match="non-finite logits"):
            list(ask(stream=True, n=2))
    else:
        with pytest.raises(openai.InternalServerError, match="non-finite logits"):
            ask(n=2)
    wait = server.engine.streams[-1]
    assert wait.cancelled or not wait.running
    server.engine.script = Script()
    assert server.post(path, BASE[path]).status_code == 200


def test_unexpected_exception_tells_nothing(server: Running, caplog: pytest.LogCaptureFixture):
    """Case 25: no path, no address, no exception text; the log has it under the request's id."""
    server.engine.crash = RuntimeError("/secret/path at 0x7f00")
    response = server.post(COMPLETIONS, {"prompt": "x"}, headers={"x-request-id": "my-id.1"})
    error = error_of(response, 500, None, "internal_error")
    assert "my-id.1" in error["message"] and response.headers["x-request-id"] == "my-id.1"
    assert "secret" not in response.text and "0x7f" not in response.text and "Traceback" not in response.text
    assert any("my-id.1" in record.getMessage() for record in caplog.records)
    wait_for(lambda: any(record.exc_info and "secret" in str(record.exc_info[1]) for record in caplog.records))
    server.engine.crash = None
    assert server.post(COMPLETIONS, {"prompt": "x"}).status_code == 200


def test_later_prompt_refused_frees_the_earlier(server: Running):
    started = len(server.engine.streams)
    calls = iter([None, InvalidRequest("prompt", "is bad")])
    submit = server.engine.submit

    def second_fails(request):
        if (error := next(calls)) is not None:
            raise error
        return submit(request)

    server.engine.submit = second_fails  # type: ignore[method-assign]
    try:
        error_of(server.post(COMPLETIONS, {"prompt": ["a", "b"]}), 400, "prompt")
    finally:
        del server.engine.submit
    assert [stream.cancelled for stream in server.engine.streams[started:]] == [True]


def test_request_ids(server: Running):
    plain = server.http.get("/version").headers["x-request-id"]
    assert plain and plain != server.http.get("/version").headers["x-request-id"]
    odd = server.http.get("/version", headers={"x-request-id": "a b\tc"}).headers["x-request-id"]
    assert odd != "a b\tc" and "server" not in server.http.get("/version").headers


def test_never_fits_the_cache():
    """Case 3: refused at admission."""
    limits = dataclasses.replace(LIMITS, num_pages=4)
    with serving(limits=limits) as server:
        error_of(server.post(COMPLETIONS, {"prompt": "x" * 70}), 400, "prompt")
        error_of(server.post(COMPLETIONS, {"prompt": "x" * 60, "max_tokens": 10}), 400, "max_tokens")
        assert server.post(COMPLETIONS, {"prompt": "x" * 60, "max_tokens": 5}).status_code == 200
        server.chat("x")  # what is left out is as much as fits
        assert server.last.params.max_tokens == 65 - len(server.last.prompt_ids)
