"""Tokenizers from GGUF metadata: pre-tokenizers by name, sentencepiece by pieces, and metadata that make no sense."""

import pathlib
import typing

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxserve.errors import UserError
from jaxserve.text import Tokenizer, gguf_tokenizer, load_tokenizer, save_tokenizer
from jaxserve.text.pretokenizers import PRE_TOKENIZERS

from .conftest import BYTE_MERGES, BYTE_TOKENS

Metadata = dict[str, typing.Any]


def bpe_metadata(**changes: typing.Any) -> Metadata:
    """Metadata of a byte-level model; a change of None removes a key."""
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": BYTE_TOKENS,
        "token_type": [1] * (len(BYTE_TOKENS) - 2) + [3, 4],
        "merges": [" ".join(merge) for merge in BYTE_MERGES],
        "bos_token_id": len(BYTE_TOKENS) - 2,
        "eos_token_id": len(BYTE_TOKENS) - 2,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def words(pre: str, text: str) -> list[str]:
    """How the pre-tokenizer of that name cuts the text."""
    tokenizer = gguf_tokenizer(bpe_metadata(pre=pre))
    library = tokenizer.backend._backend  # type: ignore[attr-defined]
    return [text[start:end] for _, (start, end) in library.pre_tokenizer.pre_tokenize_str(text)]


class TestPreTokenizers:
    @pytest.mark.parametrize(
        ("names", "text", "expected"),
        [
            ("gpt-2 phi-2 olmo", "I'LL it's  12\n\ny", ["I", "'", "LL", " it", "'s", " ", " 12", "\n", "\n", "y"]),
            ("smollm starcoder", "x  12 y¼", ["x", "  ", "1", "2", " y", "¼"]),
            ("llama-bpe llama3 dbrx", "I'LL (a 1234!\n\n x", ["I", "'LL", " (", "a", " ", "123", "4", "!\n\n", " x"]),
            ("qwen2", "I'LL it 123\r\n y", ["I", "'LL", " it", " ", "1", "2", "3", "\r\n", " y"]),
            ("gpt-4o llama4", "HelloWorld's 1234/\n", ["Hello", "World's", " ", "123", "4", "/\n"]),
            ("tekken", "HelloWorld's 12/\n", ["Hello", "World", "'s", " ", "1", "2", "/\n"]),
            ("deepseek-v3", "a1234 你好x .b\n", ["a", "123", "4", " ", "你好", "x", " .", "b", "\n"]),
            ("deepseek-coder", "def f12\n 你好!", ["def", " f", "1", "2", "\n", " ", "你好", "!"]),
            ("default", "a+b 1234567 $x", ["a", "+", "b", " ", "123", "456", "7", " ", "$", "x"]),
        ],
    )  # fmt: skip
    def test_cuts(self, names: str, text: str, expected: list[str]):
        for name in names.split():
            assert words(name, text) == expected, name

    @pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
    @hypothesis.given(text=st.text(st.sampled_from("aZé你1٣½ \t\n\r'.,$_/😀"), max_size=12))
    @hypothesis.settings(max_examples=20, deadline=None)
    def test_cuts_lose_nothing(self, name: str, text: str):
        assert "".join(words(name, text)) == text

    def test_unknown_name(self):
        with pytest.raises(UserError, match=r"unknown pre-tokenizer 'mystery'.*qwen2.*smollm"):
            gguf_tokenizer(bpe_metadata(pre="mystery"))

    def test_missing_name_means_default(self):
        metadata = bpe_metadata(pre=None, tokens=[*BYTE_TOKENS, "12"], token_type=None, merges=["1 2"])
        assert len(gguf_tokenizer(metadata).encode("12")) == 1
        metadata["tokenizer.ggml.pre"] = "smollm"
        assert len(gguf_tokenizer(metadata).encode("12")) == 2

    def test_whole_words_of_llama3(self):
        tokens = [*BYTE_TOKENS, "tube"]  # a token that no merge makes
        assert len(gguf_tokenizer(bpe_metadata(tokens=tokens, token_type=None)).encode("tube")) == 4
        assert len(gguf_tokenizer(bpe_metadata(tokens=tokens, token_type=None, pre="llama-bpe")).encode("tube")) == 1

    def test_qwen_composes_characters(self):
        decomposed, composed = "e\u0301", "\u00e9"
        assert gguf_tokenizer(bpe_metadata(pre="qwen2")).encode(decomposed) == gguf_tokenizer(bpe_metadata()).encode(
            composed
        )


class TestRoles:
    def test_special_and_added_tokens(self, byte_bpe: Tokenizer):
        tokenizer = gguf_tokenizer(bpe_metadata())
        text = "a<|end|><think> the"
        assert tokenizer.encode(text) == byte_bpe.encode(text)
        assert tokenizer.special_ids == {len(BYTE_TOKENS) - 2}

    @pytest.mark.parametrize(("pre", "stated", "added"), [
        ("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False),
    ])  # fmt: skip
    def test_bos(self, pre: str, stated: bool | None, added: bool, tmp_path: pathlib.Path):
        tokenizer = gguf_tokenizer(bpe_metadata(pre=pre, add_bos_token=stated))
        save_tokenizer(tokenizer, tmp_path)
        for one in (tokenizer, load_tokenizer(tmp_path)):
            assert one.encode_prompt("a") == [*([one.bos_id] if added else []), *one.encode("a")]

    def test_chat_template_for_tools(self):
        metadata = bpe_metadata() | {
            "tokenizer.chat_template": "plain{{ eos_token }}",
            "tokenizer.chat_template.tool_use": "tools",
        }
        template = gguf_tokenizer(metadata).chat_template
        assert template is not None
        assert (template.render([]), template.render([], tools=[])) == ("plain<|end|>", "tools")


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; supported: gpt2, llama"),
            ({"model": None}, "no tokenizer.ggml.model"),
            ({"tokens": None}, "no tokenizer.ggml.tokens"),
            ({"merges": None}, "no tokenizer.ggml.merges"),
            ({"tokens": [*BYTE_TOKENS[:-1], "a"]}, "'a' twice"),
            ({"token_type": [1]}, "token_type has 1 entries for 263 tokens"),
            ({"merges": ["nospace"]}, "'nospace', which is not two tokens"),
            ({"merges": ["a b c"]}, "'a b c', which is not two tokens"),
            ({"merges": ["a b"]}, "merge 'a' \\+ 'b'"),
            ({"bos_token_id": 263}, "bos_token_id is 263, outside the vocabulary of 263"),
            ({"model": "llama"}, "scores has 0 entries for 263 tokens"),
        ],
    )
    def test_message_names_the_key(self, changes: Metadata, words: str):
        with pytest.raises(UserError, match=words):
            gguf_tokenizer(bpe_metadata(**changes))


@pytest.fixture(scope="module")
def piece_metadata(stories: Tokenizer) -> Metadata:
    """What a GGUF made from stories260K would say about its tokenizer."""
    model = stories.backend._processor  # type: ignore[attr-defined]
    ids = range(model.get_piece_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(token) for token in ids],
        "tokenizer.ggml.scores": [model.get_score(token) for token in ids],
        "tokenizer.ggml.token_type": [2, 3, 3, *(6 if model.is_byte(token) else 1 for token in ids[3:])],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.remove_extra_whitespaces": True,
    }


class TestSentencePiece:
    def test_all_cases(self, piece_metadata: Metadata, tokenizer_cases: list[Metadata], tmp_path: pathlib.Path):
        tokenizer = gguf_tokenizer(piece_metadata)
        save_tokenizer(tokenizer, tmp_path)
        for one in (tokenizer, load_tokenizer(tmp_path)):
            for case in tokenizer_cases:
                assert one.encode(case["text"]) == case["stories260K"]["ids"]
                assert one.decode(case["stories260K"]["ids"]) == case["stories260K"]["decoded"]
            assert one.encode_prompt("Once") == [1, *one.encode("Once")]
            assert (one.bos_id, one.eos_id, one.unk_id, one.special_ids) == (1, 2, 0, {0, 1, 2})

    def test_written_model_is_what_the_format_says(self, piece_metadata: Metadata):
        sentencepiece_model_pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
        model = sentencepiece_model_pb2.ModelProto()
        model.ParseFromString(gguf_tokenizer(piece_metadata).backend._model)  # type: ignore[attr-defined]
        trainer, normalizer = model.trainer_spec, model.normalizer_spec
        assert [piece.piece for piece in model.pieces] == piece_metadata["tokenizer.ggml.tokens"]
        assert [piece.score for piece in model.pieces] == piece_metadata["tokenizer.ggml.scores"]
        assert (trainer.model_type, trainer.vocab_size, trainer.byte_fallback) == (2, 512, True)
        assert (trainer.unk_id, trainer.bos_id, trainer.eos_id, trainer.pad_id) == (0, 1, 2, -1)
        assert (trainer.unk_piece, trainer.bos_piece, trainer.eos_piece) == ("<unk>", "<s>", "</s>")
        assert (normalizer.name, normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces) == ("identity", 1, 1)

    @pytest.mark.parametrize("prefix", [True, False])
    @pytest.mark.parametrize("collapse", [True, False])
    def test_spaces(self, piece_metadata: Metadata, prefix: bool, collapse: bool):
        metadata = piece_metadata | {
            "tokenizer.ggml.add_space_prefix": prefix,
            "tokenizer.ggml.remove_extra_whitespaces": collapse,
        }
        tokenizer = gguf_tokenizer(metadata)
        library = tokenizer.backend._processor  # type: ignore[attr-defined]
        for text in ("  two  apart ", " one", "none", ""):
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == library.decode(ids)
            if not collapse:
                assert tokenizer.decode(ids) == text
        assert (tokenizer.encode("the")[0] == piece_metadata["tokenizer.ggml.tokens"].index("▁the")) is prefix

    def test_user_defined_pieces_with_spaces(self, piece_metadata: Metadata):
        kinds, tokens = list(piece_metadata["tokenizer.ggml.token_type"]), list(piece_metadata["tokenizer.ggml.tokens"])
        kinds.append(4)
        tokens.append("a  b")
        scores = [*piece_metadata["tokenizer.ggml.scores"], 0.0]
        tokenizer = gguf_tokenizer(
            piece_metadata
            | {
                "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.token_type": kinds,
                "tokenizer.ggml.scores": scores,
                "tokenizer.ggml.remove_extra_whitespaces": False,
            }
        )
        ids = tokenizer.encode("xa  bx")
        assert 512 in ids
        assert tokenizer.decode(ids) == "xa  bx"

    def test_two_equal_pieces(self, piece_metadata: Metadata):
        tokens = [*piece_metadata["tokenizer.ggml.tokens"][:-1], "<s>"]
        with pytest.raises(UserError, match="tokens: not a sentencepiece model"):
            gguf_tokenizer(piece_metadata | {"tokenizer.ggml.tokens": tokens})
