"""Prompt lookup: what followed the last few tokens when they stood in the sequence before, or in earlier answers. Plain
Python: no jax."""

from collections.abc import Mapping
from typing import NamedTuple

from jaxserve.serving.request import Sequence
from jaxserve.serving.speculation import MOST_PROPOSALS, Rate

_KEYS = (4, 2, 1)  # lengths of the tails that are looked up, the first that is found counts
_LONGEST = 6  # how far a match is followed back; a longer one is no better
# How often the token after a match of 1, 2, ... tokens was right in 64 tokens of greedy answers of a small model to the
# 480 questions of Spec-Bench, matched in the sequence itself and in earlier answers: where each length starts.
_START = ((0.22, 0.51, 0.67, 0.69, 0.74, 0.86), (0.1, 0.19, 0.35, 0.35, 0.48, 0.63))
_MOST_ANSWERS = 1 << 15  # tokens of earlier answers that are kept: some 15 MB


class NgramProposer:
    """Proposes the continuation of the latest earlier place of a tail of prompt and output (Saxena 2023, prompt lookup
    decoding), or of its latest place in the answers to earlier requests (as Oliaro et al. 2024, SuffixDecoding, do),
    whichever is the likelier.

    How likely they are depends on the length of the match, and is learned for each length without a step: every new
    token shows whether the match before it was right. Requests with a cache salt share nothing with others.
    """

    def __init__(self):
        self._lookups: dict[Sequence, _Lookup] = {}
        self._answers = _Text()
        self._overall = _new_rates()  # of all sequences: where each begins

    def rates(self, seq: Sequence) -> list[float]:
        lookup = self._lookup(seq)
        match = lookup.best
        if match is None:
            return []
        count = min(MOST_PROPOSALS, len(match.tokens) - match.at) if match.source else MOST_PROPOSALS
        lengths = range(match.length, match.length + count)  # each accepted proposal makes the match longer
        return [self._rate(lookup, match.source, min(length, _LONGEST)) for length in lengths]

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        made = {seq: self._lookup(seq).continuation(count) for seq, count in wanted.items()}
        return {seq: tokens for seq, tokens in made.items() if tokens}

    def seconds(self, count: int) -> float:
        return 0.0  # next to a step

    def learn(self, seq: Sequence, proposed: int, accepted: int) -> None:
        pass  # `_lookup` does

    def forget(self, seq: Sequence) -> None:
        if self._lookups.pop(seq, None) is not None and not seq.extras:
            if len(self._answers.tokens) > _MOST_ANSWERS:
                self._answers = _Text()
            self._answers.extend(seq.tokens[seq.prompt_len :])

    def _rate(self, lookup: "_Lookup", source: int, length: int) -> float:
        overall = self._overall[source][length - 1].value(prior=_START[source][length - 1])
        return lookup.rates[source][length - 1].value(prior=overall)

    def _lookup(self, seq: Sequence) -> "_Lookup":
        """Up to date with the sequence: each new token taught what the matches before it were worth."""
        lookup = self._lookups.setdefault(seq, _Lookup())
        new = seq.tokens[len(lookup.own.tokens) :]
        if not new:
            return lookup
        sources = [lookup.own] if seq.extras else [lookup.own, self._answers]
        for token in new:
            if len(lookup.own.tokens) >= seq.prompt_len:
                for match in lookup.matches:
                    right = match.tokens[match.at] == token
                    lookup.rates[match.source][match.length - 1].add(right, 1)
                    self._overall[match.source][match.length - 1].add(right, 1)
            lookup.own.tokens.append(token)
            lookup.matches = []
            if len(lookup.own.tokens) >= seq.prompt_len:
                found = (text.find(lookup.own.tokens, source) for source, text in enumerate(sources))
                lookup.matches = [match for match in found if match is not None]
            lookup.own.remember()  # only now, or the tail would have been found where it is
        likely = [(self._rate(lookup, match.source, match.length), -match.source, match) for match in lookup.matches]
        lookup.best = max(likely, key=lambda entry: entry[:2])[2] if likely else None
        return lookup


def _new_rates() -> list[list[Rate]]:
    return [[Rate() for _ in range(_LONGEST)] for _ in _START]


class _Match(NamedTuple):
    """The next token is foreseen to be the one at place `at` of `tokens`: before it the last `length` tokens stand."""

    source: int  # 0: the sequence itself, 1: earlier answers
    tokens: list[int]
    at: int
    length: int


class _Text:
    """Tokens, and where each of their tails last ended."""

    __slots__ = ("_after", "tokens")

    def __init__(self):
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self.remember()

    def remember(self) -> None:
        """Where the tails of the text so far end."""
        end = len(self.tokens)
        for key in _KEYS:
            if key <= end:
                self._after[tuple(self.tokens[end - key :])] = end

    def find(self, tail: list[int], source: int) -> _Match | None:
        """The latest place, with a token after it, of the longest tail of `tail` that is known."""
        end = len(tail)
        for key in _KEYS:
            at = self._after.get(tuple(tail[end - key :])) if key <= end else None
            if at is not None and at < len(self.tokens):
                return _Match(source, self.tokens, at, _common(self.tokens, at, tail, end, key))
        return None


class _Lookup:
    """What is known of a sequence: its tokens, the matches of their tail, the likeliest of them, and how often matches
    of each source and length were right."""

    __slots__ = ("best", "matches", "own", "rates")

    def __init__(self):
        self.own = _Text()
        self.rates = _new_rates()
        self.matches: list[_Match] = []
        self.best: _Match | None = None

    def continuation(self, count: int) -> list[int]:
        """The next `count` tokens as foreseen. A match in the sequence that reaches its end goes on in what it
        foresees; one in earlier answers ends with them."""
        if self.best is None:
            return []
        tokens, made = self.best.tokens, list[int]()
        for at in range(self.best.at, self.best.at + count):
            if at < len(tokens):
                made.append(tokens[at])
            elif not self.best.source:
                made.append(made[at - len(tokens)])
        return made


def _common(one: list[int], at: int, other: list[int], end: int, known: int) -> int:
    """How many tokens before place `at` of one and `end` of the other are the same, up to _LONGEST; `known` are."""
    while known < min(_LONGEST, at, end) and one[at - 1 - known] == other[end - 1 - known]:
        known += 1
    return known
