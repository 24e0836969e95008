"""Ids and texts against reference implementations: 76 strings and six chats."""

import pathlib
import typing

import pytest

from jaxserve.text import Tokenizer, load_tokenizer, save_tokenizer

Cases = list[dict[str, typing.Any]]


def mismatches(tokenizer: Tokenizer, cases: Cases, column: str) -> list[str]:
    """Texts whose ids, or whose decoded text where the column has one, differ."""
    wrong = []
    for case in cases:
        want = case[column]
        same_ids = tokenizer.encode(case["text"]) == want["ids"]
        decoded = tokenizer.decode(want["ids"], skip_special=False)
        if not same_ids or decoded != want.get("decoded", decoded):
            wrong.append(case["text"])
    return wrong


@pytest.fixture(params=["built", "reloaded"])
def again(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> typing.Callable[[Tokenizer], Tokenizer]:
    """The tokenizer itself, and what is left of it after saving and loading."""

    def through_disk(tokenizer: Tokenizer) -> Tokenizer:
        save_tokenizer(tokenizer, tmp_path)
        return load_tokenizer(tmp_path)

    return through_disk if request.param == "reloaded" else lambda tokenizer: tokenizer


class TestSampleModel:
    def test_all_cases(self, sample: Tokenizer, tokenizer_cases: Cases, again):
        assert len(tokenizer_cases) == 76
        assert mismatches(again(sample), tokenizer_cases, "smollm2_digits") == []

    def test_the_cases_tell_pre_tokenizers_apart(self, sample: Tokenizer, tokenizer_cases: Cases):
        assert len(mismatches(sample, tokenizer_cases, "smollm2")) == 2

    def test_chats(self, sample: Tokenizer, chat_cases: Cases, again):
        tokenizer = again(sample)
        assert len(chat_cases) == 6
        for case in chat_cases:
            assert tokenizer.chat_template is not None
            text = tokenizer.chat_template.render(case["messages"])
            assert text == case["prompt_text"]
            assert tokenizer.encode(text, special=True) == case["prompt_ids"]
            assert tokenizer.decode(case["greedy_ids"], skip_special=False) == case["greedy_text"]
            before_eos = case["greedy_ids"][: case["first_eos_index"]]
            assert tokenizer.decode(before_eos) == case["text_before_eos"]

    def test_roles(self, sample: Tokenizer, again):
        tokenizer = again(sample)
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id, tokenizer.pad_id) == (1, 2, 0, 2)
        assert tokenizer.vocab_size == 49152
        assert tokenizer.special_ids == frozenset(range(17))
        assert tokenizer.encode_prompt("a") == tokenizer.encode("a")  # the file says: no BOS


class TestStories:
    def test_sentencepiece(self, stories: Tokenizer, tokenizer_cases: Cases, again):
        assert mismatches(again(stories), tokenizer_cases, "stories260K") == []

    def test_tokenizer_json(self, stories_json: Tokenizer, tokenizer_cases: Cases, again):
        assert mismatches(again(stories_json), tokenizer_cases, "stories260K_tokenizer_json") == []

    def test_prompt_gets_bos(self, stories: Tokenizer, shared: pathlib.Path, again):
        import numpy as np

        with np.load(shared / "fixtures" / "stories260K" / "expected.npz") as expected:
            assert again(stories).encode_prompt(str(expected["prompt_text"])) == expected["input_ids"].tolist()

    def test_control_tokens_in_a_chat(self, stories: Tokenizer, again):
        tokenizer = again(stories)
        once = tokenizer.encode("Once")
        assert tokenizer.encode("<s>Once</s>", special=True) == [1, *once, 2]
        assert tokenizer.encode("<s>Once</s>")[0] != 1  # without being asked, sentencepiece reads them as text
