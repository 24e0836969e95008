import contextlib
import dataclasses
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.serving.request import GenerationRequest, InvalidRequest, Limits, SamplingParams, Sequence, Status
from tests.serving.fake_device import alone
from tests.serving.proposals import guessing
from tests.serving.simulation import LIMITS, Simulation, assert_as_alone, request

# ---- random workloads


@dataclasses.dataclass(frozen=True)
class Arrival:
    turn: int
    request: GenerationRequest
    abort_turn: int | None


STEMS = ([5] * 30, [6, 7, 8, 9] * 8, [5, 5, 5, 5, 9, 9, 9, 9, 2, 3, 4] * 3)


@st.composite
def arrivals(draw) -> Arrival:
    prompt = draw(st.sampled_from(STEMS))[: draw(st.integers(1, 24))] + draw(st.lists(st.integers(2, 5), max_size=4))
    max_tokens = draw(st.integers(0, 12))
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(3, max_tokens))),
        seed=draw(st.integers(0, 3)),
        stop_token_ids=tuple(draw(st.lists(st.integers(2, 9), max_size=3))),
        ignore_eos=draw(st.booleans()),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0, 2])),
    )
    turn = draw(st.integers(0, 25))
    abort = draw(st.none() | st.none() | st.integers(turn, turn + 15))
    extras = draw(st.sampled_from([b"", b"", b"salt"]))
    return Arrival(turn, GenerationRequest("r", tuple(prompt), params, draw(st.integers(1, 3)), extras), abort)


@st.composite
def limits_(draw) -> Limits:
    max_num_seqs = draw(st.integers(1, 5))
    page_size = draw(st.integers(1, 5))
    return Limits(
        max_num_seqs=max_num_seqs,
        max_model_len=draw(st.integers(4, 36)),
        page_size=page_size,
        num_pages=draw(st.integers(1, 60)) // page_size + 1,
        vocab_size=draw(st.sampled_from([10, 50])),
        token_budget=max_num_seqs + draw(st.integers(0, 12)),
        eos_ids=(0, 1),
        score_budget=draw(st.integers(1, 8)),
        max_logprobs=2,
    )


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    limits_(),
    st.booleans(),
    st.lists(arrivals(), min_size=1, max_size=10),
    st.none() | st.integers(0, 100),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_every_output_equals_the_output_alone(limits, prefix_caching, todo, guesses, foresight):
    """With proposals, right and wrong ones, made by the host and by a look-ahead head, and without."""
    speculation = None if guesses is None else guessing(limits, guesses, foresight=foresight)
    simulation, chance = Simulation(limits, prefix_caching, speculation), random.Random(guesses)
    simulation.runner.foresees = lambda: chance.random() < foresight
    families: list[tuple[Arrival, list[Sequence]]] = []
    todo = sorted(todo, key=lambda arrival: arrival.turn)
    while todo or simulation.scheduler.has_work:
        while todo and todo[0].turn <= simulation.turns:
            arrival = todo.pop(0)
            with contextlib.suppress(InvalidRequest):  # too long for these limits
                families.append((arrival, simulation.add(arrival.request)))
        for arrival, family in families:
            if arrival.abort_turn == simulation.turns:
                for seq in family:
                    simulation.scheduler.finish(seq, "abort")
        simulation.turn()
        assert simulation.turns < 5000
    simulation.run()
    assert simulation.pool.num_free == limits.num_pages
    for _, family in families:
        for seq in family:
            if seq.finish_reason == "abort":
                output, _, _ = alone(tuple(seq.prompt_ids), seq.params, limits, seq.index)
                assert seq.output_ids == output[: seq.num_outputs]
            else:
                assert_as_alone(seq, limits)


# ---- one behaviour each


def test_shared_prefix_is_computed_once():
    limits = dataclasses.replace(LIMITS, max_model_len=600, num_pages=400, page_size=16, token_budget=128)
    simulation = Simulation(limits)
    prefix = [2 + i % 40 for i in range(500)]
    [cold] = simulation.finish(request([*prefix, 3, 4, 5], max_tokens=4))
    simulation.runner.plans.clear()
    [warm] = simulation.finish(request([*prefix, 9, 8, 7, 6], max_tokens=1))
    assert warm.cached_tokens == 496  # 31 full pages
    assert [tokens for _, tokens in simulation.runner.plans] == [8]
    assert (simulation.pool.query_tokens, simulation.pool.hit_tokens) == (503 + 504, 496)
    for seq in (cold, warm):
        assert_as_alone(seq, limits)


def test_fully_cached_prompt_recomputes_its_last_token_in_a_copied_page():
    simulation = Simulation(LIMITS)
    prompt = list(range(2, 10))
    simulation.finish(request(prompt))
    simulation.runner.plans.clear()
    family = simulation.add(request(prompt, max_tokens=1))
    plan = simulation.turn()
    assert plan is not None and len(plan.copies) == 1
    assert (plan.rows[0].start, plan.rows[0].count, plan.rows[0].tokens) == (7, 1, (9,))
    simulation.run()
    assert_as_alone(family[0], LIMITS)


def test_fully_cached_prompt_in_a_full_pool_needs_no_page_more():
    limits = dataclasses.replace(LIMITS, num_pages=2)
    simulation = Simulation(limits)
    for _ in range(2):
        [seq] = simulation.finish(request(range(2, 10), max_tokens=1))
        assert_as_alone(seq, limits)


def test_choices_share_the_prompt():
    simulation = Simulation(LIMITS)
    family = simulation.add(request(range(2, 13), n=3, ignore_eos=True))
    simulation.run()
    assert sum(tokens for _, tokens in simulation.runner.plans) == 11 + 2 + 3 * 7
    for seq in family:
        assert_as_alone(seq, LIMITS)
    assert len({tuple(seq.output_ids) for seq in family}) == 3
    assert [seq.seed for seq in family] == [seq.seed for seq in simulation.add(request(range(2, 13), n=3))]


def test_choices_fork_from_a_cached_prompt():
    simulation = Simulation(LIMITS)
    simulation.finish(request(range(2, 10)))
    for seq in simulation.finish(request(range(2, 10), n=3)):
        assert_as_alone(seq, LIMITS)


def test_pages_of_one_token():
    limits = dataclasses.replace(LIMITS, page_size=1, num_pages=16)
    simulation = Simulation(limits)
    for prompt in ([5], [5, 6, 7], [5, 6, 7]):
        for seq in simulation.finish(request(prompt, n=3, ignore_eos=True)):
            assert_as_alone(seq, limits)


def test_preempted_while_its_prompt_is_scored():
    limits = dataclasses.replace(LIMITS, num_pages=8, score_budget=2)
    simulation = Simulation(limits)
    [old] = simulation.add(request([2, 3], ignore_eos=True, max_tokens=30))
    simulation.turn()
    [scored] = simulation.add(request(range(2, 25), prompt_logprobs=2, max_tokens=1))
    while not simulation.scheduler.num_preemptions:
        simulation.turn()
    assert 0 < scored.num_computed < 22
    simulation.run()
    for seq in (old, scored):
        assert_as_alone(seq, limits)


def test_choices_survive_the_end_of_the_first():
    simulation = Simulation(LIMITS)
    family = simulation.add(request(range(2, 30), n=3))
    simulation.turn()  # the first chunk of the first choice
    simulation.scheduler.finish(family[0], "abort")
    simulation.run()
    for seq in family[1:]:
        assert_as_alone(seq, LIMITS)


def test_preempted_sequences_end_as_if_nothing_had_happened():
    limits = dataclasses.replace(LIMITS, num_pages=8)
    simulation = Simulation(limits, prefix_caching=False)
    family = [
        simulation.add(request([2, 3, i], max_tokens=16, seed=i, ignore_eos=True, min_tokens=2))[0] for i in range(4)
    ]
    simulation.run()
    assert simulation.scheduler.num_preemptions > 0
    for seq in family:
        assert_as_alone(seq, limits)


def test_the_youngest_is_preempted_and_comes_back_first():
    limits = dataclasses.replace(LIMITS, num_pages=5, max_num_seqs=2)
    simulation = Simulation(limits, prefix_caching=False)
    old, young, queued = (
        simulation.add(request(prompt, max_tokens=14, ignore_eos=True))[0]
        for prompt in ([2, 3, 4], [2, 3, 4, 5, 6], [2])  # the old one is the first to find no page
    )
    while not simulation.scheduler.num_preemptions:
        simulation.turn()
        assert queued.status is Status.WAITING
    simulation.turn()
    assert simulation.scheduler.num_preemptions == 1
    assert old.status is Status.RUNNING and young.status is Status.WAITING
    assert list(simulation.scheduler.waiting) == [young, queued]
    simulation.run()
    for seq in (old, young, queued):
        assert_as_alone(seq, limits)


def test_a_step_is_planned_before_the_last_ones_token_is_known():
    simulation = Simulation(LIMITS)
    [seq] = simulation.add(request([2, 3, 4], ignore_eos=True, max_tokens=3))
    first, second, third = simulation.turn(), simulation.turn(), simulation.turn()
    assert first and first.rows[0].tokens == (2, 3, 4) and first.rows[0].samples == 1
    assert second and second.rows[0].tokens == () and second.rows[0].start == 3
    assert third and third.rows[0].tokens == ()
    assert simulation.turn() is None  # the third token is on the way: nothing is planned past the end by length
    assert seq.finish_reason == "length" and len(simulation.runner.plans) == 3
    assert simulation.pool.usage == 0


def test_overrun_after_eos_is_dropped():
    limits = dataclasses.replace(LIMITS, eos_ids=tuple(range(50)))  # the first token ends it
    simulation = Simulation(limits)
    [seq] = simulation.finish(request([2, 3, 4]))
    assert seq.num_outputs == 1 and seq.finish_reason == "stop" and seq.stop_reason is None
    assert [tokens for _, tokens in simulation.runner.plans] == [3, 1]


def test_decodes_come_first_and_prompts_fill_the_budget():
    simulation = Simulation(LIMITS)
    simulation.add(request([2, 3], ignore_eos=True, max_tokens=20))
    simulation.turn()
    simulation.add(request([4] * 40, max_tokens=1))
    counts = [[row.count for row in plan.rows] for plan in (simulation.turn() for _ in range(3)) if plan]
    assert counts == [[1, 15], [1, 15], [1, 10]]


def test_abort_frees_pages_within_a_step():
    simulation = Simulation(LIMITS, prefix_caching=False)
    family = simulation.add(request(range(2, 30), n=2, ignore_eos=True, max_tokens=30))
    for _ in range(5):
        simulation.turn()
    assert simulation.pool.usage > 0
    for seq in family:
        simulation.scheduler.finish(seq, "abort")
        simulation.scheduler.finish(seq, "stop")  # too late
    simulation.turn()
    assert simulation.pool.usage == 0 and not simulation.scheduler.has_work
    assert {seq.finish_reason for seq in family} == {"abort"}


def test_echo_scoring_generates_nothing():
    simulation = Simulation(LIMITS)
    [seq] = simulation.finish(request(range(2, 14), max_tokens=0, prompt_logprobs=1))
    assert simulation.runner.plans == [("score", 5), ("score", 5), ("score", 1)]
    assert seq.finish_reason == "length" and seq.output_ids == []
    assert_as_alone(seq, LIMITS)


def test_scoring_takes_turns_with_decoding():
    simulation = Simulation(LIMITS)
    simulation.add(request([2, 3], ignore_eos=True, max_tokens=20))
    simulation.turn()
    [scored] = simulation.add(request(range(2, 30), prompt_logprobs=0, max_tokens=2))
    kinds = [plan.kind for plan in (simulation.turn() for _ in range(9)) if plan]
    assert kinds == ["step", "score"] * 4 + ["step"]
    simulation.run()
    assert_as_alone(scored, LIMITS)


def test_nothing_to_compute_ends_at_once():
    simulation = Simulation(LIMITS)
    [seq] = simulation.add(request([2, 3], max_tokens=0))
    assert seq.finish_reason == "length" and not simulation.scheduler.has_work


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_not_finite_ends_only_that_request(prompt_logprobs):
    simulation = Simulation(LIMITS)
    simulation.runner.not_finite = {49}
    [bad] = simulation.add(request([2, 3, 49, 49], prompt_logprobs=prompt_logprobs))
    [good] = simulation.add(request([2, 3, 4, 5], stop_token_ids=(49,)))
    simulation.run()
    assert bad.finish_reason == "error" and bad.error and bad.output_ids == []
    assert_as_alone(good, LIMITS)


def test_salted_prefixes_do_not_mix():
    simulation = Simulation(LIMITS)
    simulation.finish(request(range(2, 20), extras=b"one"))
    [other] = simulation.finish(request(range(2, 20), extras=b"two"))
    [same] = simulation.finish(request(range(2, 20), extras=b"one"))
    assert (other.cached_tokens, same.cached_tokens) == (0, 16)


# ---- requests


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [2] * 65}, "prompt"),
        ({"prompt": [2] * 64}, "prompt"),
        ({"prompt": [50]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 10**400}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"logprobs": 4}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logit_bias": ((50, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((5, 101.0),)}, "logit_bias"),
        ({"logit_bias": ((5, 1.0), (5, 2.0))}, "logit_bias"),
        ({"logit_bias": tuple((i % 50, 1.0) for i in range(301))}, "logit_bias"),
        ({"stop_token_ids": (50,)}, "stop_token_ids"),
        ({"stop_token_ids": tuple(range(17))}, "stop_token_ids"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x",) * 17}, "stop"),
        ({"stop": ("x" * 513,)}, "stop"),
    ],
)
def test_invalid_requests_name_the_field(change, param):
    with pytest.raises(InvalidRequest) as caught:
        request(**{"prompt": [2, 3], **change}).validate(LIMITS)
    assert caught.value.param == param and caught.value.message


def test_what_can_never_fit_the_pool_is_refused():
    limits = dataclasses.replace(LIMITS, num_pages=4)
    with pytest.raises(InvalidRequest, match="KV cache") as caught:
        request([2] * 10, max_tokens=8).validate(limits)
    assert caught.value.param == "max_tokens"
    with pytest.raises(InvalidRequest, match="KV cache") as caught:
        request([2] * 17, max_tokens=1).validate(limits)
    assert caught.value.param == "prompt"
    [seq] = Simulation(limits).finish(request([2] * 10, max_tokens=7, ignore_eos=True))
    assert_as_alone(seq, limits)


def test_length_is_limited_by_the_models():
    simulation = Simulation(LIMITS)
    [seq] = simulation.finish(request([2] * 60, max_tokens=100, ignore_eos=True))
    assert seq.num_outputs == 4 and seq.finish_reason == "length"
    [scored] = simulation.finish(request([2] * 64, max_tokens=0, prompt_logprobs=0))
    assert_as_alone(scored, LIMITS)


def test_seeds_without_a_request_seed_are_random():
    one, two = (Sequence.create(request([2], seed=None), LIMITS) for _ in range(2))
    assert one.seed != two.seed
    assert all(0 <= half < 2**32 for half in one.seed)


def test_limits_must_make_sense():
    with pytest.raises(ValueError, match="token_budget 3 is below max_num_seqs 4"):
        dataclasses.replace(LIMITS, token_budget=3)
    with pytest.raises(ValueError, match="page_size"):
        dataclasses.replace(LIMITS, page_size=0)
