"""What a model says after its last few tokens, counted in answers of its own: a draft without weights. Plain Python."""

import collections
import pathlib
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

import numpy as np

from jaxserve.errors import UserError
from jaxserve.npz import read_npz
from jaxserve.serving.request import Sequence

NGRAMS = "ngrams.npz"  # the file in the folder of such a draft
TAILS = (3, 2, 1)  # how many last tokens are looked up; the likeliest of what they say counts
_SEEN = {3: 2, 2: 2, 1: 4}  # how often a tail must have been seen: a single token says little
_DEPTH = 6  # proposals in a row: what is likely after what is likely is not likely for long


class Next(NamedTuple):
    """A token that may come next, how likely it is, and how many last tokens say so."""

    token: int
    rate: float
    tail: int


class Oracle(Protocol):
    """Says what comes next, beside the sequence itself."""

    def said(self, seq: Sequence, place: int) -> Next | None:
        """About the token at `place`, when those before it were known."""
        ...

    def following(self, seq: Sequence) -> list[Next]:
        """What is likeliest after seq.tokens, one after the other."""
        ...


class NgramTable:
    """The most frequent token after one to three tokens, and how likely it is, as a static lookup cache has it.

    Of n times that a tail was seen, h were followed by it. It was chosen for being frequent, so its probability is
    taken for (h - 0.6) / (n + 0.3), which is 0.61 for two of two.
    """

    def __init__(self, entries: dict[tuple[int, ...], tuple[int, float]]):
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    @classmethod
    def count(cls, texts: Iterable[tuple[Seq[int], Seq[int]]]) -> "NgramTable":
        """Of token ids and the places in them whose tokens are to be foreseen, from 1 on."""
        followers: dict[tuple[int, ...], collections.Counter[int]] = collections.defaultdict(collections.Counter)
        for tokens, places in texts:
            for place in places:
                for tail in (tail for tail in TAILS if tail <= place):
                    followers[tuple(tokens[place - tail : place])][tokens[place]] += 1
        entries = {}
        for tail, counts in followers.items():
            if (seen := counts.total()) >= _SEEN[len(tail)]:
                token, hits = counts.most_common(1)[0]
                entries[tail] = (token, max(0.0, (hits - 0.6) / (seen + 0.3)))
        return cls(entries)

    def after(self, tokens: Seq[int]) -> Next | None:
        """What is likeliest after the last of `tokens`; None if no tail of theirs is known."""
        best = None
        for tail in TAILS:
            found = self._entries.get(tuple(tokens[-tail:])) if tail <= len(tokens) else None
            if found is not None and (best is None or found[1] > best.rate):
                best = Next(*found, tail)
        return best

    def said(self, seq: Sequence, place: int) -> Next | None:
        return self.after(seq.tokens[max(0, place - max(TAILS)) : place])

    def following(self, seq: Sequence) -> list[Next]:
        return self.chain(seq.tokens)

    def chain(self, tokens: Seq[int]) -> list[Next]:
        """What is likeliest after `tokens`, then after that, and so on."""
        last, made = list(tokens[-max(TAILS) :]), list[Next]()
        while len(made) < _DEPTH and (found := self.after(last)) is not None:
            made.append(found)
            last.append(found.token)
        return made

    def save(self, file: pathlib.Path) -> None:
        """`tails` [N, 3] int32, -1 in front of shorter ones; `tokens` [N] int32; `rates` [N] float32."""
        longest = max(TAILS)
        tails = [(-1,) * (longest - len(tail)) + tail for tail in self._entries]
        tokens, rates = zip(*self._entries.values(), strict=True) if self._entries else ((), ())
        np.savez_compressed(
            file,
            tails=np.array(tails, np.int32).reshape(-1, longest),
            tokens=np.array(tokens, np.int32),
            rates=np.array(rates, np.float32),
        )

    @classmethod
    def load(cls, file: pathlib.Path, vocab_size: int) -> "NgramTable":
        """UserError when the file is damaged, or names tokens that there are not."""
        arrays = read_npz(file, "table of n-grams")
        tails, tokens, rates = (arrays.get(name, np.zeros(0)) for name in ("tails", "tokens", "rates"))
        shaped = tails.shape == (tokens.size, max(TAILS)) and tokens.shape == rates.shape == (tokens.size,)
        whole = shaped and (tails.dtype, tokens.dtype, rates.dtype) == (np.int32, np.int32, np.float32)
        if not (
            whole and _within(tails, -1, vocab_size) and _within(tokens, 0, vocab_size) and _within(rates, 0, 1.01)
        ):
            raise UserError(f"{file}: a damaged table of n-grams, or one of a model with more than {vocab_size} tokens")
        keys = (tuple(token for token in tail if token >= 0) for tail in tails.tolist())
        return cls(dict(zip(keys, zip(tokens.tolist(), rates.tolist(), strict=True), strict=True)))


def _within(numbers: np.ndarray, least: float, end: float) -> bool:
    return bool(((numbers >= least) & (numbers < end)).all())
