"""The tokenizer that the rest of the system talks to, whatever library does the work behind it."""

import dataclasses
import functools
import pathlib
import typing

from jaxserve.errors import UserError
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.pieces import LeadingSpace, TokenBytes
from jaxserve.text.stream import StreamDecoder


class Backend(typing.Protocol):
    """What a tokenizer library provides: text to ids, and the bytes that one id stands for."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def leading_space(self) -> LeadingSpace: ...

    @property
    def utf8_errors(self) -> str: ...

    def encode(self, text: str, special: bool) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes: ...

    def token_id(self, piece: str) -> int | None: ...

    def added_around(self) -> tuple[list[int], list[int]]: ...

    def save(self, directory: pathlib.Path) -> dict[str, typing.Any]: ...


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """The tokens with a role, by their text; None where the model has none."""

    bos: str | None = None
    eos: str | None = None
    unk: str | None = None
    pad: str | None = None

    def names(self) -> dict[str, str]:
        """As Hugging Face files and chat templates call them: {"bos_token": ..., ...}, the missing left out."""
        return {f"{role}_token": text for role, text in dataclasses.asdict(self).items() if text is not None}


class Tokenizer:
    """Text to token ids and back.

    prefix_ids and suffix_ids are what `encode_prompt` puts around a prompt (usually nothing, or the BOS token).
    special_ids are the tokens that are no text: decoding skips them unless told otherwise.
    """

    def __init__(
        self,
        backend: Backend,
        tokens: SpecialTokens,
        *,
        prefix_ids: typing.Sequence[int] = (),
        suffix_ids: typing.Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
    ):
        self.backend = backend
        self.tokens = tokens
        self.prefix_ids = tuple(prefix_ids)
        self.suffix_ids = tuple(suffix_ids)
        self.chat_template = chat_template
        self.vocab_size: int = backend.vocab_size
        self.bos_id, self.eos_id, self.unk_id, self.pad_id = (
            None if text is None else backend.token_id(text)
            for text in (tokens.bos, tokens.eos, tokens.unk, tokens.pad)
        )
        roles = {self.bos_id, self.eos_id, self.unk_id, self.pad_id} - {None}
        self.special_ids: frozenset[int] = backend.special_ids | typing.cast(set[int], roles)
        self.leading_space: LeadingSpace = backend.leading_space
        self.utf8_errors: str = backend.utf8_errors

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of the text alone: no BOS or EOS is added.

        Special tokens written out in the text are recognised as far as the tokenizer itself does so: tokenizer.json and
        byte-level BPE do, sentencepiece does not. With special=True all of them are: the way to encode a rendered chat.
        Lone surrogates, which no tokenizer accepts, become U+FFFD.
        """
        return self.backend.encode(_well_formed(text), special)

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a plain prompt, with BOS (or what else the model expects around it) where its tokenizer says so."""
        return [*self.prefix_ids, *self.encode(text), *self.suffix_ids]

    def decode(self, ids: typing.Iterable[int], skip_special: bool = True) -> str:
        """Text of the ids; invalid bytes come out as U+FFFD. Ids outside the vocabulary contribute nothing."""
        decoder = StreamDecoder(self, skip_special=skip_special)
        return decoder.push(ids) + decoder.flush()

    def token_bytes(self, token: int) -> bytes:
        """Bytes that the token stands for in the middle of a text; special tokens give their name."""
        return self.bytes_table(False)[token]

    def token_text(self, token: int) -> str:
        """`token_bytes` as text, U+FFFD where the token is only a part of a character."""
        return self.token_bytes(token).decode(errors="replace")

    def bytes_table(self, skip_special: bool) -> TokenBytes:
        """Id -> bytes, with or without the special tokens; filled as it is used."""
        return self._text_bytes if skip_special else self._all_bytes

    @functools.cached_property
    def _all_bytes(self) -> TokenBytes:
        return TokenBytes(self.backend.token_bytes, self.vocab_size)

    @functools.cached_property
    def _text_bytes(self) -> TokenBytes:
        return TokenBytes(self.backend.token_bytes, self.vocab_size, self.special_ids)


def encode_text(tokenizer: Tokenizer, text: str, vocab: int) -> list[int]:
    """Ids of a text for a model that knows `vocab` of them; UserError when the tokenizer gives others.

    A model has no embedding of such an id, and a lookup beyond the table gives numbers of no meaning.
    """
    ids = tokenizer.encode(text)
    if ids and max(ids) >= vocab:
        wrong = next(token for token in ids if token >= vocab)
        raise UserError(
            f"the tokenizer makes token id {wrong} ({tokenizer.token_text(wrong)!r:.80}) of the text, and the model's "
            f"vocabulary has {vocab}: take the tokenizer that the model came with, or a text without such tokens"
        )
    return ids


def _well_formed(text: str) -> str:
    """The text with surrogate pairs joined and lone surrogates replaced, as JSON from anywhere may contain both."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
