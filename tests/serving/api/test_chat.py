"""Chat through the official client."""

import asyncio
from typing import Any

import openai
import pytest

from tests.serving.api.support import BOS, EOS, TURN, Running, Script, byte_tokenizer, error_of, events, serving


def says(text: str) -> Script:
    return Script(reply=lambda request, index: text.encode())


def text_of(stream) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_answer_and_usage(server: Running):
    answer = server.chat("hi")
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == "tiny"
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello, world!", "stop")
    prompt = len(b"user\nhi\nassistant\n") + 2
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": prompt,
        "completion_tokens": 14,
        "total_tokens": prompt + 14,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_template_and_special_tokens(server: Running):
    server.chat(messages=[{"role": "developer", "content": "be"}, {"role": "user", "content": "é"}])
    expected = [TURN, *b"system\nbe\n", TURN, *"user\né\n".encode(), TURN, *b"assistant\n"]
    assert list(server.last.prompt_ids) == expected


def test_template_options(server: Running):
    server.chat("a", add_generation_prompt=False, chat_template_kwargs={"shout": True})
    assert list(server.last.prompt_ids) == [TURN, *b"user\na\nLOUD"]


def test_text_parts_are_joined(server: Running):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    server.chat(messages=[{"role": "user", "content": parts}])
    assert list(server.last.prompt_ids) == [TURN, *b"user\na\nb\n", TURN, *b"assistant\n"]


def test_answer_can_be_sent_back(server: Running):
    """The message the client parsed, with all the fields it fills in, is accepted as a turn."""
    message = server.chat("hi").choices[0].message
    again = server.chat(
        messages=[{"role": "user", "content": "hi"}, message.model_dump(), {"role": "user", "content": "x"}]
    )
    assert again.choices[0].message.content == "Hello, world!"


def test_stream_has_role_first_and_same_text(server: Running):
    """Case 10, second half."""
    chunks = list(server.chat("hi", stream=True))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert text_of(chunks) == server.chat("hi").choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].object == "chat.completion.chunk"


def test_stream_usage_only_when_asked(server: Running):
    """Case 14."""
    plain = list(server.chat(stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in plain)
    *chunks, last = server.chat(stream=True, stream_options={"include_usage": True})
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert last.choices == [] and last.usage == server.chat().usage


def test_stream_on_the_wire(server: Running):
    response = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache" and "content-length" not in response.headers
    assert events(response.text)[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_over_tokens_is_not_leaked(server: Running, stream: bool):
    """Cases 10 and 11: every byte is a token here."""
    server.engine.script = says("one STOP two")
    if stream:
        chunks = list(server.chat(stop="STOP", stream=True))
        assert text_of(chunks) == "one " and chunks[-1].choices[0].stop_reason == "STOP"
    else:
        [choice] = server.chat(stop=["STOP"]).choices
        assert (choice.message.content, choice.finish_reason, choice.stop_reason) == ("one ", "stop", "STOP")
    server.engine.script = says("one STO")  # held back, and flushed at the end
    answer = server.chat(stop="STOP", stream=stream)
    assert (text_of(answer) if stream else answer.choices[0].message.content) == "one STO"


def test_characters_split_over_tokens(server: Running):
    """Case 13."""
    text = "a👩‍👩‍👧é漢e\u0301\u2028z"
    server.engine.script = says(text)
    chunks = list(server.chat(stream=True, logprobs=True))
    assert text_of(chunks) == text == server.chat().choices[0].message.content
    assert all("\ufffd" not in (chunk.choices[0].delta.content or "") for chunk in chunks)
    raw = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True})
    assert raw.text.isascii()  # no character that a client could take for a line end


def test_logprobs_schema(server: Running):
    """Case 8, chat."""
    server.engine.script = says("é!")
    content = server.chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [entry.token for entry in content] == ["bytes:\\xc3", "bytes:\\xa9", "!", "</s>"]
    assert [entry.bytes for entry in content[:3]] == [[0xC3], [0xA9], [0x21]]
    assert bytes(byte for entry in content[:3] for byte in entry.bytes).decode() == "é!"
    assert content[0].logprob == -0.5
    assert [(top.token, top.bytes) for top in content[1].top_logprobs] == [
        ("bytes:\\xa9", [0xA9]),
        ("bytes:\\xe2", [0xE2]),
    ]
    streamed = server.chat(logprobs=True, top_logprobs=2, stream=True)
    pieces = [chunk.choices[0].logprobs.content for chunk in streamed if chunk.choices[0].logprobs]
    assert [entry for piece in pieces for entry in piece] == content
    assert server.chat().choices[0].logprobs is None
    assert server.chat(logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_several_choices(server: Running):
    server.engine.script = Script(reply=lambda request, index: f"choice {index}".encode())
    answer = server.chat(n=3)
    assert [choice.message.content for choice in answer.choices] == ["choice 0", "choice 1", "choice 2"]
    texts, roles = {}, []
    for chunk in server.chat(n=3, stream=True):
        [choice] = chunk.choices
        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        roles += [choice.index] if choice.delta.role else []
    assert texts == {0: "choice 0", 1: "choice 1", 2: "choice 2"} and sorted(roles) == [0, 1, 2]


def test_token_ids(server: Running):
    answer = server.chat("a", return_token_ids=True)
    assert answer.choices[0].token_ids == [*b"Hello, world!", EOS]
    assert answer.prompt_token_ids == list(server.last.prompt_ids)
    chunks = list(server.chat("a", return_token_ids=True, stream=True))
    assert [t for c in chunks for t in getattr(c.choices[0], "token_ids", None) or []] == answer.choices[0].token_ids
    assert chunks[0].prompt_token_ids == answer.prompt_token_ids


def test_max_tokens_and_its_newer_name(server: Running):
    for answer in (server.chat(max_tokens=5), server.chat(max_completion_tokens=5)):
        [choice] = answer.choices
        assert (choice.message.content, choice.finish_reason) == ("Hello", "length")
    server.chat()
    assert server.last.params.max_tokens == 512 - len(server.last.prompt_ids)  # all the room there is
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "max_completion_tokens": 6}
    error_of(server.post("/v1/chat/completions", body), 400, "max_tokens")


def test_template_refusal(server: Running):
    """Case 26: the template's own error is a 400; a request cannot bring a template or override its inputs."""
    with pytest.raises(openai.BadRequestError, match="roles must alternate") as caught:
        server.chat("refuse")
    assert caught.value.param == "messages"
    for field in ({"chat_template": "{{ 1 }}"}, {"chat_template_kwargs": {"messages": "x"}}):
        with pytest.raises(openai.BadRequestError) as caught:
            server.chat("x", **field)
        assert caught.value.param == next(iter(field))


def test_model_without_template():
    with serving(tokenizer=byte_tokenizer(chat=False)) as server:
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            server.chat()
        assert server.complete().choices[0].text == "Hello, world!"


def test_bos_is_not_doubled():
    """The template writes the BOS that it wants; only plain prompts get the tokenizer's."""
    with serving(tokenizer=byte_tokenizer(bos=True)) as server:
        server.chat("<s>x")
        assert server.last.prompt_ids.count(BOS) == 1
        server.complete("x")
        assert list(server.last.prompt_ids) == [BOS, *b"x"]
        server.complete("x", add_special_tokens=False)
        assert list(server.last.prompt_ids) == [*b"x"]


def test_async_client(server: Running):
    async def ask() -> str:
        async with server.async_client() as client:
            stream = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask()) == "Hello, world!"


def test_stream_helper_of_the_client(server: Running):
    """The official client's own assembly of a stream, log-probabilities included."""
    messages: Any = [{"role": "user", "content": "hi"}]
    options: Any = {"stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 1, "n": 2}
    with server.client.chat.completions.stream(model="tiny", messages=messages, **options) as stream:
        final: Any = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["Hello, world!"] * 2
    assert final.choices[1].logprobs.content and len(final.choices[1].logprobs.content) == 14
    assert final.usage == server.chat(n=2).usage
