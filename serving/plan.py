"""What the scheduler hands to a runner and gets back. Plain Python: no jax."""

import dataclasses
from collections.abc import Sequence as Seq
from typing import Literal, Protocol

from jaxserve.serving.request import Sequence


@dataclasses.dataclass(slots=True)
class Row:
    """`count` positions of one sequence, from position `start` on.

    start: what it is if all proposals in flight hold; the device knows which of them do.
    tokens: the ids to feed, known to the host; (): feed the slot's `last_token`, which a step still in flight samples,
        and with count 2 the token that the look-ahead head foresees after it, in that step too.
    samples: choose next tokens at so many of the last positions. 1: after the last one. K+1: the last K tokens are
        proposals, and what is chosen after one of them counts if it and those before it were chosen themselves.
    pages_from: entries of `seq.blocks` from here on changed since its previous row (len(seq.blocks): none did).
    """

    seq: Sequence
    slot: int
    start: int
    count: int
    tokens: tuple[int, ...]
    samples: int
    pages_from: int


@dataclasses.dataclass(slots=True)
class StepPlan:
    """One step. The engine calls runner.admit for each of `admits`, then copy_pages, then dispatch.

    kind 'step': many rows, at most token_budget tokens, at most one row a sequence, samples within limits.row_sizes.
    kind 'score': one row of at most score_budget tokens, never sampled; wanted are the log-probabilities of
        seq.tokens[start + 1 : start + 1 + count].
    copies: (source, destination) pages; no page is both, so any order and grouping of them is right.
    look_ahead: whether a look-ahead head is to foresee the token after each that is chosen.
    """

    kind: Literal["step", "score"]
    rows: list[Row]
    admits: list[Sequence]
    copies: list[tuple[int, int]]
    look_ahead: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def num_samples(self) -> int:
        return sum(row.samples for row in self.rows)

    @property
    def num_prompt_tokens(self) -> int:
        rows = (row for row in self.rows if row.start < row.seq.prompt_len)
        return sum(min(row.count, row.seq.prompt_len - row.start) for row in rows)


@dataclasses.dataclass(slots=True)
class StepResult:
    """Plain Python lists. 'step': `samples` entries a row, one row's after the other's.
    'score': one entry a token of its only row; tokens[i] is the target whose log-probability logprob[i] is.

    top[i]: up to max_logprobs (id, logprob), best first; None when nobody wants any.
    finite[i]: False when the logits held NaN or an infinity.
    accepted[i]: whether tokens[i] counts: all proposals before it in its row are the tokens that were chosen there.
    foreseen[i]: what a look-ahead head says comes after tokens[i], and how likely it is, if that is the last token of
    its sequence; (0, 0.0) after others. None when it was not asked.
    """

    tokens: list[int]
    logprob: list[float]
    top: list[list[tuple[int, float]]] | None
    finite: list[bool]
    accepted: list[bool]
    foreseen: list[tuple[int, float]] | None = None


class Pending(Protocol):
    """A dispatched step."""

    def wait(self) -> None:
        """Returns when the device has finished the step: keeps its time apart from the host's in the statistics."""
        ...

    def result(self) -> StepResult:
        """Reads the step's results back, waiting for them if need be."""
        ...


class Runner(Protocol):
    """The device. Calls come from one thread, and take effect in the order they were made.

    A runner must read what it needs of a plan, its sequences included, before dispatch returns: the scheduler changes
    them later.
    """

    @property
    def ready(self) -> bool:
        """Whether each step runs in the smallest program that fits: all are loaded."""
        ...

    def admit(self, seq: Sequence) -> None:
        """Loads the state of seq.slot: length seq.num_admitted, seed, params, stop_ids, output_ids."""
        ...

    def copy_pages(self, copies: Seq[tuple[int, int]]) -> None:
        """Copies pages, in every layer's K and V."""
        ...

    def dispatch(self, plan: StepPlan) -> Pending:
        """Starts the step and returns at once."""
        ...
