"""A device for scheduler and engine tests, whose pages hold token ids instead of keys and values.

The next token is a hash of the prefix as read through the block table, so a page that is shared wrongly, freed too
early or not copied changes the output.
"""

import hashlib
from collections.abc import Callable
from collections.abc import Sequence as Seq

from jaxserve.serving.plan import Row, StepPlan, StepResult
from jaxserve.serving.request import Limits, SamplingParams, Sequence, resolve_seed

UNWRITTEN = -1


def draw(kind: str, prefix: tuple[int, ...], seed: tuple[int, int] = (0, 0)) -> int:
    return int.from_bytes(hashlib.blake2b(repr((kind, prefix, seed)).encode(), digest_size=8).digest())


def next_token(
    prefix: tuple[int, ...], seed: tuple[int, int], limits: Limits, banned: frozenset[int] = frozenset()
) -> int:
    """The model and the sampler. Even prefixes are greedy-like (the seed does not matter)."""
    number = draw("token", prefix, seed if draw("sampled", prefix) % 2 else (0, 0))
    while number % limits.vocab_size in banned:
        number += 1
    return number % limits.vocab_size


def token_logprob(prefix: tuple[int, ...], token: int) -> float:
    return -(draw("logprob", (*prefix, token)) % 1000) / 100


def top_logprobs(prefix: tuple[int, ...], limits: Limits) -> list[tuple[int, float]]:
    first = draw("top", prefix)
    return [((first + i) % limits.vocab_size, -0.5 - i) for i in range(limits.max_logprobs)]


def alone(
    prompt: tuple[int, ...], params: SamplingParams, limits: Limits, index: int = 0
) -> tuple[list[int], str, int | None]:
    """(output ids, finish reason, stop reason) of one choice, by the plainest loop there is."""
    output: list[int] = []
    seed = resolve_seed(params.seed, index)
    eos = set() if params.ignore_eos else set(limits.eos_ids)
    stops = eos | set(params.stop_token_ids)
    while len(output) < min(params.max_tokens, limits.max_model_len - len(prompt)):
        banned = frozenset(stops) if len(output) < params.min_tokens else frozenset()
        token = next_token((*prompt, *output), seed, limits, banned)
        output.append(token)
        if token in stops:
            return output, "stop", token if token in params.stop_token_ids else None
    return output, "length", None


class Done:
    """Results, readable once."""

    def __init__(self, result: StepResult):
        self._result: StepResult | None = result

    def wait(self) -> None:
        pass

    def result(self) -> StepResult:
        assert self._result is not None
        result, self._result = self._result, None
        return result


class FakeRunner:
    """Executes each step when it is dispatched: that is the order in which a device does, too."""

    ready = True

    def __init__(self, limits: Limits):
        self.limits = limits
        self.pages = [[UNWRITTEN] * limits.page_size for _ in range(limits.num_pages)]
        self.tables = [[UNWRITTEN] * limits.pages_per_seq for _ in range(limits.max_num_seqs)]
        self.length = [UNWRITTEN] * limits.max_num_seqs
        self.last_token = [UNWRITTEN] * limits.max_num_seqs
        self.foreseen = [UNWRITTEN] * limits.max_num_seqs
        self.loaded: list[Sequence | None] = [None] * limits.max_num_seqs
        self.plans: list[tuple[str, int]] = []  # (kind, tokens) of every step
        self.not_finite: set[int] = set()  # last tokens after which the logits are not finite
        self.foresees: Callable[[], bool] | None = None  # whether the look-ahead head is right, asked for each token

    def admit(self, seq: Sequence) -> None:
        self.loaded[seq.slot] = seq
        self.length[seq.slot] = seq.num_admitted
        self.last_token[seq.slot] = self.foreseen[seq.slot] = UNWRITTEN
        self.tables[seq.slot] = [UNWRITTEN] * self.limits.pages_per_seq

    def copy_pages(self, copies: Seq[tuple[int, int]]) -> None:
        assert not {source for source, _ in copies} & {target for _, target in copies}
        for source, target in copies:
            self.pages[target] = self.pages[source].copy()

    def dispatch(self, plan: StepPlan) -> Done:
        self._check(plan)
        written: set[tuple[int, int]] = set()
        for row in plan.rows:
            self.tables[row.slot][row.pages_from : len(row.seq.blocks)] = row.seq.blocks[row.pages_from :]
            tokens = row.tokens or (self.last_token[row.slot], self.foreseen[row.slot])[: row.count]
            for position, token in enumerate(tokens, self.length[row.slot]):
                assert 0 <= token < self.limits.vocab_size
                page, offset = self._place(row.slot, position)
                assert (page, offset) not in written
                written.add((page, offset))
                self.pages[page][offset] = token
        if plan.kind == "score":
            self.length[plan.rows[0].slot] += plan.rows[0].count
            return Done(self._scores(plan))
        result = StepResult([], [], [], [], [], [] if plan.look_ahead else None)
        for row in plan.rows:
            self._sample(row, result)
        return Done(result)

    def _check(self, plan: StepPlan) -> None:
        limits = self.limits
        assert plan.rows
        assert plan.num_tokens <= (limits.token_budget if plan.kind == "step" else limits.score_budget)
        assert len({row.slot for row in plan.rows}) == len(plan.rows) <= limits.max_num_seqs
        assert plan.kind == "step" or len(plan.rows) == 1
        assert sum(row.samples for row in plan.rows) <= limits.row_sizes[-1]
        for row in plan.rows:
            assert self.loaded[row.slot] is row.seq
            assert row.start == self.length[row.slot] or (row.start > self.length[row.slot] and not row.tokens)
            assert len(row.tokens) == row.count or (row.tokens == () and row.count == row.samples <= 2)
        self.plans.append((plan.kind, plan.num_tokens))

    def _place(self, slot: int, position: int) -> tuple[int, int]:
        page = self.tables[slot][position // self.limits.page_size]
        assert page != UNWRITTEN
        return page, position % self.limits.page_size

    def _prefix(self, slot: int, length: int) -> tuple[int, ...]:
        places = [self._place(slot, position) for position in range(length)]
        return tuple(self.pages[page][offset] for page, offset in places)

    def _sample(self, row: Row, result: StepResult) -> None:
        """Appends a row's samples. Its slot goes on from the first of them that is not the proposal after it."""
        seq, end = row.seq, self.length[row.slot] + row.count
        self.length[row.slot] = end - row.samples
        going_on, newest = True, 0
        for length in range(end - row.samples + 1, end + 1):
            prefix = self._prefix(row.slot, length)
            banned = seq.stop_ids if len(prefix) - seq.prompt_len < seq.params.min_tokens else frozenset()
            token = next_token(prefix, seq.seed, self.limits, banned)
            result.tokens.append(token)
            result.logprob.append(token_logprob(prefix, token))
            assert result.top is not None
            result.top.append(top_logprobs(prefix, self.limits))
            result.finite.append(prefix[-1] not in self.not_finite)
            result.accepted.append(going_on)
            if result.foreseen is not None:
                result.foreseen.append((0, 0.0))
            if going_on:
                self.length[row.slot], self.last_token[row.slot] = length, token
                newest = len(result.tokens) - 1
                going_on = length < end and self._prefix(row.slot, length + 1)[-1] == token
        if not row.samples:
            return
        self.foreseen[row.slot] = UNWRITTEN
        if result.foreseen is not None:
            assert self.foresees is not None, "a head is asked for that there is not"
            prefix = (*self._prefix(row.slot, self.length[row.slot]), self.last_token[row.slot])
            after = next_token(prefix, seq.seed, self.limits)
            result.foreseen[newest] = (after if self.foresees() else (after + 1) % self.limits.vocab_size, 0.7)
            self.foreseen[row.slot] = result.foreseen[newest][0]

    def _scores(self, plan: StepPlan) -> StepResult:
        [row] = plan.rows
        targets = row.seq.tokens[row.start + 1 : row.start + row.count + 1]
        prefixes = [self._prefix(row.slot, row.start + i + 1) for i in range(row.count)]
        return StepResult(
            tokens=targets,
            logprob=[token_logprob(prefix, token) for prefix, token in zip(prefixes, targets, strict=True)],
            top=[top_logprobs(prefix, self.limits) for prefix in prefixes],
            finite=[prefix[-1] not in self.not_finite for prefix in prefixes],
            accepted=[True] * row.count,
        )
