"""Plans with proposals: what they save, what they never cost others, and what becomes of rejected ones."""

import dataclasses

from tests.serving.proposals import Guesses, guessing
from tests.serving.simulation import LIMITS, Simulation, assert_as_alone, request


def test_right_proposals_save_steps():
    simulation = Simulation(LIMITS, speculation=guessing(LIMITS, accuracy=1.0))
    [seq] = simulation.finish(request([2, 3, 4], ignore_eos=True, max_tokens=13))
    assert_as_alone(seq, LIMITS)
    # The prompt's step; then its token and ten proposals, as many as are of use with the token chosen after them.
    assert simulation.runner.plans == [("step", 3), ("step", 12)]
    speculation = simulation.scheduler.speculation
    assert speculation is not None
    assert (speculation.num_drafts, speculation.num_proposed, speculation.num_accepted) == (1, 11, 11)


def test_proposals_displace_neither_prompts_nor_rows():
    simulation = Simulation(LIMITS, speculation=guessing(LIMITS, accuracy=0.0))
    decoding = simulation.add(request([2, 3], ignore_eos=True, max_tokens=20))
    simulation.turn()
    [prompt] = simulation.add(request([4] * 40, max_tokens=1))
    counts = [[row.count for row in plan.rows] for plan in (simulation.turn() for _ in range(3)) if plan]
    assert counts == [[1, 15], [1, 15], [6, 10]]  # what the prompt leaves of the budget is for proposals
    simulation.run()
    for seq in (*decoding, prompt):
        assert_as_alone(seq, LIMITS)


def test_rejected_proposals_give_their_positions_back():
    simulation = Simulation(LIMITS, speculation=guessing(LIMITS, accuracy=0.0))
    [seq] = simulation.add(request([2, 3, 4], ignore_eos=True, max_tokens=20))
    simulation.turn()
    plan = simulation.turn()
    assert plan is not None and (plan.rows[0].start, plan.rows[0].count, plan.rows[0].samples) == (3, 16, 16)
    assert (seq.num_computed, seq.num_pending) == (19, 16)
    plan = simulation.turn()
    assert plan is not None and plan.rows[0].start == 4 and len(seq.tokens) == 5
    for _ in range(5):
        simulation.turn()
        assert len(seq.blocks) == -(-seq.num_computed // LIMITS.page_size), "pages of rejected proposals are used again"
    simulation.run()
    assert_as_alone(seq, LIMITS)


def test_only_confirmed_pages_reach_the_prefix_cache():
    simulation = Simulation(LIMITS, speculation=guessing(LIMITS, accuracy=0.5))
    [seq] = simulation.finish(request(range(2, 9), ignore_eos=True, max_tokens=25))
    simulation.scheduler.speculation = None
    [again] = simulation.finish(request([*seq.tokens[:-1], 9], ignore_eos=True, max_tokens=4))
    assert again.cached_tokens == 4 * ((len(seq.tokens) - 1) // 4)
    assert_as_alone(again, LIMITS)


def test_proposals_never_preempt():
    limits = dataclasses.replace(LIMITS, num_pages=6)
    simulation = Simulation(limits, False, guessing(limits, accuracy=0.3))
    family = [simulation.add(request([2, i], max_tokens=10, ignore_eos=True, seed=i))[0] for i in (3, 4)]
    simulation.run()
    assert simulation.scheduler.num_preemptions == 0
    for seq in family:
        assert_as_alone(seq, limits)


def test_sequences_that_end_are_forgotten():
    simulation = Simulation(LIMITS, speculation=guessing(LIMITS, accuracy=0.5))
    for i in range(3):
        simulation.finish(request([2, 3, i], max_tokens=12))
    speculation = simulation.scheduler.speculation
    assert speculation is not None and isinstance(speculation.proposer, Guesses) and not speculation.proposer.known
