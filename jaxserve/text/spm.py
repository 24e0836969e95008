"""Sentencepiece models (tokenizer.model), and models of that kind rebuilt from a list of pieces and scores."""

import functools
import pathlib
import re
import struct
import typing

from jaxserve.errors import UserError
from jaxserve.text import pieces

if typing.TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

# Kinds of pieces in a sentencepiece model; GGUF's token types have the same numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


class SentencePieceBackend:
    """A sentencepiece model, and tokens that were added to it afterwards: `added` maps id -> (text, is it special)."""

    def __init__(self, model: bytes, added: typing.Mapping[int, tuple[str, bool]] | None = None, origin: str = "model"):
        import sentencepiece

        self._model = model
        self._origin = origin
        try:
            self._processor: SentencePieceProcessor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, OSError) as error:
            raise UserError(f"{origin}: not a sentencepiece model: {error}") from error
        self._base_size = self._processor.get_piece_size()
        self._added = {token: entry for token, entry in (added or {}).items() if token >= self._base_size}
        self._added_ids = {text: token for token, (text, _) in self._added.items()}
        self.vocab_size = max(self._base_size, max(self._added, default=-1) + 1)
        self.special_ids = self._special_ids()
        self.leading_space = self._leading_space()
        self.utf8_errors = pieces.REPLACE_EACH_BYTE

    def encode(self, text: str, special: bool) -> list[int]:
        """Ids of text. Tokens added to the model are always recognised; the model's own control tokens if special."""
        pattern = self._markup_pattern if special else self._added_pattern
        if pattern is None:
            return self._processor.encode(text)
        ids: list[int] = []
        for index, part in enumerate(pattern.split(text)):
            if index % 2:
                token = self.token_id(part)
                assert token is not None, part
                ids.append(token)
            elif part:
                ids.extend(self._processor.encode(part))
        return ids

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one id; the names of control tokens are text of their own."""
        if token >= self._base_size:
            return self._added[token][0].encode() if token in self._added else b""
        piece = self._processor.id_to_piece(token)
        if self._processor.is_byte(token):
            return pieces.meta_space_bytes(piece)
        return piece.replace(pieces.META_SPACE, " ").encode()

    def token_id(self, piece: str) -> int | None:
        """Id of a piece, None if there is none."""
        if piece in self._added_ids:
            return self._added_ids[piece]
        token = self._processor.piece_to_id(piece)
        return token if self._processor.id_to_piece(token) == piece else None

    def piece(self, token: int) -> str | None:
        """Text of a token of the model itself, None when the id is -1 (the model has no such token)."""
        return None if token < 0 else self._processor.id_to_piece(token)

    def roles(self) -> dict[str, str | None]:
        """Special tokens as the model names them: bos, eos, unk, pad."""
        ids = {role: getattr(self._processor, f"{role}_id")() for role in ("bos", "eos", "unk", "pad")}
        return {role: self.piece(token) for role, token in ids.items()}

    def added_around(self) -> tuple[list[int], list[int]]:
        """Ids put around a text: models of this kind take BOS unless their configuration says otherwise."""
        bos = self._processor.bos_id()
        return ([bos] if bos >= 0 else []), []

    def save(self, directory: pathlib.Path) -> dict[str, typing.Any]:
        """Writes tokenizer.model; returns what belongs into tokenizer_config.json on its account."""
        (directory / "tokenizer.model").write_bytes(self._model)
        added = {str(token): {"content": text, "special": special} for token, (text, special) in self._added.items()}
        return {"tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": added}

    def _special_ids(self) -> frozenset[int]:
        model = self._processor
        own = (token for token in range(self._base_size) if model.is_control(token) or model.is_unknown(token))
        return frozenset(own) | {token for token, (_, special) in self._added.items() if special}

    def _leading_space(self) -> pieces.LeadingSpace:
        """The rule, found by asking the model: its normalizer settings are not exposed."""
        model = self._processor
        space = model.piece_to_id("<0x20>")
        exempt = frozenset({space}) if model.is_byte(space) else frozenset()
        marked = (self.piece(token) or "" for token in range(self._base_size))
        first = next((piece for piece in marked if piece.startswith(pieces.META_SPACE)), None)
        if first is None or model.decode_pieces([first, "."]).startswith(" "):
            return pieces.LeadingSpace("keep")
        every = model.decode_pieces([pieces.META_SPACE, pieces.META_SPACE, "."]) == "."
        return pieces.LeadingSpace("every" if every else "one", exempt)

    @functools.cached_property
    def _added_pattern(self) -> re.Pattern[str] | None:
        return _any_of(self._added_ids)

    @functools.cached_property
    def _markup_pattern(self) -> re.Pattern[str] | None:
        control = (self.piece(token) for token in range(self._base_size) if self._processor.is_control(token))
        return _any_of({*self._added_ids, *filter(None, control)})


def _any_of(texts: typing.Iterable[str]) -> re.Pattern[str] | None:
    """A pattern whose split keeps the texts at odd places, the longest first; None without texts."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None


def build_model(
    tokens: typing.Sequence[str],
    scores: typing.Sequence[float],
    kinds: typing.Sequence[int],
    *,
    add_dummy_prefix: bool,
    remove_extra_whitespaces: bool,
    charsmap: bytes = b"",
    bos_id: int | None = None,
    eos_id: int | None = None,
    unk_id: int | None = None,
    pad_id: int | None = None,
) -> bytes:
    """Serialized sentencepiece BPE model with these pieces.

    Written in the protocol buffer wire format directly, so that neither protobuf nor the generated module is needed.
    Field numbers are those of sentencepiece_model.proto (ModelProto: pieces 1, trainer_spec 2, normalizer_spec 3).
    """
    model = bytearray()
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        model += _field(1, _field(1, token.encode()) + b"\x15" + struct.pack("<f", score) + _number(3, kind))
    bpe = 2
    has_bytes = BYTE in kinds
    trainer = _number(3, bpe) + _number(4, len(tokens)) + _number(35, int(has_bytes))
    for field, token in ((40, unk_id), (41, bos_id), (42, eos_id), (43, pad_id)):
        trainer += _number(field, -1 if token is None else token)
    for field, token in ((45, unk_id), (46, bos_id), (47, eos_id), (48, pad_id)):
        if token is not None:
            trainer += _field(field, tokens[token].encode())
    normalizer = _field(1, b"identity" if not charsmap else b"user_defined") + _field(2, charsmap)
    normalizer += _number(3, int(add_dummy_prefix)) + _number(4, int(remove_extra_whitespaces)) + _number(5, 1)
    return bytes(model + _field(2, trainer) + _field(3, normalizer))


def _field(number: int, data: bytes) -> bytes:
    """A length-delimited field."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _number(number: int, value: int) -> bytes:
    """A varint field; negative numbers as 64-bit two's complement, as the format wants."""
    return _varint(number << 3) + _varint(value & (1 << 64) - 1)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
