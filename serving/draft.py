"""Proposals of a draft model: a smaller artifact with the target's tokenizer, on the same device. Plain Python: no jax.

The draft runs the very steps that serve requests, with the request's options and key. So where the target samples, the
draft samples with the same noise, and mostly the same token (docs/decisions/007-speculation.md).
"""

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Iterable, Mapping

from jaxserve.serving.blocks import BlockPool
from jaxserve.serving.plan import Row, Runner, StepPlan
from jaxserve.serving.request import Limits, Sequence
from jaxserve.serving.speculation import MOST_PROPOSALS, PATIENCE, Proposer, Rate

_CHANCE = 0.7  # the rate at which a sequence gets another chance, which is also where the first one begins


class DraftProposer(Proposer):
    """Runs a draft one step for each proposal; all sequences that want one share the steps.

    The draft has pages, slots and lengths of its own. It computes a sequence's tokens when proposals are first wanted
    of it, and later what was generated without it. Penalties are left to the target: the draft does not count tokens.
    """

    def __init__(self, runner: Runner, limits: Limits):
        self._runner = runner
        self._limits = limits
        self._pool = BlockPool(limits.num_pages, limits.page_size, prefix_caching=False)
        self._slots = list(range(limits.max_num_seqs))
        self._drafts: dict[Sequence, _Draft] = {}
        self._overall = Rate()
        self._step_seconds = deque[float](maxlen=15)

    def rates(self, seq: Sequence) -> list[float]:
        draft = self._drafts.setdefault(seq, _Draft())
        room = min(MOST_PROPOSALS, self._limits.max_model_len - len(seq.tokens))
        missing = self._pages(len(seq.tokens) + room) - len(draft.blocks)
        if room <= 0 or missing > self._pool.num_free or (draft.slot < 0 and not self._slots):
            return []
        draft.asked += 1
        rate = draft.rate.value(prior=self._overall.value(prior=_CHANCE))
        return [max(rate, _CHANCE) if draft.asked > PATIENCE else rate] * room

    def seconds(self, count: int) -> float:
        """Of the steps that `count` proposals in a row take."""
        return count * statistics.median(self._step_seconds) if self._step_seconds else 0.0

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        ready = {seq: count for seq, count in wanted.items() if self._prepare(seq, len(seq.tokens) + count)}
        if not ready:
            return {}
        behind = max(len(seq.tokens) - self._drafts[seq].computed for seq in ready)
        begin = time.perf_counter()
        made = self._first(ready)
        steps = []
        for place in range(1, max(ready.values())):  # each is dispatched before the token of the one before is known
            rows = [self._drafts[seq].row(seq, 1, known=False) for seq, count in ready.items() if count > place]
            steps.append((rows, self._runner.dispatch(StepPlan("step", rows, [], []))))
        by_slot = {self._drafts[seq].slot: seq for seq in ready}
        for rows, pending in steps:
            for row, token in zip(rows, pending.result().tokens, strict=True):
                made[by_slot[row.slot]].append(token)
        if behind <= 2:  # what it took was not a prompt
            self._step_seconds.append((time.perf_counter() - begin) / max(ready.values()))
        return made

    def learn(self, seq: Sequence, proposed: int, accepted: int) -> None:
        draft = self._drafts.get(seq)
        if draft is not None:
            tested = min(accepted + 1, proposed)
            draft.rate.add(accepted, tested)
            self._overall.add(accepted, tested)
            draft.asked = 0
            draft.computed = draft.known + min(accepted, proposed - 1)  # the last proposal was not fed

    def forget(self, seq: Sequence) -> None:
        draft = self._drafts.pop(seq, None)
        if draft is not None and draft.slot >= 0:
            self._pool.free(draft.blocks)
            self._slots.append(draft.slot)

    def _pages(self, positions: int) -> int:
        return -(-positions // self._limits.page_size)

    def _prepare(self, seq: Sequence, positions: int) -> bool:
        """Gives the sequence a slot and pages, and sets the draft back to the tokens that were generated."""
        draft = self._drafts[seq]
        pages = self._pool.allocate(max(0, self._pages(positions) - len(draft.blocks)))
        if pages is None or (draft.slot < 0 and not self._slots):
            self._pool.free(pages or [])
            return False
        if draft.slot < 0:
            draft.slot = self._slots.pop()
        draft.blocks += pages
        draft.known = len(seq.tokens)
        draft.computed, draft.sent = min(draft.computed, draft.known - 1), 0
        options = dataclasses.replace(
            seq.params, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, logprobs=None
        )
        draft.twin = dataclasses.replace(
            seq, params=options, slot=draft.slot, blocks=draft.blocks, num_admitted=draft.computed
        )
        self._runner.admit(draft.twin)
        return True

    def _first(self, seqs: Iterable[Sequence]) -> dict[Sequence, list[int]]:
        """Computes what the draft has not seen of the sequences, in as many steps as it takes; the token after each."""
        made, behind = {}, list(seqs)
        while behind:
            budget, rows, taken = self._limits.token_budget, [], []
            for seq in behind[: self._limits.row_sizes[-1]]:
                draft = self._drafts[seq]
                count = min(draft.known - draft.computed, budget)
                if count:
                    budget -= count
                    rows.append(draft.row(seq, count, known=True))
                    taken.append(seq)
            tokens = iter(self._runner.dispatch(StepPlan("step", rows, [], [])).result().tokens)
            for seq, row in zip(taken, rows, strict=True):
                if row.samples:
                    made[seq] = [next(tokens)]
                    behind.remove(seq)
        return {seq: made[seq] for seq in seqs}


@dataclasses.dataclass(slots=True)
class _Draft:
    """What the draft has of a sequence: `computed` positions of which `known` tokens were known when it was last used.

    twin: the sequence as the draft's runner sees it.
    """

    rate: Rate = dataclasses.field(default_factory=Rate)
    slot: int = -1
    blocks: list[int] = dataclasses.field(default_factory=list)
    twin: Sequence | None = None
    known: int = 0
    computed: int = 0
    sent: int = 0  # pages that the runner's table has
    asked: int = 0

    def row(self, seq: Sequence, count: int, *, known: bool) -> Row:
        """The next `count` positions, and a token to choose after the last if they reach the known ones' end."""
        assert self.twin is not None
        start, end = self.computed, self.computed + count
        tokens = tuple(seq.tokens[start:end]) if known else ()
        row = Row(self.twin, self.slot, start, count, tokens, int(end >= self.known), self.sent)
        self.computed, self.sent = end, len(self.blocks)
        return row
