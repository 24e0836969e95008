"""Completions through the official client."""

import openai
import pytest

from tests.serving.api.support import EOS, Running, Script, byte_tokenizer, error_of, serving


def test_text_prompt(server: Running):
    answer = server.complete("ab")
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    [choice] = answer.choices
    assert (choice.text, choice.index, choice.finish_reason, choice.logprobs) == ("Hello, world!", 0, "stop", None)
    assert list(server.last.prompt_ids) == [*b"ab"]
    assert answer.usage.prompt_tokens == 2 and answer.usage.total_tokens == 2 + 14
    assert server.last.params.max_tokens == 16  # the API's default


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_kinds_of_prompt(server: Running, prompt, ids, stream: bool):
    server.engine.script = Script(reply=lambda request, index: bytes([*request.prompt_ids, 48 + index]))
    texts: dict[int, str] = {}
    answer = server.complete(prompt, n=2, stream=stream)
    for choice in [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices:
        texts[choice.index] = texts.get(choice.index, "") + choice.text
    expected = [bytes(tokens).decode() + suffix for tokens in ids for suffix in "01"]
    assert [texts[index] for index in range(len(expected))] == expected
    assert [list(request.prompt_ids) for request in server.engine.requests[-len(ids) :]] == ids


def test_stream_usage(server: Running):
    """Case 14, with several prompts."""
    *chunks, last = server.complete(["a", "bc"], stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage == server.complete(["a", "bc"]).usage
    assert last.usage.prompt_tokens == 3 and all(chunk.usage is None for chunk in chunks)
    assert all(chunk.choices for chunk in server.complete("a", stream=True))


def test_logprobs_schema(server: Running):
    """Case 8, completions; offsets count characters of the text."""
    server.engine.script = Script(reply=lambda request, index: "aé!".encode())
    [choice] = server.complete("p", logprobs=2).choices
    logprobs = choice.logprobs
    assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "!", "</s>"]
    assert logprobs.token_logprobs == [-0.5] * 5
    assert logprobs.text_offset == [0, 1, 1, 2, 3]
    assert logprobs.top_logprobs[1] == {"bytes:\\xc3": -0.5, "bytes:\\xe2": -1.0 - 0xE2}
    assert server.complete("p", logprobs=0).choices[0].logprobs.top_logprobs[0] == {"a": -0.5}


def test_echo_with_prompt_logprobs_alone(server: Running):
    """Case 5: prompt log-probabilities and zero generated tokens. One that is not finite still is JSON."""
    answer = server.complete("abc", echo=True, max_tokens=0, logprobs=1)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == ("abc", "length")
    assert answer.usage.completion_tokens == 0
    assert choice.logprobs.tokens == ["a", "b", "c"]
    assert choice.logprobs.token_logprobs == [None, -9999.0, -9999.0]
    assert choice.logprobs.top_logprobs == [None, {"b": -9999.0, "A": -0.1}, {"c": -9999.0, "A": -0.1}]
    assert choice.logprobs.text_offset == [0, 1, 2]
    assert server.last.params.prompt_logprobs == 1 and server.last.params.max_tokens == 0


def test_zero_tokens_without_echo(server: Running):
    """Case 5, the rest: an empty answer that ended by length."""
    [choice] = server.complete("abc", max_tokens=0).choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("", "length", None)
    assert server.complete("abc", max_tokens=0, echo=True).choices[0].text == "abc"


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
def test_echo(server: Running, prompt):
    [choice] = server.complete(prompt, echo=True, logprobs=0, max_tokens=2).choices
    assert choice.text == "abHe"
    assert choice.logprobs.tokens == ["a", "b", "H", "e"] and choice.logprobs.text_offset == [0, 1, 2, 3]


def test_echo_streams_the_same(server: Running):
    """Every choice begins with its prompt, whose log-probabilities come from choice 0."""
    options = {"echo": True, "logprobs": 1, "n": 2, "max_tokens": 4}
    whole = server.complete(["ab", "c"], **options)
    text, tokens, scores, offsets, ends = {}, {}, {}, {}, {}
    for chunk in server.complete(["ab", "c"], stream=True, **options):
        for choice in chunk.choices:
            text[choice.index] = text.get(choice.index, "") + choice.text
            tokens.setdefault(choice.index, []).extend(choice.logprobs.tokens)
            scores.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs)
            offsets.setdefault(choice.index, []).extend(choice.logprobs.text_offset)
            ends[choice.index] = choice.finish_reason
    for choice in whole.choices:
        assert text[choice.index] == choice.text and ends[choice.index] == choice.finish_reason
        assert tokens[choice.index] == choice.logprobs.tokens
        assert scores[choice.index] == choice.logprobs.token_logprobs
        assert offsets[choice.index] == choice.logprobs.text_offset
    assert [choice.text for choice in whole.choices] == ["abHell", "abHell", "cHell", "cHell"]


def test_token_ids(server: Running):
    [choice] = server.complete([97], return_token_ids=True).choices
    assert choice.token_ids == [*b"Hello, world!", EOS] and choice.prompt_token_ids == [97]
    chunks = [chunk.choices[0] for chunk in server.complete([97], return_token_ids=True, stream=True)]
    assert [token for piece in chunks for token in piece.token_ids] == choice.token_ids
    assert chunks[0].prompt_token_ids == [97]


def test_sampling_fields_reach_the_engine(server: Running):
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 7,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "max_tokens": 9,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
    }
    server.complete("a", logit_bias={"65": -100, "66": 2.5}, stop=["x", "y"], stop_token_ids=[3, 4], **fields)
    params = server.last.params
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.logit_bias == ((65, -100.0), (66, 2.5))
    assert params.stop == ("x", "y") and params.stop_token_ids == (3, 4)
    assert server.complete("a", top_k=-1).choices and server.last.params.top_k == 0


def test_null_is_the_default(server: Running):
    body = {
        "prompt": "a",
        "temperature": None,
        "stop": None,
        "n": None,
        "stream": None,
        "logit_bias": None,
        "user": None,
    }
    assert server.post("/v1/completions", body).status_code == 200
    assert server.last.params.temperature == 1.0 and server.last.n == 1


def test_cache_salt_separates(server: Running):
    """Case 23, the HTTP half."""
    server.complete("a", cache_salt="s")
    assert server.last.extras == b"s"
    server.complete("a")
    assert server.last.extras == b""


def test_model_defaults():
    with serving(defaults={"temperature": 0.6, "top_k": 20, "top_p": 0.95}) as server:
        server.complete("a")
        params = server.last.params
        assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.95)
        server.complete("a", temperature=0, top_k=0)
        assert (server.last.params.temperature, server.last.params.top_k) == (0, 0)


def test_prompt_lengths(server: Running):
    """Case 2: beyond the limit, exactly at it, one below it."""
    for length, options in ((513, {}), (512, {}), (513, {"max_tokens": 0}), (5, {"max_tokens": 508})):
        body = {"prompt": "a" * length, **options}
        param = "max_tokens" if length == 5 else "prompt"
        error_of(server.post("/v1/completions", body), 400, param, "context_length_exceeded")
    with pytest.raises(openai.BadRequestError) as caught:
        server.chat("a" * 600)
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")
    assert server.complete("a" * 511).choices[0].text == "H"
    assert server.complete("a" * 512, max_tokens=0, echo=True).choices[0].text == "a" * 512


def test_empty_prompts(server: Running):
    """Case 1."""
    for prompt in ("", [""], [], [[]], ["a", ""]):
        error_of(server.post("/v1/completions", {"prompt": prompt}), 400, "prompt")
    with serving(tokenizer=byte_tokenizer(bos=True)) as other:
        assert other.complete("").choices[0].text == "Hello, world!"
