"""Speculative decoding: who proposes tokens, and how many of them are worth checking. Plain Python: no jax.

A sequence whose tokens are all known may bring proposals for the next ones into a step. Checking them never changes its
tokens (serving/verify.py), so what is decided here is a matter of speed alone.
"""

import collections
import itertools
import operator
import statistics
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from jaxserve.serving.request import Sequence

MOST_PROPOSALS = 15  # in a row: with the last token they fill a step of 16
# Measured steps of a size that count; how many are enough to trust their median; how many steps later it is too old.
_RECENT, _ENOUGH, _STALE = 15, 3, 3000
_LOOKING = 0.05  # of a step: what a look-ahead head takes (of the sample model's steps 4 to 6%)
PATIENCE = 64  # times that a draft or a look-ahead head is passed over before it gets another chance
_PACE = 9  # steps that tell how fast steps are now


def expected_tokens(rate: float, count: int) -> float:
    """Tokens that a step gives with K = `count` proposals, each accepted with probability p = `rate` if those before it
    are: 1 + p + ... + p^K = (1 - p^(K+1)) / (1 - p) (Leviathan et al. 2023, equation 1)."""
    return count + 1.0 if rate == 1 else (1 - rate ** (count + 1)) / (1 - rate)


class Rate:
    """A running share of successes. Each trial makes the older ones count less; at first it is near `prior`."""

    __slots__ = ("_hits", "_trials")
    weight, decay = 4.0, 0.95

    def __init__(self):
        self._hits = self._trials = 0.0

    def add(self, hits: float, trials: float) -> None:
        kept = self.decay**trials
        self._hits, self._trials = self._hits * kept + hits, self._trials * kept + trials

    def value(self, prior: float) -> float:
        return (self._hits + prior * self.weight) / (self._trials + self.weight)


class Proposer(Protocol):
    """Names likely next tokens. Must be told with `forget` of every sequence that ends or loses its slot.

    A proposer that reads what the steps' look-ahead head says overrides `foresight` and `foresee`. What the head says
    can also be proposed without asking anyone: the device puts it in.
    """

    @property
    def foresight(self) -> float:
        """How often the head is right of late; 0: it is not wanted."""
        return 0.0

    def rates(self, seq: Sequence) -> list[float]:
        """For each token that it can propose after seq.tokens the probability that it is accepted if those before it
        are. Of use are MOST_PROPOSALS, and those for the tokens that are in flight before them."""
        ...

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Up to so many tokens to follow each sequence's tokens."""
        ...

    def seconds(self, count: int) -> float:
        """What it takes to propose `count` tokens in a row, of any number of sequences at once."""
        ...

    def learn(self, seq: Sequence, proposed: int, accepted: int) -> None:
        """What became of the proposals of a step."""
        ...

    def foresee(self, seq: Sequence, place: int, token: int, rate: float) -> None:
        """The head says that `token` will stand at `place` of the sequence, and how likely that is."""

    def forget(self, seq: Sequence) -> None: ...


class StepCosts:
    """Seconds that a step without prompt tokens takes, by its size: its ratio to others times the pace of now.

    Long contexts and a busy machine slow all sizes down much alike. So a size keeps the median of its recent seconds
    over the pace, and the pace is the median of the last steps' seconds over the ratios of their sizes. Only a step of
    another size than the one before says something of ratios, and all do of the pace. A size that was
    not measured lately is taken to cost what the next smaller one does, so that it gets tried, one such size at a time;
    nothing is tried before the size without proposals is known.
    """

    def __init__(self, sizes: Seq[int]):
        self.sizes = tuple(sizes)
        self._ratios = {size: collections.deque[float](maxlen=_RECENT) for size in sizes}
        self._paces = collections.deque[float](maxlen=_PACE)
        # The medians of both, taken when a step is added: they are asked for while the device waits for the host.
        self._ratio: dict[int, float] = {}
        self._pace: float | None = None
        self._used = dict.fromkeys(sizes, 0)
        self.counts = dict.fromkeys(sizes, 0)  # steps of each size
        self._steps = self._last = 0  # how many there were, and the size of the last
        self._interrupted = False

    @property
    def known(self) -> bool:
        """Whether anything was measured, ever."""
        return any(self._ratios.values())

    def begin(self, seconds: Mapping[int, float]) -> None:
        """Steps of these sizes were measured together before the first request: they count as much as _ENOUGH later
        ones. The pace of a request is its own."""
        self._pace = next(iter(seconds.values()), None)
        for size, each in seconds.items():
            self._ratio[size] = each / (self._pace or each)
            self._ratios[size].extend([self._ratio[size]] * _ENOUGH)

    def interrupt(self) -> None:
        """Prompts came in between: other sequences run from now on, so the pace begins anew with the next step."""
        self._interrupted = True

    def add(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` tokens took `seconds`."""
        self._steps += 1
        size = next((size for size in self.sizes if size >= tokens), None)
        if size is None:
            return
        self.counts[size] += 1
        if self.ratio(size) is None or (size != self._last and not self._interrupted):
            if self._steps - self._used[size] > _STALE:
                self._ratios[size].clear()
            self._ratios[size].append(seconds / (self._pace or seconds))  # the first size has ratio 1
            self._ratio[size] = statistics.median(self._ratios[size])
        self._used[size], self._last = self._steps, size
        if (ratio := self.ratio(size)) is not None:
            if self._interrupted:
                self._paces.clear()
            self._paces.append(seconds / ratio)
            self._pace = statistics.median(self._paces)
            self._interrupted = False

    def ratio(self, size: int) -> float | None:
        """How long a step of one of `sizes` takes next to others, None if it was not measured lately."""
        known = len(self._ratios[size]) >= _ENOUGH and self._steps - self._used[size] <= _STALE
        return self._ratio[size] if known else None

    def seconds(self, size: int) -> float | None:
        """Of a step of one of `sizes` at the pace of now, None if it was not measured lately."""
        ratio = self.ratio(size)
        return ratio * self._pace if ratio is not None and self._pace is not None else None

    def best(self, rows: int, gains: Seq[float], extra: Seq[float]) -> tuple[int, float]:
        """How many proposals make the most tokens per second beside `rows` tokens that give one each, and how many
        tokens that is; (0, 0) before anything was measured.

        The j-th proposal adds gains[j] expected tokens (falling); j of them take extra[j] seconds beside the step.
        """
        best, speed, seconds = 0, 0.0, None
        totals = list(itertools.accumulate(gains, initial=rows))
        for size in (size for size in self.sizes if size >= rows):
            measured = self.seconds(size)
            seconds = measured or seconds
            if seconds is None:
                return 0, 0.0
            speed = speed or rows / seconds
            for count in range(best + 1, min(size - rows, len(gains)) + 1):
                found = totals[count] / (seconds + extra[count - 1])
                if found > speed:
                    best, speed = count, found
            if measured is None:
                break
        return best, speed


class Speculation:
    """Chooses how many proposals each sequence brings, 0 included, to make the most tokens per second.

    The k-th proposal adds the product of the first k rates of its sequence to the expected tokens of a step (p^k where
    they are alike, so that expected_tokens(p, K) is the sum over K). The best of all sequences fill a step up to one
    of the sizes that programs have, as far as the measured cost of that size pays.
    """

    def __init__(self, proposer: Proposer, sizes: Seq[int], most: int = MOST_PROPOSALS):
        self.proposer = proposer
        self.costs = StepCosts(sizes)
        self.most = most
        self.num_drafts = self.num_proposed = self.num_accepted = 0
        self.accepted_at = [0] * MOST_PROPOSALS  # accepted proposals by their place
        self._idle = 1e-3  # seconds that the device waits for the host when results are awaited
        self._proposing = 0.0  # of the last proposals
        self._blind = 0  # steps since the look-ahead head ran

    def worth_waiting(self, seqs: Seq[Sequence], rows: int, room: int) -> bool:
        """Whether to wait for the step in flight, of `rows` sequences, so that `seqs` can bring proposals to the next.

        The tokens in flight, not known here yet, must come as foreseen for the proposals after them to be right. And it
        must be better than what the look-ahead head foresees in that step, which nobody has to wait for.
        """
        if room <= 0:  # a full batch: its steps must not pay for what it cannot use
            return False
        chosen, speed = self._best({seq: self.most for seq in seqs}, rows, room, waiting=True)
        return bool(chosen) and speed > self._best_foreseen(sum(seq.foreseen for seq in seqs), rows, room)[1]

    def count_foreseen(self, seqs: int, rows: int, room: int) -> int:
        """For how many of `seqs` sequences, of which a step in flight foresees a token that is not known here, to check
        it in a step that has `rows` rows without them."""
        return self._best_foreseen(seqs, rows, room)[0] if min(seqs, room) > 0 else 0

    def _best_foreseen(self, seqs: int, rows: int, room: int) -> tuple[int, float]:
        gains = [self.proposer.foresight] * min(seqs, room)
        return self.costs.best(rows, gains, [0.0] * len(gains))

    def looks_ahead(self, rows: int, room: int) -> bool:
        """Whether the look-ahead head is to run in a step that chooses the next tokens of `rows` sequences: whether
        proposals of its own would pay in the next one."""
        if not self.proposer.foresight or room <= 0:
            return False
        self._blind += 1
        speed, plain = self._best_foreseen(rows, rows, room)[1], self.costs.best(rows, [], [])[1]
        if self._blind > PATIENCE or speed > plain * (1 + _LOOKING):
            self._blind = 0
        return not self._blind

    def propose(self, limits: Mapping[Sequence, int], rows: int, room: int) -> dict[Sequence, list[int]]:
        """Proposals for sequences whose tokens are all known, at most limits[seq] each and `room` in all, for a step
        that has `rows` rows without them."""
        wanted = self._best(limits, rows, room)[0] if limits and room > 0 else {}
        begin = time.perf_counter()
        made = self.proposer.propose(wanted) if wanted else {}
        self._proposing = time.perf_counter() - begin
        return made

    def _best(
        self, limits: Mapping[Sequence, int], rows: int, room: int, waiting: bool = False
    ) -> tuple[dict[Sequence, int], float]:
        """How many proposals of each sequence to check, and how many tokens a second that makes; with `waiting` in a
        step that waits for the one in flight."""
        gains = []
        for seq, limit in limits.items():
            ahead = seq.num_pending if waiting else 0
            rates = self.proposer.rates(seq)[: max(0, min(limit, self.most, room)) + ahead]
            products = itertools.accumulate(rates, operator.mul)
            gains += [(gain, place, seq) for place, gain in enumerate(products, 1 - ahead) if place > 0]
        gains = sorted(gains, key=lambda gain: -gain[0])[:room]
        depths = itertools.accumulate((place for _, place, _ in gains), max)
        extra = [self._idle * waiting + self.proposer.seconds(depth) for depth in depths]
        count, speed = self.costs.best(rows, [gain for gain, _, _ in gains], extra)
        return collections.Counter(seq for _, _, seq in gains[:count]), speed

    def learn(self, seq: Sequence, proposed: int, accepted: int) -> None:
        """Of `proposed` tokens in a step the first `accepted` were."""
        self.num_drafts += 1
        self.num_proposed += proposed
        self.num_accepted += accepted
        for place in range(accepted):
            self.accepted_at[place] += 1
        self.proposer.learn(seq, proposed, accepted)

    def measured(self, tokens: int, seconds: float, idle: float | None) -> None:
        """A step without prompt tokens took `seconds`; `idle` of them the device waited for it, if it had to."""
        self.costs.add(tokens, seconds)
        if idle is not None:
            self._idle += 0.1 * (max(0.0, idle - self._proposing) - self._idle)

    def stats(self) -> dict[str, Any]:
        """num_drafts, num_proposed, num_accepted, accepted_at."""
        return {name: getattr(self, name) for name in ("num_drafts", "num_proposed", "num_accepted", "accepted_at")}
