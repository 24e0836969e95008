"""A proposer for the fake device, as often right as asked, and a speculation that spares no costs."""

import random

from jaxserve.serving.request import Limits, Sequence
from jaxserve.serving.speculation import Proposer, Speculation
from tests.serving.fake_device import alone


class Guesses(Proposer):
    """Proposes what the sequence would generate, each token right with probability `accuracy`, and more of it than is
    of use. With `foresight` there is a look-ahead head, too, which is right as often as that."""

    def __init__(self, limits: Limits, accuracy: float, seed: int = 0, foresight: float = 0.0):
        self.limits, self.accuracy, self.head = limits, accuracy, foresight
        self.random = random.Random(seed)
        self.known: dict[Sequence, list[int]] = {}

    @property
    def foresight(self) -> float:
        return self.head

    def rates(self, seq: Sequence) -> list[float]:
        if seq not in self.known:
            self.known[seq] = alone(tuple(seq.prompt_ids), seq.params, self.limits, seq.index)[0]
        return [0.9] * 20

    def propose(self, wanted):
        return {seq: [self._guess(seq, seq.num_outputs + i) for i in range(count)] for seq, count in wanted.items()}

    def _guess(self, seq, number):
        output = self.known[seq]
        right = number < len(output) and self.random.random() < self.accuracy
        return output[number] if right else self.random.randrange(self.limits.vocab_size)

    def seconds(self, count):
        return 0.0

    def learn(self, seq, proposed, accepted):
        assert 0 <= accepted <= proposed

    def forget(self, seq):
        self.known.pop(seq, None)


def guessing(limits: Limits, seed: int = 0, accuracy: float | None = None, foresight: float = 0.0) -> Speculation:
    """With `accuracy` every proposal that fits is checked; else any number of them, of an accuracy drawn by `seed`."""
    chance = random.Random(seed)
    proposer = Guesses(limits, chance.random() if accuracy is None else accuracy, seed, foresight)
    speculation = Speculation(proposer, limits.row_sizes)

    def best(rows, gains, extra):
        count = len(gains) if accuracy is not None else chance.randint(0, len(gains))
        return count, rows + count

    speculation.costs.best = best  # type: ignore[method-assign]
    return speculation
