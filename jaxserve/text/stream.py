"""Text of a growing sequence of tokens: incremental detokenization and stop strings.

Both run once per sequence per step in the engine's loop, so both do work in proportion to what is new.
"""

import codecs
import typing

if typing.TYPE_CHECKING:
    from jaxserve.text.tokenizer import Tokenizer


class StreamDecoder:
    """Turns tokens into text as they arrive.

    The deltas joined, plus the flush, equal `tokenizer.decode` of all the ids. A delta never ends inside a character:
    the bytes of an unfinished one wait for the next push. Special tokens contribute nothing unless skip_special is
    False. With `continuation` the ids go on after text that is already there (a completion after its prompt), so the
    space that decoding removes at the start of a text is kept.
    """

    __slots__ = ("_bytes_of", "_errors", "_lead", "_pending")

    def __init__(self, tokenizer: "Tokenizer", *, skip_special: bool = True, continuation: bool = False):
        self._bytes_of = tokenizer.bytes_table(skip_special).__getitem__
        self._errors = tokenizer.utf8_errors
        self._lead = None if continuation or tokenizer.leading_space.mode == "keep" else tokenizer.leading_space
        self._pending = b""

    def push(self, ids: typing.Iterable[int]) -> str:
        """Text that became certain with these ids; possibly empty."""
        data = b"".join(map(self._bytes_of, ids)) if self._lead is None else self._first(ids)
        if self._pending:
            data = self._pending + data
        text, used = codecs.utf_8_decode(data, self._errors, False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        """The rest at the end of the sequence: bytes of an unfinished character come out as U+FFFD."""
        text, _ = codecs.utf_8_decode(self._pending, self._errors, True)
        self._pending = b""
        return text

    def _first(self, ids: typing.Iterable[int]) -> bytes:
        """Bytes of ids while nothing has been produced yet and a leading space may have to go."""
        parts = []
        for token in ids:
            data = self._bytes_of(token)
            if self._lead is not None and data:
                lead = self._lead
                if data[0] == 0x20 and token not in lead.exempt:
                    data = data[1:]
                    if data or lead.mode == "one":
                        self._lead = None
                else:
                    self._lead = None
            parts.append(data)
        return b"".join(parts)


class StopScanner:
    """Finds the first of several stop strings in a text that arrives in pieces, and never lets a part of one out.

    "First" is the match that completes first in the text; of two that complete together, the longer. The result thus
    depends on the text alone, not on how it was cut into pieces. Text that may still become a stop string is held back.
    With include_stop the emitted text ends with the stop string, otherwise just before it.
    """

    __slots__ = ("_first_chars", "_held", "_hit", "_include_stop", "_longest", "_stops")

    def __init__(self, stops: tuple[str, ...], include_stop: bool = False):
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = stops
        self._include_stop = include_stop
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self._hit: str | None = None

    def push(self, delta: str, *, armed: bool = True) -> tuple[str, str | None]:
        """(text to emit, stop string that was found or None). After a hit nothing more is emitted.

        With armed=False the text passes unscanned, and what was held back with it: no stop is looked for yet.
        """
        if not self._stops:
            return delta, None
        if self._hit is not None:
            return "", self._hit
        text = self._held + delta
        if not armed:
            self._held = ""
            return text, None
        found = self._find(text)
        if found is not None:
            start, self._hit = found
            self._held = ""
            return text[: start + len(self._hit) if self._include_stop else start], self._hit
        keep = self._keep_from(text)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """What was held back, now that the text has ended without completing a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        """Start and string of the match that ends first in text, the longest of those."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start < 0:
                continue
            if best is None or (start + len(stop), start) < (best[0] + len(best[1]), best[0]):
                best = start, stop
        return best

    def _keep_from(self, text: str) -> int:
        """Where the longest tail of text begins that is a proper beginning of a stop string; len(text) if none."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_chars and any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)
