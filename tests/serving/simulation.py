"""The engine's loop on the fake device, one turn at a time, and what sequences must come to."""

from jaxserve.serving.blocks import BlockPool
from jaxserve.serving.request import GenerationRequest, Limits, SamplingParams, Sequence
from jaxserve.serving.scheduler import Scheduler
from jaxserve.serving.speculation import Speculation
from tests.serving.fake_device import FakeRunner, alone, token_logprob, top_logprobs

LIMITS = Limits(
    max_num_seqs=4,
    max_model_len=64,
    page_size=4,
    num_pages=64,
    vocab_size=50,
    token_budget=16,
    eos_ids=(0, 1),
    score_budget=5,
    max_logprobs=3,
)


class Simulation:
    """The engine's loop, one turn at a time: results are confirmed one step late, the books checked every time."""

    def __init__(self, limits: Limits, prefix_caching: bool = True, speculation: Speculation | None = None):
        self.limits = limits
        self.pool = BlockPool(limits.num_pages, limits.page_size, prefix_caching)
        self.scheduler = Scheduler(limits, self.pool, speculation)
        self.runner = FakeRunner(limits)
        self.turns = 0
        self._in_flight = None

    def add(self, request: GenerationRequest) -> list[Sequence]:
        request.validate(self.limits)
        family: list[Sequence] = []
        for index in range(request.n):
            family.append(Sequence.create(request, self.limits, index, family[0] if family else None))
            self.scheduler.add(family[-1])
        return family

    def turn(self):
        self.turns += 1
        waited = self._in_flight is not None and self.scheduler.wants_results()
        if waited:
            self._confirm()
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        pending = None
        if plan is not None:
            for row in plan.rows:
                # Admitted in this plan, it has no length on the device yet.
                start = row.start if row.seq in plan.admits else self.runner.length[row.slot]
                first, end = start // self.limits.page_size, row.start + row.count
                written = row.seq.blocks[first : -(-end // self.limits.page_size)]
                assert all(self.pool.is_writable(page) for page in written)
            for seq in plan.admits:
                self.runner.admit(seq)
            self.runner.copy_pages(plan.copies)
            pending = self.runner.dispatch(plan)
        assert plan or self._in_flight or waited or not self.scheduler.has_work, "stuck"
        if self._in_flight is not None:
            self._confirm()
        self._in_flight = (plan, pending) if plan and pending else None
        return plan

    def _confirm(self):
        assert self._in_flight is not None
        plan, pending = self._in_flight
        self.scheduler.confirm(plan, pending.result())
        self.scheduler.check_integrity()
        self._in_flight = None

    def run(self):
        while self.scheduler.has_work:
            self.turn()
            assert self.turns < 5000
        assert self.pool.usage == 0

    def finish(self, request: GenerationRequest) -> list[Sequence]:
        family = self.add(request)
        self.run()
        return family


def request(prompt, n=1, extras=b"", **params) -> GenerationRequest:
    params.setdefault("max_tokens", 8)
    params.setdefault("seed", 7)
    return GenerationRequest("r", tuple(prompt), SamplingParams(**params), n, extras)


def assert_as_alone(seq: Sequence, limits: Limits):
    output, reason, stop_reason = alone(tuple(seq.prompt_ids), seq.params, limits, seq.index)
    assert (seq.output_ids, seq.finish_reason, seq.stop_reason) == (output, reason, stop_reason)
    if seq.wants_scores:
        assert [(score.id, score.logprob, score.top) for score in seq.prompt_scores] == [
            (token, token_logprob(prefix, token), top_logprobs(prefix, limits)[: seq.params.prompt_logprobs])
            for token, prefix in ((seq.tokens[i], tuple(seq.tokens[:i])) for i in range(1, seq.prompt_len))
        ]
