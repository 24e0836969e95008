"""/tokenize and /detokenize."""

import pytest

from tests.serving.api.support import BOS, EOS, TURN, Running, byte_tokenizer, error_of, serving


def test_text(server: Running):
    answer = server.post("/tokenize", {"model": "tiny", "prompt": "aé"}).json()
    assert answer == {"count": 3, "max_model_len": 512, "tokens": [97, 0xC3, 0xA9], "token_strs": None}
    answer = server.post("/tokenize", {"prompt": "aé", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert server.post("/tokenize", {"prompt": ""}).json()["tokens"] == []


def test_bos():
    with serving(tokenizer=byte_tokenizer(bos=True)) as server:
        assert server.post("/tokenize", {"prompt": "a"}).json()["tokens"] == [BOS, 97]
        assert server.post("/tokenize", {"prompt": "a", "add_special_tokens": False}).json()["tokens"] == [97]


def test_conversation(server: Running):
    messages = [{"role": "user", "content": "a"}]
    answer = server.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()
    assert answer["tokens"] == [TURN, *b"user\na\n"]
    server.chat("a")
    assert server.post("/tokenize", {"messages": messages}).json()["tokens"] == list(server.last.prompt_ids)


def test_detokenize(server: Running):
    answer = server.post("/detokenize", {"model": "tiny", "tokens": [97, 0xC3, 0xA9, EOS]})
    assert answer.json() == {"prompt": "aé</s>"}
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_long_text_takes_the_thread(server: Running):
    text = "漢" * 5000
    tokens = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [{}]}, "tools"),
        ("/tokenize", {"prompt": "a", "nope": 1}, "nope"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [259]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_refusals(server: Running, path: str, body: dict, param: str):
    error_of(server.post(path, body), 400, param)
