"""Which sequences take part in the next step, and what its results mean for them. Plain Python: no jax.

Steps are scheduled ahead of results: schedule() plans step N+1 while step N runs, and confirm() takes step N's results
after that. So a plan rests only on what is known without them: a decode row feeds a token that only the device knows,
and proposals whose fate only the device knows count as accepted. A sequence that turns out to have ended (EOS, stop,
abort) may have one more row in flight; that row's result is dropped, and pages and slot return when nothing in flight
uses them.
"""

import collections
from collections.abc import Iterable

from jaxserve.serving.blocks import ROOT_KEY, BlockPool, page_key
from jaxserve.serving.plan import Row, StepPlan, StepResult
from jaxserve.serving.request import Limits, Sequence, Status, TokenLogprob
from jaxserve.serving.speculation import Speculation


class Scheduler:
    """First come, first served. Running sequences decode first, prompts share the rest of the token budget in chunks.

    A sequence gets the pages of all its known tokens when it is admitted, then one page at a time. When there is none,
    the youngest is preempted: it drops its pages, goes to the head of the queue, and later recomputes them. Sampling
    depends on the sequence's seed and positions alone, so it ends with the output it would have had.
    """

    def __init__(self, limits: Limits, pool: BlockPool, speculation: Speculation | None = None):
        self.limits = limits
        self.pool = pool
        self.speculation = speculation
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []  # in order of admission
        self.leaving: set[Sequence] = set()  # finished or preempted, with a step in flight that uses their pages
        self.num_preemptions = 0
        self._free_slots = list(reversed(range(limits.max_num_seqs)))
        self._last_kind = "step"

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.leaving)

    def add(self, seq: Sequence) -> None:
        """Queues a sequence of a validated request. One that has nothing to compute is finished at once."""
        if seq.max_new == 0 and not seq.scoring:
            seq.status, seq.finish_reason = Status.FINISHED, "length"
        else:
            self.waiting.append(seq)

    def finish(
        self, seq: Sequence, reason: str, stop_reason: str | int | None = None, error: str | None = None
    ) -> None:
        """Ends a sequence now, whatever is still in flight. Nothing happens when it has ended already."""
        status = seq.status
        if status is Status.FINISHED:
            return
        seq.status, seq.finish_reason, seq.stop_reason, seq.error = Status.FINISHED, reason, stop_reason, error
        if status is Status.WAITING:
            self.waiting.remove(seq)
        elif status is Status.RUNNING:
            self._leave(seq)

    # ---- planning

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run before more results are confirmed (or at all)."""
        makers = [self._score_plan, self._step_plan]
        if self._last_kind == "score":  # prompts being scored and everything else take turns
            makers.reverse()
        plan = makers[0]() or makers[1]()
        if plan is not None:
            self._last_kind = plan.kind
        return plan

    def _score_plan(self, admits: Iterable[Sequence] = ()) -> StepPlan | None:
        seq = next((seq for seq in self.running if seq.scoring), None)
        if seq is None:
            return None
        plan = StepPlan("score", [], list(admits), [])
        targets = seq.prompt_len - 1  # the prompt's last token predicts no prompt token: an ordinary step takes it
        count = min(targets - seq.num_computed, self.limits.score_budget)
        self._add_row(plan, seq, count)
        seq.scoring = seq.num_computed < targets
        return plan

    def _step_plan(self) -> StepPlan | None:
        plan = StepPlan("step", [], [], [])
        budget = self.limits.token_budget - self._add_decodes(plan)
        for seq in self.running:
            left = len(seq.tokens) + seq.num_pending - seq.num_computed
            if budget and left > 1 and not seq.scoring:
                budget -= self._add_row(plan, seq, min(left, budget))
        self._admit_waiting(plan, budget)
        self._add_proposals(plan)
        self._look_ahead(plan)
        if plan.admits and not plan.rows:  # only prompts to score came in
            return self._score_plan(plan.admits)
        return plan if plan.rows else None

    def _add_decodes(self, plan: StepPlan) -> int:
        """Rows of one token for everyone who has just one left to feed. Returns how many."""
        for seq in self.running.copy():  # preemption takes from its end
            known = len(seq.tokens) + seq.num_pending
            if seq.num_computed != known - 1 or seq.scoring or seq.status is not Status.RUNNING:
                continue
            if known - seq.prompt_len >= seq.max_new:
                continue  # its last token is on the way, or may be
            if seq.num_computed < len(seq.blocks) * self.limits.page_size or self._grow(seq):
                self._add_row(plan, seq, 1)
        return len(plan.rows)

    def wants_results(self) -> bool:
        """Whether the step in flight should be confirmed before the next is planned, for the sake of proposals."""
        if self.speculation is None:
            return False
        if any(seq.num_pending > 1 and not seq.foreseen for seq in self.running):
            return True
        decoding = [seq for seq in self.running if seq.num_pending and self._wants_more(seq)]
        return self.speculation.worth_waiting(decoding, len(decoding), self.limits.row_sizes[-1] - len(decoding))

    def _wants_more(self, seq: Sequence) -> bool:
        """Whether a proposal is of use to the step after next: at least one token comes after it."""
        return seq.num_outputs + seq.num_pending + 1 < seq.max_new

    def _add_proposals(self, plan: StepPlan) -> None:
        """Proposals take what tokens, rows and free pages the plan has left: they displace nothing."""
        if self.speculation is None:
            return
        rows = {row.seq: row for row in plan.rows if row.count == row.samples == 1}
        if not rows or self._room(plan) <= 0:
            return
        limits = {seq: self._most_proposals(seq) for seq in rows}
        known = {seq: limit for seq, limit in limits.items() if rows[seq].tokens}
        for seq, proposals in self.speculation.propose(known, plan.num_samples, self._room(plan)).items():
            rows[seq].tokens += tuple(proposals)
            self._extend(rows[seq], len(proposals))
        foreseen = [seq for seq, limit in limits.items() if seq.foreseen and limit > 0 and not rows[seq].tokens]
        for seq in foreseen[: self.speculation.count_foreseen(len(foreseen), plan.num_samples, self._room(plan))]:
            self._extend(rows[seq], 1)

    def _room(self, plan: StepPlan) -> int:
        """How many proposals the plan has room for."""
        return min(self.limits.token_budget - plan.num_tokens, self.limits.row_sizes[-1] - plan.num_samples)

    def _most_proposals(self, seq: Sequence) -> int:
        """How many proposals are of use to a sequence, one row of which is planned, and have a place."""
        return min(seq.max_new - seq.num_outputs - seq.num_pending, self._free_positions(seq))

    def _extend(self, row: Row, count: int) -> None:
        """Makes the row longer by `count` proposals."""
        seq = row.seq
        row.count += count
        row.samples += count
        seq.num_computed += count
        seq.num_pending += count
        missing = -(-seq.num_computed // self.limits.page_size) - len(seq.blocks)
        seq.blocks += self._take(max(0, missing))
        seq.num_sent = len(seq.blocks)

    def _look_ahead(self, plan: StepPlan) -> None:
        """Has the look-ahead head foresee what comes after the tokens that the plan chooses, where that pays."""
        choosing = [row.seq for row in plan.rows if row.samples]
        if self.speculation is None or not choosing:
            return
        plan.look_ahead = self.speculation.looks_ahead(len(choosing), self.limits.row_sizes[-1] - len(choosing))
        for seq in choosing:
            seq.foreseen = plan.look_ahead

    def _free_positions(self, seq: Sequence) -> int:
        """How far the sequence can grow without any other giving way, if a page each is enough for them."""
        spare = self.pool.num_free // max(1, len(self.running))
        return (len(seq.blocks) + spare) * self.limits.page_size - seq.num_computed

    def _add_row(self, plan: StepPlan, seq: Sequence, count: int) -> int:
        start, end = seq.num_computed, seq.num_computed + count
        samples = int(plan.kind == "step" and end == len(seq.tokens) + seq.num_pending)
        tokens = () if seq.num_pending else tuple(seq.tokens[start:end])
        plan.rows.append(Row(seq, seq.slot, start, count, tokens, samples, seq.num_sent))
        seq.num_sent = len(seq.blocks)
        seq.num_computed = end
        seq.num_pending += samples
        seq.in_flight += 1
        return count

    def _grow(self, seq: Sequence) -> bool:
        """One more page, at the youngest sequence's cost if need be. False: not in this step."""
        while (pages := self.pool.allocate(1)) is None:
            if self.leaving:  # they give pages back when the step in flight is confirmed
                return False
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        seq.blocks += pages
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.num_preemptions += 1
        victim.status = Status.PREEMPTED
        self._leave(victim)

    # ---- admission

    def _admit_waiting(self, plan: StepPlan, budget: int) -> None:
        if any(seq.status is Status.PREEMPTED for seq in self.leaving):
            return  # they come first, and their pages are somebody's already
        sources: list[int] = []
        while self.waiting and budget and self._free_slots and self._admit(self.waiting[0], plan, sources):
            seq = self.waiting.popleft()
            if not seq.scoring:
                budget -= self._add_row(plan, seq, min(len(seq.tokens) - seq.num_computed, budget))
        # Held until here, so that no page that is copied from is also copied to in this plan.
        self.pool.free(sources)

    def _admit(self, seq: Sequence, plan: StepPlan, sources: list[int]) -> bool:
        """Gives the sequence a slot and pages, sharing those whose content is known. False: not now."""
        if seq.parent is not None and not self._fork_ready(seq.parent, plan):
            return False
        shared, computed = self._known_pages(seq)
        size = self.limits.page_size
        total = -(-len(seq.tokens) // size)
        # One page a running sequence is left alone, or they would soon preempt whom we admit here.
        reserve = len(self.running)
        copied = computed < len(shared) * size  # the last shared page is going to be written
        if copied and self.pool.num_free_after_touch(shared) < total - len(shared) + 1 + reserve:
            shared, copied = shared[:-1], False  # its tokens are computed once more instead
            computed = len(shared) * size
        if self.pool.num_free_after_touch(shared) < total - len(shared) + copied + reserve:
            return False

        self.pool.touch(shared)
        if copied:
            source = shared.pop()
            [target] = self._take(1)
            plan.copies.append((source, target))
            sources.append(source)
            shared.append(target)
        seq.blocks = shared + self._take(total - len(shared))
        self._enter(seq, computed)
        plan.admits.append(seq)
        return True

    def _take(self, count: int) -> list[int]:
        pages = self.pool.allocate(count)
        assert pages is not None, "counted before"
        return pages

    def _enter(self, seq: Sequence, computed: int) -> None:
        if not seq.admitted_once:
            seq.admitted_once = True
            if seq.parent is None and not seq.scoring:
                seq.cached_tokens = computed
                self.pool.query_tokens += seq.prompt_len
                self.pool.hit_tokens += computed
        seq.parent = None
        seq.status = Status.RUNNING
        seq.slot = self._free_slots.pop()
        seq.num_admitted = seq.num_computed = computed
        seq.num_registered = computed // self.limits.page_size
        seq.num_sent = 0
        seq.foreseen = False
        self.running.append(seq)

    def _fork_ready(self, parent: Sequence, plan: StepPlan) -> bool:
        """Whether the parent's prompt is in its pages before this plan's step (copies come first), or never will be."""
        if parent.status is not Status.RUNNING:
            return parent.status is Status.FINISHED
        needed = parent.prompt_len - 1
        if parent in plan.admits or parent.num_computed < needed:
            return False
        return not any(row.seq is parent and row.start < needed for row in plan.rows)

    def _known_pages(self, seq: Sequence) -> tuple[list[int], int]:
        """Pages that hold the sequence's first positions already, and how many positions.

        At least one position is left to compute: its logits choose the next token.
        """
        size = self.limits.page_size
        if seq.parent is not None and seq.parent.status is Status.RUNNING:
            computed = seq.prompt_len - 1
            return seq.parent.blocks[: -(-computed // size)], computed
        if seq.scoring or not self.pool.prefix_caching:
            return [], 0  # scoring needs the logits of every position
        self._extend_keys(seq, len(seq.tokens) // size)
        pages = self.pool.match_prefix(seq.keys)
        return pages, min(len(pages) * size, len(seq.tokens) - 1)

    def _extend_keys(self, seq: Sequence, count: int) -> None:
        size = self.limits.page_size
        for i in range(len(seq.keys), count):
            parent = seq.keys[-1] if seq.keys else ROOT_KEY
            seq.keys.append(page_key(parent, seq.tokens[i * size : (i + 1) * size], seq.extras))

    # ---- results

    def confirm(self, plan: StepPlan, result: StepResult) -> list[tuple[Sequence, range]]:
        """Takes the results of the oldest unconfirmed plan.

        Returns every sequence with news, and which entries of the result were appended to its tokens: none when it
        ended without one.
        """
        news: list[tuple[Sequence, range]] = []
        first = 0
        for row in plan.rows:
            seq, chosen = row.seq, range(first, first + row.samples)
            first = chosen.stop
            seq.in_flight -= 1
            seq.num_pending -= row.samples
            if seq.status is not Status.FINISHED:
                if plan.kind == "score":
                    self._confirm_scores(row, result, news)
                else:
                    self._confirm_row(plan, row, chosen, result, news)
            if not seq.in_flight and seq in self.leaving:
                self._release(seq)
        return news

    def _confirm_row(
        self, plan: StepPlan, row: Row, chosen: range, result: StepResult, news: list[tuple[Sequence, range]]
    ) -> None:
        seq = row.seq
        if not row.samples:
            self._register_pages(seq, row.start + row.count)
            return
        generated = sum(result.accepted[chosen.start : chosen.stop])
        seq.num_computed -= row.samples - generated
        if row.samples > 1 and self.speculation:
            self.speculation.learn(seq, row.samples - 1, generated - 1)
        running = seq.status is Status.RUNNING  # one that gave way is forgotten
        if running and plan.look_ahead and self.speculation and result.foreseen:
            said = result.foreseen[chosen[generated - 1]]
            self.speculation.proposer.foresee(seq, len(seq.tokens) + generated, *said)
        end: tuple[str, int | None] | None = None
        for i in chosen[:generated]:
            if not result.finite[i]:
                self._fail(seq, chosen[: i - chosen.start], news)
                return
            token = result.tokens[i]
            seq.tokens.append(token)
            if token in seq.stop_ids and seq.num_outputs > seq.params.min_tokens:
                end = "stop", token if token in seq.params.stop_token_ids else None
            elif seq.num_outputs >= seq.max_new:
                end = "length", None
            if end:
                generated = i + 1 - chosen.start
                break
        self._register_pages(seq, len(seq.tokens) - 1)
        news.append((seq, chosen[:generated]))
        if end:
            self.finish(seq, *end)

    def _confirm_scores(self, row: Row, result: StepResult, news: list[tuple[Sequence, range]]) -> None:
        seq = row.seq
        if not all(result.finite[: row.count]):
            self._fail(seq, range(0), news)
            return
        self._register_pages(seq, row.start + row.count)
        number = seq.params.prompt_logprobs
        for i in range(row.count):
            top = result.top[i][:number] if result.top else []
            seq.prompt_scores.append(TokenLogprob(seq.tokens[row.start + 1 + i], result.logprob[i], top))
        if len(seq.prompt_scores) == seq.prompt_len - 1 and seq.max_new == 0:
            news.append((seq, range(0)))
            self.finish(seq, "length")

    def _fail(self, seq: Sequence, appended: range, news: list[tuple[Sequence, range]]) -> None:
        news.append((seq, appended))
        self.finish(seq, "error", error="the model produced numbers that are not finite for this request")

    def _register_pages(self, seq: Sequence, confirmed: int) -> None:
        """Offers the full pages among the first `confirmed` positions to the prefix cache."""
        full = confirmed // self.limits.page_size
        if full > seq.num_registered and self.pool.prefix_caching:
            self._extend_keys(seq, full)
            for i in range(seq.num_registered, full):
                self.pool.register(seq.blocks[i], seq.keys[i])
            seq.num_registered = full

    # ---- leaving

    def _leave(self, seq: Sequence) -> None:
        if self.speculation:
            self.speculation.proposer.forget(seq)
        self.running.remove(seq)
        self.leaving.add(seq)
        if not seq.in_flight:
            self._release(seq)

    def _release(self, seq: Sequence) -> None:
        self.leaving.remove(seq)
        self.pool.free(seq.blocks)
        self._free_slots.append(seq.slot)
        seq.blocks, seq.slot = [], -1
        if seq.status is Status.PREEMPTED:
            seq.status = Status.WAITING
            if seq.wants_scores and len(seq.prompt_scores) < seq.prompt_len - 1:
                seq.scoring, seq.prompt_scores = True, []
            self.waiting.appendleft(seq)

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not balance. For tests."""
        holders = [*self.running, *self.leaving]
        self.pool.check_integrity(seq.blocks for seq in holders)
        slots = [seq.slot for seq in holders] + self._free_slots
        assert sorted(slots) == list(range(self.limits.max_num_seqs)), f"slots held and free: {slots}"
        assert all(seq.status is Status.RUNNING for seq in self.running)
        assert all(seq.in_flight and seq.status in (Status.PREEMPTED, Status.FINISHED) for seq in self.leaving)
        assert all(seq.status is Status.WAITING and not seq.blocks and not seq.in_flight for seq in self.waiting)
        for seq in self.running:
            next_page = seq.num_computed // self.limits.page_size
            assert len(seq.blocks) >= -(-seq.num_computed // self.limits.page_size), f"{seq.id} has too few pages"
            if next_page < len(seq.blocks):
                assert self.pool.is_writable(seq.blocks[next_page]), f"{seq.id} would write to a shared page"
