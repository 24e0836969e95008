"""Incremental detokenization: deltas add up to the whole text, and no character is ever cut."""

import typing

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxserve.text import StreamDecoder, Tokenizer

TOKENIZERS = ("byte_bpe", "stories", "stories_json")

# Byte pieces of stories260K, which are numbered from 3: often enough in an order that makes characters, or nearly.
PARTS_OF_CHARACTERS = st.sampled_from([byte + 3 for byte in "你😀é a".encode()])


def deltas(tokenizer: Tokenizer, ids: list[int], sizes: list[int], **options: typing.Any) -> list[str]:
    """What a decoder says when ids come in groups of these sizes (then one by one), and at the flush."""
    decoder = StreamDecoder(tokenizer, **options)
    out, at = [], 0
    for size in [*sizes, *[1] * len(ids)]:
        out.append(decoder.push(ids[at : at + size]))
        at += size
    return [*out, decoder.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
class TestAnyTokens:
    @hypothesis.given(data=st.data())
    @hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], deadline=None)
    def test_deltas_add_up(self, name: str, request: pytest.FixtureRequest, data: st.DataObject):
        tokenizer: Tokenizer = request.getfixturevalue(name)
        ids = data.draw(st.lists(st.integers(-2, tokenizer.vocab_size + 2), max_size=30))
        sizes = data.draw(st.lists(st.integers(0, 4), max_size=10))
        skip = data.draw(st.booleans())
        assert "".join(deltas(tokenizer, ids, sizes, skip_special=skip)) == tokenizer.decode(ids, skip_special=skip)

    @hypothesis.given(data=st.data())
    @hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], deadline=None)
    def test_text_streams_whole_characters(self, name: str, request: pytest.FixtureRequest, data: st.DataObject):
        tokenizer: Tokenizer = request.getfixturevalue(name)
        text = data.draw(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=30))
        ids = tokenizer.encode(text)
        parts = deltas(tokenizer, ids, [])
        assert "\ufffd" not in "".join(parts)
        assert parts[-1] == ""
        if name == "byte_bpe":
            assert "".join(parts) == text.replace("<|end|>", "")


class TestAgainstTheLibraries:
    @hypothesis.given(ids=st.lists(st.integers(0, 262), max_size=30), skip=st.booleans())
    def test_byte_level(self, byte_bpe: Tokenizer, ids: list[int], skip: bool):
        library = byte_bpe.backend._backend  # type: ignore[attr-defined]
        assert byte_bpe.decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)

    @hypothesis.given(ids=st.lists(st.integers(1, 511) | st.just(410) | PARTS_OF_CHARACTERS, max_size=20))
    def test_sentencepiece(self, stories: Tokenizer, ids: list[int]):
        library = stories.backend._processor  # type: ignore[attr-defined]
        ids = [token for token in ids if token not in stories.special_ids]
        assert stories.decode(ids) == library.decode(ids)

    @hypothesis.given(ids=st.lists(st.integers(259, 511) | st.just(410) | st.sampled_from([35, 100]), max_size=20))
    def test_byte_fallback(self, stories_json: Tokenizer, ids: list[int]):
        library = stories_json.backend._backend  # type: ignore[attr-defined]
        assert stories_json.decode(ids) == library.decode(ids)


class TestDecoder:
    def test_split_emoji_waits(self, byte_bpe: Tokenizer):
        ids = byte_bpe.encode("a😀b")
        decoder = StreamDecoder(byte_bpe)
        assert [decoder.push([token]) for token in ids] == ["a", "", "", "😀", "b"]

    def test_unfinished_character_appears_at_the_flush(self, byte_bpe: Tokenizer):
        decoder = StreamDecoder(byte_bpe)
        assert decoder.push(byte_bpe.encode("a😀")[:-1]) == "a"
        assert decoder.flush() == "\ufffd"
        assert decoder.flush() == ""

    def test_invalid_byte_does_not_block_what_follows(self, byte_bpe: Tokenizer):
        broken = byte_bpe.encode("你")[:1] + byte_bpe.encode("ok")
        assert byte_bpe.decode(broken) == "\ufffdok"

    def test_special_tokens(self, byte_bpe: Tokenizer):
        ids = byte_bpe.encode("a<|end|><think>b")
        assert len(ids) == 4
        assert byte_bpe.decode(ids) == "a<think>b"
        assert byte_bpe.decode(ids, skip_special=False) == "a<|end|><think>b"

    def test_special_token_inside_a_character(self, byte_bpe: Tokenizer):
        first, *rest = byte_bpe.encode("é")
        assert byte_bpe.bos_id is not None
        assert byte_bpe.decode([first, byte_bpe.bos_id, *rest]) == "é"

    def test_leading_space(self, stories: Tokenizer):
        ids = stories.encode("Once upon")
        assert stories.decode(ids) == "Once upon"
        assert "".join(deltas(stories, ids, [], continuation=True)) == " Once upon"

    def test_token_bytes(self, byte_bpe: Tokenizer, stories: Tokenizer):
        pieces = [byte_bpe.token_bytes(token) for token in byte_bpe.encode(" the 你")]
        assert pieces == [b" the", b" ", b"\xe4\xbd", b"\xa0"]
        assert byte_bpe.token_text(byte_bpe.encode("你")[0]) == "\ufffd"
        assert stories.token_bytes(13) == b"\n"
        assert stories.token_text(1) == "<s>"
        assert stories.token_bytes(512) == stories.token_bytes(-1) == b""
