"""Proposals of a look-ahead head, which steps run when they are asked to. Plain Python: no jax."""

import collections

from jaxserve.serving.ngram import NgramProposer
from jaxserve.serving.ngram_table import Next, Oracle
from jaxserve.serving.request import Sequence
from jaxserve.serving.speculation import Rate

_START = 0.4  # how often a head is taken to be right before it was seen
_HEAD = 0  # the tail of what it says: it looks nothing up


class HeadProposer(NgramProposer):
    """Prompt lookup, and where it is likelier the token that the head foresaw when the last token was chosen.

    The head gives one token and a probability. How often it is right is learned by that probability, from every token
    that it foresaw. Other oracles may be asked beside it.
    """

    def __init__(self, *others: Oracle):
        self._said = _Said()
        self._right = Rate()
        super().__init__(self._said, *others)

    @property
    def foresight(self) -> float:
        return self._right.value(prior=_START)

    def foresee(self, seq: Sequence, place: int, token: int, rate: float) -> None:
        if rate > 0:  # not where the head was not asked, nor where numbers are not finite
            self._said.by_place[seq][place] = Next(token, rate, _HEAD)

    def forget(self, seq: Sequence) -> None:
        self._said.by_place.pop(seq, None)
        super().forget(seq)

    def _learn_said(self, said: Next, right: bool) -> None:
        super()._learn_said(said, right)
        if said.tail == _HEAD:
            self._right.add(right, 1)


class _Said:
    """What the head said of each place of a sequence whose token was not yet compared with it: an oracle."""

    def __init__(self):
        self.by_place: dict[Sequence, dict[int, Next]] = collections.defaultdict(dict)

    def said(self, seq: Sequence, place: int) -> Next | None:
        return self.by_place[seq].pop(place, None)

    def following(self, seq: Sequence) -> list[Next]:
        found = self.by_place[seq].get(len(seq.tokens))
        return [] if found is None else [found]
