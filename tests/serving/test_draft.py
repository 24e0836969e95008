"""A draft model's proposals, with fake devices for both models."""

import asyncio
import dataclasses
import random

import pytest

from jaxserve.errors import UserError
from jaxserve.serving.draft import DraftProposer
from jaxserve.serving.request import Limits
from jaxserve.serving.session import check_same_tokens
from jaxserve.serving.speculation import MOST_PROPOSALS, Speculation
from jaxserve.text.tokenizer import SpecialTokens, Tokenizer
from tests.serving.engine_support import LIMITS as ENGINE_LIMITS
from tests.serving.engine_support import TOKENIZER, Pieces, read, request, serve
from tests.serving.fake_device import FakeRunner
from tests.serving.simulation import LIMITS, Simulation, assert_as_alone


class ForgetfulRunner(FakeRunner):
    """A draft: the target's model, that now and then chooses another token."""

    def __init__(self, limits: Limits, accuracy: float):
        super().__init__(limits)
        self.accuracy, self.random = accuracy, random.Random(0)

    def dispatch(self, plan):
        done = super().dispatch(plan)
        result = done._result
        assert result is not None
        at = 0
        for row in plan.rows:
            for i in range(at, at + row.samples):
                if self.random.random() > self.accuracy:
                    result.tokens[i] = self.last_token[row.slot] = (result.tokens[i] + 1) % self.limits.vocab_size
            at += row.samples
        return done


def drafting(limits: Limits, accuracy: float, draft: Limits | None = None) -> tuple[Speculation, ForgetfulRunner]:
    runner = ForgetfulRunner(draft or limits, accuracy)
    speculation = Speculation(DraftProposer(runner, draft or limits), limits.row_sizes)
    speculation.costs.best = lambda rows, gains, extra: (min(len(gains), 6), rows + len(gains))  # type: ignore[method-assign]
    return speculation, runner


@pytest.mark.parametrize("accuracy", [1.0, 0.7, 0.0])
def test_outputs_are_those_without(accuracy):
    speculation, _ = drafting(LIMITS, accuracy)
    simulation = Simulation(LIMITS, speculation=speculation)
    family = [
        seq
        for i in range(6)
        for seq in simulation.add(
            dataclasses.replace(request([2 + i] * (3 + 7 * i), n=1 + i % 2, max_tokens=20, seed=i), request_id=str(i))
        )
    ]
    simulation.run()
    for seq in family:
        assert_as_alone(seq, LIMITS)
    if accuracy == 1.0:
        assert speculation.num_accepted == speculation.num_proposed > 50
    if accuracy == 0.0:
        assert speculation.num_accepted == 0
    proposer = speculation.proposer
    assert isinstance(proposer, DraftProposer)
    assert not proposer._drafts and proposer._pool.num_free == LIMITS.num_pages
    assert sorted(proposer._slots) == list(range(LIMITS.max_num_seqs))


def test_the_draft_computes_a_prompt_once_and_then_what_is_new():
    speculation, runner = drafting(LIMITS, 1.0)
    simulation = Simulation(LIMITS, speculation=speculation)
    simulation.finish(request(range(2, 42), ignore_eos=True, max_tokens=15))
    sizes = [tokens for _, tokens in runner.plans]
    # The prompt and the first token in steps of 16; five more proposals; then the sixth, which was not fed, and the
    # token that the target chose after it.
    assert sizes == [16, 16, 9, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1]
    assert speculation.num_accepted == speculation.num_proposed == 12


def test_without_room_the_draft_proposes_nothing():
    small = dataclasses.replace(LIMITS, max_num_seqs=1, num_pages=8, max_model_len=24)
    speculation, runner = drafting(LIMITS, 1.0, small)
    simulation = Simulation(LIMITS, speculation=speculation)
    family = [simulation.add(request([2, 3, i], max_tokens=30, ignore_eos=True, seed=i))[0] for i in range(3)]
    simulation.run()
    for seq in family:
        assert_as_alone(seq, LIMITS)
    assert speculation.num_accepted > 0 and max(runner.length) <= 24


def test_preempted_sequences_give_the_drafts_pages_back():
    limits = dataclasses.replace(LIMITS, num_pages=10)
    speculation, _ = drafting(limits, 0.8)
    simulation = Simulation(limits, False, speculation)
    family = [simulation.add(request([2, 3, i], max_tokens=24, seed=i, ignore_eos=True))[0] for i in range(4)]
    simulation.run()
    assert simulation.scheduler.num_preemptions > 0
    for seq in family:
        assert_as_alone(seq, limits)
    proposer = speculation.proposer
    assert isinstance(proposer, DraftProposer) and proposer._pool.num_free == limits.num_pages


def test_a_bad_draft_is_hardly_asked_and_never_given_up():
    proposer = DraftProposer(FakeRunner(LIMITS), LIMITS)
    [seq] = Simulation(LIMITS).add(request([2, 3]))
    for _ in range(60):
        proposer.learn(seq, 4, 0) if proposer.rates(seq) else None
    assert proposer.rates(seq)[0] < 0.1 and len(proposer.rates(seq)) == MOST_PROPOSALS
    for _ in range(70):
        proposer.rates(seq)
    assert proposer.rates(seq)[0] >= 0.7
    proposer.learn(seq, 4, 0)
    assert proposer.rates(seq)[0] < 0.1


def test_answers_of_an_engine_are_those_without():
    asked = [
        request([2 + i % 5] * (1 + i), n=1 + i % 2, max_tokens=1 + i * 5 % 23, seed=i, stop=("a", "q")[: i % 3])
        for i in range(20)
    ]

    async def main(engine):
        answers = await asyncio.gather(*(read(engine.submit(each)) for each in asked))
        return [(each.text, each.token_ids, each.last.finish_reason) for choices in answers for each in choices]

    speculation, _ = drafting(ENGINE_LIMITS, 0.8)
    assert serve(main, speculation=speculation) == serve(main)
    assert speculation.num_accepted > 0


def test_a_draft_of_another_tokenizer_is_refused():
    class Other(Pieces):
        def token_bytes(self, token: int) -> bytes:
            return b"?" if token == 7 else super().token_bytes(token)

    class Larger(Pieces):
        vocab_size = 31

    check_same_tokens("--speculate draft", TOKENIZER, TOKENIZER)
    for backend, reason in ((Other(), r"its token 7 is b'\?', the target's b'f'"), (Larger(), "it knows 31 tokens")):
        with pytest.raises(UserError, match=f"--speculate draft: it has another tokenizer than the target: {reason}"):
            check_same_tokens("--speculate draft", Tokenizer(backend, SpecialTokens()), TOKENIZER)
