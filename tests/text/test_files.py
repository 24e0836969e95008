"""Tokenizer files: what a directory may hold, what survives a round trip, and what is refused."""

import json
import pathlib
import shutil
import subprocess
import sys
import typing

import pytest

from jaxserve.errors import UserError
from jaxserve.text import (
    ChatTemplate,
    Tokenizer,
    copy_tokenizer_files,
    has_tokenizer,
    load_tokenizer,
    save_tokenizer,
)
from jaxserve.text.tokenizer import SpecialTokens

from .conftest import BYTE_MERGES, BYTE_TOKENS

TEXTS = ("", " the 你 😀", "a<|end|>b<think>c", "e\u0301\r\n\t x")


def edit_json(path: pathlib.Path, **changes: typing.Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


@pytest.fixture
def saved(byte_bpe: Tokenizer, tmp_path: pathlib.Path) -> pathlib.Path:
    save_tokenizer(byte_bpe, tmp_path)
    return tmp_path


def same_behaviour(one: Tokenizer, other: Tokenizer) -> bool:
    fields = ("bos_id", "eos_id", "unk_id", "pad_id", "vocab_size", "special_ids", "prefix_ids", "suffix_ids", "tokens")
    return all(getattr(one, field) == getattr(other, field) for field in fields) and all(
        one.encode(text) == other.encode(text) and one.decode(one.encode(text)) == other.decode(other.encode(text))
        for text in TEXTS
    )


class TestRoundTrip:
    @pytest.mark.parametrize("prefix", [(), (261,)])
    @pytest.mark.parametrize("suffix", [(), (261,)])
    def test_everything_survives(self, byte_bpe: Tokenizer, tmp_path: pathlib.Path, prefix: tuple, suffix: tuple):
        template = ChatTemplate("\n a\r\n{{ bos_token }}\n", "<|end|>", "<|end|>", tool_source="tools")
        tokenizer = Tokenizer(
            byte_bpe.backend, byte_bpe.tokens, prefix_ids=prefix, suffix_ids=suffix, chat_template=template
        )
        save_tokenizer(tokenizer, tmp_path)
        again = load_tokenizer(tmp_path)
        assert same_behaviour(tokenizer, again)
        assert again.chat_template is not None
        assert (again.chat_template.source, again.chat_template.tool_source) == (template.source, "tools")
        assert again.chat_template.special_tokens == template.special_tokens

    def test_roles_that_are_not_there_stay_away(self, stories: Tokenizer, tmp_path: pathlib.Path):
        save_tokenizer(Tokenizer(stories.backend, SpecialTokens(eos="</s>")), tmp_path)
        again = load_tokenizer(tmp_path)
        assert (again.bos_id, again.eos_id, again.encode_prompt("a")) == (None, 2, stories.encode("a"))

    def test_copy_is_unchanged(self, shared: pathlib.Path, tmp_path: pathlib.Path):
        source = shared / "fixtures" / "stories260K"
        names = copy_tokenizer_files(source, tmp_path / "new")
        assert names == ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"]
        assert all((tmp_path / "new" / name).read_bytes() == (source / name).read_bytes() for name in names)

    def test_copy_without_a_tokenizer(self, tmp_path: pathlib.Path):
        with pytest.raises(UserError, match="no tokenizer here"):
            copy_tokenizer_files(tmp_path, tmp_path / "new")


class TestHuggingFaceDirectories:
    def test_truncation_and_padding_of_the_file_are_ignored(self, saved: pathlib.Path):
        truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
        edit_json(saved / "tokenizer.json", truncation=truncation)
        assert len(load_tokenizer(saved).encode("abcdef")) == 6

    def test_post_processor_gives_bos_and_eos(self, saved: pathlib.Path):
        end = {"id": "<|end|>", "ids": [261], "tokens": ["<|end|>"]}
        single = [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        processor = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {"<|end|>": end}}
        processor["pair"] = [*single, {"Sequence": {"id": "B", "type_id": 0}}]
        edit_json(saved / "tokenizer.json", post_processor=processor)
        edit_json(saved / "tokenizer_config.json", add_bos_token=None)
        assert load_tokenizer(saved).encode_prompt("a") == [261, *load_tokenizer(saved).encode("a")]
        edit_json(saved / "tokenizer_config.json", add_bos_token=False)
        assert load_tokenizer(saved).prefix_ids == ()

    def test_tokens_as_objects_and_in_the_special_map(self, saved: pathlib.Path):
        (saved / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>", "special": True}}))
        (saved / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<think>", "eos_token": "!"}))
        tokenizer = load_tokenizer(saved)
        assert (tokenizer.bos_id, tokenizer.eos_id) == (262, 261)

    def test_roles_are_special_whatever_the_vocabulary_says(self, saved: pathlib.Path):
        edit_json(saved / "tokenizer_config.json", pad_token="<think>")
        assert load_tokenizer(saved).special_ids == {261, 262}

    def test_where_the_chat_template_comes_from(self, saved: pathlib.Path):
        def source() -> str | None:
            template = load_tokenizer(saved).chat_template
            return template and template.source

        assert source() is None
        (saved / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
        assert source() == "json"
        edit_json(saved / "tokenizer_config.json", chat_template="config")
        assert source() == "config"
        (saved / "chat_template.jinja").write_text("jinja")
        assert source() == "jinja"

    def test_gpt2_files(self, byte_bpe: Tokenizer, tmp_path: pathlib.Path):
        vocab = {token: index for index, token in enumerate(BYTE_TOKENS[:-1])}
        (tmp_path / "vocab.json").write_text(json.dumps(vocab))
        merges = "\n".join(["#version: 0.2", *map(" ".join, BYTE_MERGES), ""])
        (tmp_path / "merges.txt").write_text(merges, encoding="utf-8")
        edit_json(tmp_path / "tokenizer_config.json", bos_token="<|end|>", add_bos_token=True)
        tokenizer = load_tokenizer(tmp_path)
        text = " the 你<|end|>"
        assert tokenizer.encode_prompt(text) == [261, *byte_bpe.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == " the 你"

    def test_tokens_added_to_a_sentencepiece_model(
        self, stories: Tokenizer, shared: pathlib.Path, tmp_path: pathlib.Path
    ):
        shutil.copyfile(shared / "fixtures" / "stories260K" / "tokenizer.model", tmp_path / "tokenizer.model")
        added = {
            "1": {"content": "<s>"},
            "512": {"content": "<|im_end|>", "special": True},
            "514": {"content": "<tool>"},
        }
        edit_json(tmp_path / "tokenizer_config.json", eos_token="<|im_end|>", added_tokens_decoder=added)
        save_tokenizer(load_tokenizer(tmp_path), tmp_path / "again")
        for folder in (tmp_path, tmp_path / "again"):
            tokenizer = load_tokenizer(folder)
            ids = tokenizer.encode("Once<|im_end|><tool>upon")
            assert ids == [*stories.encode("Once"), 512, 514, *stories.encode("upon")]
            assert (tokenizer.eos_id, tokenizer.vocab_size) == (512, 515)
            assert tokenizer.decode(ids) == "Once<tool> upon"
            assert tokenizer.decode([513]) == ""


class TestEncoding:
    @pytest.mark.parametrize("name", ["byte_bpe", "stories", "stories_json"])
    def test_surrogates(self, name: str, request: pytest.FixtureRequest):
        tokenizer: Tokenizer = request.getfixturevalue(name)
        assert tokenizer.encode("a\ud800b") == tokenizer.encode("a\ufffdb")
        assert tokenizer.encode("\ud83d\ude00") == tokenizer.encode("😀")


class TestRefusals:
    def test_nothing_there(self, tmp_path: pathlib.Path):
        assert not has_tokenizer(tmp_path)
        with pytest.raises(UserError, match=r"no tokenizer here; expected one of tokenizer\.json, tokenizer\.model"):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize(
        ("name", "content", "words"),
        [
            ("tokenizer.json", "{", "tokenizer.json: not a tokenizer.json"),
            ("tokenizer.model", "junk", "tokenizer.model: not a sentencepiece model"),
            ("tokenizer_config.json", "{", "tokenizer_config.json: not JSON"),
            ("tokenizer_config.json", "[]", "tokenizer_config.json: expected a JSON object, found list"),
            ("vocab.json", "{}", "vocab.json without merges.txt"),
        ],
    )
    def test_broken_files(self, name: str, content: str, words: str, tmp_path: pathlib.Path):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=words):
            load_tokenizer(tmp_path)

    def test_other_tokenizers_in_gpt2_files(self, tmp_path: pathlib.Path):
        (tmp_path / "vocab.json").write_text("{}")
        (tmp_path / "merges.txt").write_text("")
        edit_json(tmp_path / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
        with pytest.raises(UserError, match="Qwen2Tokenizer"):
            load_tokenizer(tmp_path)

    def test_decoder_that_cannot_be_streamed(self, saved: pathlib.Path):
        edit_json(saved / "tokenizer.json", decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
        with pytest.raises(UserError, match=r"tokenizer\.json: the decoder of this tokenizer \(WordPiece\)"):
            load_tokenizer(saved)


def test_import_is_cheap():
    heavy = ["tokenizers", "sentencepiece", "transformers", "jinja2", "gguf", "jax", "numpy", "torch"]
    program = f"import sys, jaxserve.text; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
