"""What one token contributes to a text, in bytes: the common ground of decoding, streaming and log-probabilities.

A text is the concatenation of its tokens' bytes, decoded as UTF-8, with two amendments that differ between tokenizer
families: what happens to a space at the very beginning, and how many replacement characters stand for invalid bytes.
"""

import codecs
import dataclasses
import functools
import typing

META_SPACE = "▁"

REPLACE_SEQUENCE = "replace"
"""One U+FFFD for each maximal invalid sequence: what byte-level BPE tokenizers do."""

REPLACE_EACH_BYTE = "jaxserve.each-byte"
"""One U+FFFD for each invalid byte: what sentencepiece does with its byte pieces."""


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(REPLACE_EACH_BYTE, _replace_each_byte)


@dataclasses.dataclass(frozen=True)
class LeadingSpace:
    """What becomes of a space at the start of a decoded text (encoders prepend one, so decoders remove it).

    mode: "keep" leaves it; "one" removes a single space from the first token that has any bytes; "every" removes one
    from each token until something has been produced (sentencepiece models that collapse spaces).
    exempt: tokens whose space counts as text all the same (sentencepiece's byte piece <0x20>).
    """

    mode: typing.Literal["keep", "one", "every"] = "keep"
    exempt: frozenset[int] = frozenset()


class TokenBytes(dict[int, bytes]):
    """Token id -> bytes, filled on demand: building it whole would cost more than loading the tokenizer.

    Ids outside the vocabulary, and ids in `silent`, contribute nothing.
    """

    def __init__(self, lookup: typing.Callable[[int], bytes], vocab_size: int, silent: frozenset[int] = frozenset()):
        super().__init__()
        self._lookup = lookup
        self._vocab_size = vocab_size
        self._silent = silent

    def __missing__(self, token: int) -> bytes:
        if token < 0 or token >= self._vocab_size:
            return b""
        data = b"" if token in self._silent else self._lookup(token)
        self[token] = data
        return data


@functools.cache
def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of the GPT-2 alphabet: printable Latin-1 stands for itself, the rest starts at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


def byte_level_bytes(piece: str) -> bytes:
    """Bytes of a piece in the GPT-2 alphabet; a piece with any other character is plain text (an added token)."""
    alphabet = byte_level_alphabet()
    try:
        return bytes([alphabet[char] for char in piece])
    except KeyError:
        return piece.encode()


def meta_space_bytes(piece: str) -> bytes:
    """Bytes of a sentencepiece-style piece: <0xNN> is a byte, U+2581 a space, everything else itself."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return piece.replace(META_SPACE, " ").encode()
