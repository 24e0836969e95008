"""Prompt lookup: what followed the last few tokens when they stood in the sequence before. Plain Python: no jax."""

import collections
import itertools
from collections.abc import Mapping

from jaxserve.serving.ngram_table import Next, Oracle
from jaxserve.serving.request import Sequence
from jaxserve.serving.speculation import MOST_PROPOSALS, Proposer, Rate

_KEYS = (4, 2, 1)  # lengths of the tails that are looked up, the first that is found counts
_LONGEST = 6  # how far a match is followed back; a longer one is no better
# How often the token after a match of 1, 2, ... tokens was right in greedy answers of a small model to 76 prompts of
# Spec-Bench: where each length starts.
_START = (0.25, 0.5, 0.5, 0.7, 0.7, 0.88)


class NgramProposer(Proposer):
    """Proposes the continuation of the latest earlier place of a tail of prompt and output (Saxena 2023, prompt lookup
    decoding).

    How likely it is depends on the length of the match, and is learned for each length without a step: every new token
    shows whether the match before it was right.

    What an oracle (a table of n-grams, a look-ahead head) says is proposed where its first token is likelier. How right
    the oracles are is learned the same way, by how sure they are.
    """

    def __init__(self, *oracles: Oracle):
        self._oracles = oracles
        self._indexes: dict[Sequence, _Index] = {}
        self._overall = [Rate() for _ in range(_LONGEST)]  # of all sequences, by length: where each begins
        self._counted: dict[tuple[int, int], Rate] = collections.defaultdict(Rate)  # of the oracles, by _sureness

    def rates(self, seq: Sequence) -> list[float]:
        return self._likelier(self._index(seq))[0]

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        made = {}
        for seq, count in wanted.items():
            index = self._index(seq)
            _, chain = self._likelier(index)
            counted = [said.token for said in chain[:count]]
            made[seq] = counted or index.continuation(seq.tokens, count)
        return made

    def seconds(self, count: int) -> float:
        return 0.0  # next to a step

    def learn(self, seq: Sequence, proposed: int, accepted: int) -> None:
        pass  # `_index` does

    def forget(self, seq: Sequence) -> None:
        self._indexes.pop(seq, None)

    def _rates_found(self, index: "_Index") -> list[float]:
        if not index.length:
            return []
        # Each accepted proposal makes the match longer; from _LONGEST on they are alike.
        rates = [self._rate(index, length) for length in range(index.length, _LONGEST + 1)]
        return rates + rates[-1:] * (2 * MOST_PROPOSALS + 1 - len(rates))  # as many may be in flight before them

    def _rate(self, index: "_Index", length: int) -> float:
        overall = self._overall[length - 1].value(prior=_START[length - 1])
        return index.rates[length - 1].value(prior=overall)

    def _likelier(self, index: "_Index") -> tuple[list[float], list[Next]]:
        """The rates of whoever says the likelier first token, and what that oracle says; nothing if it is no oracle."""
        best, by = self._rates_found(index), list[Next]()
        for chain in index.chains:
            counted = [self._counted[_sureness(each)].value(prior=each.rate) for each in chain]
            if counted[:1] > best[:1]:
                best, by = counted, chain
        return best, by

    def _index(self, seq: Sequence) -> "_Index":
        index = self._indexes.setdefault(seq, _Index())
        if index.seen < len(seq.tokens):
            self._count(index, seq)
        for length, right in index.extend(seq.tokens, seq.prompt_len):
            index.rates[length - 1].add(right, 1)
            self._overall[length - 1].add(right, 1)
        return index

    def _count(self, index: "_Index", seq: Sequence) -> None:
        """Whether the oracles were right about what is new, and what they say comes next."""
        for oracle, place in itertools.product(
            self._oracles, range(max(index.seen, seq.prompt_len, 1), len(seq.tokens))
        ):
            if (said := oracle.said(seq, place)) is not None:
                self._learn_said(said, said.token == seq.tokens[place])
        index.chains = [oracle.following(seq) for oracle in self._oracles]

    def _learn_said(self, said: Next, right: bool) -> None:
        self._counted[_sureness(said)].add(right, 1)


def _sureness(said: Next) -> tuple[int, int]:
    """Tokens that are likely for the same reason, and about as much."""
    return said.tail, int(8 * said.rate)


class _Index:
    """Where each tail of a sequence last ended. The next token is foreseen to be the one at place `match`, before which
    the last `length` tokens stand; length 0: no tail is known."""

    __slots__ = ("_after", "chains", "length", "match", "rates", "seen")

    def __init__(self):
        self.match = self.length = 0
        self.chains: list[list[Next]] = []  # what each oracle says
        self.rates = [Rate() for _ in range(_LONGEST)]
        self._after: dict[tuple[int, ...], int] = {}
        self.seen = 0  # tokens that were taken in

    def extend(self, tokens: list[int], prompt_len: int) -> list[tuple[int, bool]]:
        """Takes in what is new. For each generated token that was foreseen: the match's length, and whether it came."""
        learned = []
        for end in range(self.seen + 1, len(tokens) + 1):
            if self.length and end > prompt_len:
                learned.append((self.length, tokens[self.match] == tokens[end - 1]))
            self.length = 0
            for key in (key for key in _KEYS if key <= end):
                tail = tuple(tokens[end - key : end])
                found = self._after.get(tail)
                if found is not None and not self.length:
                    self.match, self.length = found, _common(tokens, found, end, key)
                self._after[tail] = end
        self.seen = len(tokens)
        return learned

    def continuation(self, tokens: list[int], count: int) -> list[int]:
        """The next `count` tokens as foreseen; a match that reaches the end goes on in what it foresees."""
        made: list[int] = []
        for at in range(self.match, self.match + count if self.length else 0):
            made.append(tokens[at] if at < len(tokens) else made[at - len(tokens)])
        return made


def _common(tokens: list[int], one: int, two: int, known: int) -> int:
    """How many tokens before `one` and before `two` are the same, up to _LONGEST, of which `known` are."""
    while known < min(_LONGEST, one) and tokens[one - 1 - known] == tokens[two - 1 - known]:
        known += 1
    return known
