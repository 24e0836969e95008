"""Tokenizers in Hugging Face's tokenizer.json form, through the `tokenizers` library."""

import json
import pathlib
import typing

from jaxserve.errors import UserError
from jaxserve.text import pieces

if typing.TYPE_CHECKING:
    import tokenizers

SUPPORTED_DECODERS = "ByteLevel, or Replace(▁) + ByteFallback + Fuse with an optional Strip of one leading space"


class FastBackend:
    """A `tokenizers.Tokenizer` whose decoder is one that can be streamed (SUPPORTED_DECODERS).

    Decoding is done from the pieces, not by the library. It agrees with the library on every sequence of valid UTF-8;
    in a run of byte pieces with an invalid byte the valid characters survive, where the library replaces the whole run.
    """

    def __init__(self, backend: "tokenizers.Tokenizer"):
        # A checkpoint saved from a training script may carry both; a server must see every token of a prompt.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1)
        self.special_ids = frozenset(token for token, content in added.items() if content.special)
        self._piece_bytes, self.leading_space, self.utf8_errors = _decoding_of(backend.decoder)

    @classmethod
    def from_file(cls, path: pathlib.Path) -> "FastBackend":
        """Reads a tokenizer.json; UserError when the library cannot."""
        import tokenizers

        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for whatever is wrong with a file
            raise UserError(f"{path}: not a tokenizer.json that the tokenizers library can read: {error}") from error
        try:
            return cls(backend)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error

    def encode(self, text: str, special: bool) -> list[int]:
        """Ids of text, nothing added. Added tokens in the text are always recognised, special or not."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one id; empty for a hole in the vocabulary."""
        piece = self._backend.id_to_token(token)
        return b"" if piece is None else self._piece_bytes(piece)

    def token_id(self, piece: str) -> int | None:
        """Id of a piece, None if there is none."""
        return self._backend.token_to_id(piece)

    def added_around(self) -> tuple[list[int], list[int]]:
        """Ids that the post-processor puts before and after a text."""
        probe = "a"
        bare = self._backend.encode(probe, add_special_tokens=False).ids
        full = self._backend.encode(probe, add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        return [], []

    def save(self, directory: pathlib.Path) -> dict[str, typing.Any]:
        """Writes tokenizer.json; returns what belongs into tokenizer_config.json on its account."""
        self._backend.save(str(directory / "tokenizer.json"), pretty=False)
        return {"tokenizer_class": "PreTrainedTokenizerFast"}


def _decoding_of(decoder: typing.Any) -> tuple[typing.Callable[[str], bytes], pieces.LeadingSpace, str]:
    """(piece -> bytes, leading space rule, UTF-8 error handler) of a tokenizer's decoder."""
    spec: dict[str, typing.Any] = {"type": "none"} if decoder is None else json.loads(decoder.__getstate__())
    steps: list[dict[str, typing.Any]] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return pieces.byte_level_bytes, pieces.LeadingSpace(), pieces.REPLACE_SEQUENCE
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        strip = steps[3] if len(steps) == 4 else {"content": " ", "start": 0, "stop": 0}
        is_meta_space = steps[0]["pattern"] == {"String": pieces.META_SPACE} and steps[0]["content"] == " "
        if is_meta_space and strip["content"] == " " and strip["start"] in (0, 1) and strip["stop"] == 0:
            lead = pieces.LeadingSpace("one" if strip["start"] else "keep")
            return pieces.meta_space_bytes, lead, pieces.REPLACE_EACH_BYTE
    described = " + ".join(kinds)
    raise UserError(f"the decoder of this tokenizer ({described}) is not supported; supported: {SUPPORTED_DECODERS}")
