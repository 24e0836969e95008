"""The runner: plans in, results out, with steps dispatched ahead of their results."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.serving.blocks import BlockPool
from jaxserve.serving.rehearsal import step_seconds
from jaxserve.serving.request import GenerationRequest, SamplingParams, Sequence
from jaxserve.serving.runner import CompileCounter
from jaxserve.serving.scheduler import Scheduler
from jaxserve.serving.step import Bucket, default_buckets
from tests.serving import toy_model as toy
from tests.serving.toy_model import step


@pytest.fixture(scope="module")
def compiled():
    return toy.compile_all()


@pytest.fixture
def runner(compiled):
    runner = toy.make_runner(*compiled)
    runner.warmup()
    yield runner
    runner.close()


def test_warmup_leaves_no_trace(compiled):
    runner = toy.make_runner(*compiled)
    before = {name: np.array(array) for name, array in (runner.caches | runner.state).items()}
    runner.warmup()
    for name, array in (runner.caches | runner.state).items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    runner.close()


def test_a_rehearsal_changes_nothing_and_compiles_nothing(compiled):
    """The answer in the slot and the pages that it used, with penalties; the scratch row stays neutral."""
    found = []
    for rehearsed in (False, True):
        runner = toy.make_runner(*compiled)
        runner.warmup()
        if rehearsed:
            scratch = {name: np.array(array)[-1] for name, array in runner.state.items()}
            assert runner.ready and list(step_seconds(runner, toy.LIMITS)) == [1, 2, 4, 8, 16]
            for name, array in runner.state.items():
                np.testing.assert_array_equal(np.array(array)[-1], scratch[name], err_msg=name)
        seq = toy.make_sequence("a", [3, 1, 4, 1, 5], 0, [0, 1, 2], presence_penalty=1.0, frequency_penalty=0.5)
        runner.admit(seq)
        rows = [toy.make_row(seq, 0, 5), *(toy.make_row(seq, 5 + i, 1, from_state=True) for i in range(6))]
        results = [runner.dispatch(step(row)).result() for row in rows]
        found.append([(result.tokens, result.logprob) for result in results])
        assert runner.compilations == 0
        runner.close()
    assert found[0] == found[1]


def test_a_runner_is_ready_when_every_program_is_loaded(compiled):
    runner, missing = toy.make_runner(*compiled), {max(compiled[0])}
    runner._is_loaded = lambda bucket: bucket not in missing
    assert not runner.ready
    missing.clear()
    assert runner.ready
    runner.close()


def test_prefill_and_decode_dispatched_ahead_of_their_results(runner):
    one = toy.make_sequence("a", [3, 1, 4, 1, 5, 9], 4, [8, 2])
    two = toy.make_sequence("b", [7, 7, 7], 0, [30])
    runner.admit(one)
    runner.admit(two)
    pending = [runner.dispatch(step(toy.make_row(one, 0, 4, samples=0), toy.make_row(two, 0, 3)))]
    pending.append(
        runner.dispatch(
            step(toy.make_row(two, 3, 1, from_state=True, pages_from=1), toy.make_row(one, 4, 2, pages_from=2))
        )
    )
    two.blocks.append(11)
    one.blocks.append(5)
    for i in range(2):
        rows = (
            toy.make_row(one, 6 + i, 1, from_state=True, pages_from=2 + i),
            toy.make_row(two, 4 + i, 1, from_state=True, pages_from=1 + i),
        )
        pending.append(runner.dispatch(step(*rows)))
    results = [p.result() for p in pending]
    assert [r.tokens[0] for r in results[2:]] == toy.generate([3, 1, 4, 1, 5, 9], 3)[1:]
    assert results[1].tokens[1] == toy.checksum([3, 1, 4, 1, 5, 9])
    made = [results[0].tokens[0], results[1].tokens[0], results[2].tokens[1], results[3].tokens[1]]
    assert made == toy.generate([7, 7, 7], 4)
    assert all(type(r.tokens[0]) is int and all(r.finite) and r.top is None for r in results)
    assert [len(r.finite) for r in results] == [1, 2, 2, 2]


def test_a_slot_taken_over_sees_only_its_new_sequence(runner):
    old = toy.make_sequence("a", [5] * 9, 1, [1, 2, 3])
    runner.admit(old)
    runner.dispatch(step(toy.make_row(old, 0, 9)))
    new = toy.make_sequence("b", [6, 5], 1, [9])
    runner.admit(new)
    assert runner.dispatch(step(toy.make_row(new, 0, 2))).result().tokens == toy.generate([6, 5], 1)


def test_more_admissions_than_fit_one_call(compiled):
    limits = toy.Limits(20, 64, 4, 40, toy.VOCAB, 40)
    bucket = Bucket("step", 20, 20)
    runner = toy.make_runner({bucket: toy.compile_step(bucket, limits)}, toy.compile_others(limits), limits)
    seqs = [toy.make_sequence(str(i), [i], i, [2 * i], limits) for i in range(20)]
    for seq in seqs:
        runner.admit(seq)
    result = runner.dispatch(step(*(toy.make_row(seq, 0, 1) for seq in seqs))).result()
    assert result.tokens == [toy.checksum([i]) for i in range(20)]
    runner.close()


def test_page_copies_take_effect_before_the_next_step(runner):
    source = toy.make_sequence("a", [4, 2, 9, 1, 7, 3], 0, [3, 7])
    runner.admit(source)
    runner.dispatch(step(toy.make_row(source, 0, 6)))
    copies = [(3, 20), (7, 21), *((0, page) for page in range(22, 32))]  # more than one call's worth
    runner.copy_pages(copies)
    fork = toy.make_sequence("b", [4, 2, 9, 1, 7, 8], 2, [20, 21])
    fork.num_admitted = 5
    runner.admit(fork)
    assert runner.dispatch(step(toy.make_row(fork, 5, 1))).result().tokens == toy.generate(fork.tokens, 1)
    more = runner.dispatch(step(toy.make_row(source, 6, 1, from_state=True, pages_from=2))).result()
    assert more.tokens == toy.generate([4, 2, 9, 1, 7, 3], 2)[1:], "the source must not have changed"


def test_logprobs_are_cut_to_what_each_row_asked_for(runner):
    prompt = [3, 1, 4]
    rows = []
    for slot, logprobs in enumerate((None, 2, 0, 3)):
        seq = toy.make_sequence(str(slot), prompt, slot, [slot], logprobs=logprobs)
        runner.admit(seq)
        rows.append(toy.make_row(seq, 0, 3, samples=slot != 3))
    result = runner.dispatch(step(*rows)).result()
    best = toy.checksum(prompt)
    assert result.top is not None and [len(top) for top in result.top] == [0, 2, 0]
    assert [token for token, _ in result.top[1]] == [best, (best + 1) % toy.VOCAB]
    np.testing.assert_allclose([p for _, p in result.top[1]], np.array([10, 5]) - toy.LOG_TOTAL, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(result.logprob[1:3], 10 - toy.LOG_TOTAL, atol=1e-6)


def test_score_plans_return_one_entry_a_target(runner):
    prompt = [3, 1, 4, 1, 5, 9, 2]
    seq = toy.make_sequence("a", prompt, 3, [5, 6], prompt_logprobs=2)
    runner.admit(seq)
    result = runner.dispatch(step(toy.make_row(seq, 0, 6, samples=0), kind="score")).result()
    assert result.tokens == prompt[1:] and result.finite == [True] * 6
    expected = [toy.logprob_of(prompt[i + 1], prompt[: i + 1]) for i in range(6)]
    np.testing.assert_allclose(result.logprob, expected, rtol=1e-6)
    assert [[token for token, _ in top] for top in result.top] == [
        [c, (c + 1) % toy.VOCAB] for c in (toy.checksum(prompt[: i + 1]) for i in range(6))
    ]
    after = runner.dispatch(step(toy.make_row(seq, 6, 1, pages_from=2))).result()
    assert after.tokens == toy.generate(prompt, 1)


def test_penalties_are_loaded_with_the_sequence_and_counted_on(runner):
    prompt = [3, 1, 4]
    seq = toy.make_sequence("a", prompt, 2, [5, 6], presence_penalty=2.0, frequency_penalty=1.5, max_tokens=30)
    best = toy.checksum(prompt)
    seq.tokens += [best, best]  # as after a preemption: already generated twice, so 10 - 2 - 3 = 5
    seq.num_admitted = 0
    runner.admit(seq)
    context = [*prompt, best, best]
    wanted = toy.checksum(context)
    result = runner.dispatch(step(toy.make_row(seq, 0, 5))).result()
    assert result.tokens == [wanted]
    counts = np.array(runner.state["counts"])[2]
    assert counts[best] == 2 + (wanted == best) and counts.sum() == 3
    np.testing.assert_array_equal(np.flatnonzero(runner.state["prompt_mask"][2]), sorted(set(prompt)))


def test_poison_is_reported_for_its_row_only(compiled):
    def forward(params, caches, args):
        caches, outputs = toy.toy_forward(params, caches, args)
        logits = outputs["logits"]
        return caches, {"logits": jnp.where(jnp.arange(len(logits))[:, None] == 1, jnp.nan, logits)}

    bucket = Bucket("step", 8, 4)
    runner = toy.make_runner({bucket: toy.compile_step(bucket, forward=forward)}, compiled[1])
    seqs = [toy.make_sequence(str(i), [i, 7], i, [i]) for i in range(3)]
    for seq in seqs:
        runner.admit(seq)
    result = runner.dispatch(step(*(toy.make_row(seq, 0, 2) for seq in seqs))).result()
    assert result.finite == [True, False, True]
    assert [result.tokens[i] for i in (0, 2)] == [toy.checksum([i, 7]) for i in (0, 2)]
    runner.close()


def test_the_smallest_bucket_that_fits_is_taken(runner):
    seqs = [toy.make_sequence(str(i), [1] * 20, i, range(5)) for i in range(5)]

    def bucket(*counts):
        return runner.bucket_of(step(*(toy.make_row(seqs[i], 0, n) for i, n in enumerate(counts))))

    assert [(b.tokens, b.seqs) for b in default_buckets(toy.LIMITS)] == [
        *((1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (32, 8), (40, 16), (8, 1))
    ]
    assert bucket(1) == Bucket("step", 1, 1)
    assert bucket(1, 1, 1) == Bucket("step", 4, 4)
    assert bucket(1, 1, 1, 1, 1) == Bucket("step", 8, 8)
    assert bucket(2) == Bucket("step", 2, 2)
    assert bucket(17) == Bucket("step", 32, 8)
    assert bucket(20, 13) == Bucket("step", 40, 16)
    assert runner.bucket_of(step(toy.make_row(seqs[0], 0, 20, samples=9))) == Bucket("step", 40, 16)
    with pytest.raises(ValueError, match=r"no bucket fits a step plan of 41 tokens in 3 rows that chooses 3;.*40x16"):
        bucket(20, 20, 1)


def test_a_loaded_bucket_goes_before_a_smaller_one_that_is_not(compiled):
    loaded: set[Bucket] = set()
    runner = toy.make_runner(*compiled, is_loaded=loaded.__contains__)
    plan = step(toy.make_row(toy.make_sequence("a", [1] * 20, 0, range(5)), 0, 1))
    assert runner.bucket_of(plan) == Bucket("step", 1, 1)  # none is: the smallest is worth waiting for
    loaded.add(Bucket("step", 32, 8))
    assert runner.bucket_of(plan) == Bucket("step", 32, 8)
    loaded.add(Bucket("step", 4, 4))
    assert runner.bucket_of(plan) == Bucket("step", 4, 4)
    runner.close()


def slow_forward(params, caches, args):
    """The toy model, which looks at its arguments only after some 20 ms of work."""
    caches, zero = _work(caches)
    return toy.toy_forward(params, caches, {name: array + zero for name, array in args.items()})


def _work(caches):
    start = jnp.full((700, 700), 1e-3) + (caches["k"][0, 0, 0] * 0).astype(jnp.float32)
    product = jax.lax.fori_loop(0, 12, lambda _, x: jnp.tanh(x @ x) * 1e-3, start)
    zero = (product[0, 0] * 0).astype(jnp.int32)
    return {name: array + zero for name, array in caches.items()}, zero


def test_dispatch_returns_while_the_step_runs_and_never_touches_its_inputs(compiled):
    """Many steps in flight, each prepared while its predecessors have not read their own inputs yet."""
    bucket = Bucket("step", 4, 4)
    runner = toy.make_runner({bucket: toy.compile_step(bucket, forward=slow_forward)}, compiled[1])
    runner.warmup()
    prompts = [[i, 9, 2 * i] for i in range(4)]
    seqs = [toy.make_sequence(str(i), prompts[i], i, [i]) for i in range(4)]
    for seq in seqs:
        runner.admit(seq)
    pending = []
    for position in range(
        8
    ):  # different tokens, rows, slots and tables each time, from the same buffers if any were shared
        for seq in seqs:
            if position == 4:
                seq.blocks.append(10 + seq.slot)
        order = seqs if position % 2 else seqs[::-1]
        rows = [
            toy.make_row(seq, position, 1, from_state=position >= 3, samples=position >= 2, pages_from=position // 4)
            for seq in order
        ]
        pending.append(runner.dispatch(step(*rows)))
    unfinished = sum(not each._outputs["rows"].is_ready() for each in pending)
    results = [p.result() for p in pending]
    for i, seq in enumerate(seqs):
        made = [result.tokens[i if position % 2 else 3 - i] for position, result in enumerate(results) if position >= 2]
        assert made == toy.generate(prompts[i], 6), seq.id
    assert unfinished, "dispatch waited for its step"
    runner.close()


def test_no_compilation_after_warmup(runner):
    seqs = [
        toy.make_sequence(str(i), [i, 1, 2], i, [i, 10 + i], temperature=1.0, presence_penalty=1.0) for i in range(5)
    ]
    for count in (1, 3, 5):
        for seq in seqs[:count]:
            runner.admit(seq)
        runner.copy_pages([(0, 39)])
        runner.dispatch(step(*(toy.make_row(seq, 0, 3) for seq in seqs[:count]))).result()
        rows = [toy.make_row(seq, 3, 1, from_state=True, pages_from=2) for seq in seqs[:count]]
        runner.dispatch(step(*rows)).result()
    assert runner.compilations == 0 and runner.h2d_arrays > 0
    jax.jit(lambda x: x * 3 + 1)(np.arange(7))
    assert runner.compilations == 1, "the counter must see a compilation"


def test_a_closed_counter_counts_no_more():
    counter = CompileCounter()
    counter.close()
    jax.jit(lambda x: x * 5 - 1)(np.arange(7))
    assert counter.count == 0


def test_random_load_through_the_scheduler_gives_what_each_sequence_gives_alone(runner):
    """Chunked prefill, shared prefixes, page copies, preemption and slots taken over, one step ahead of the results."""
    rng = np.random.default_rng(0)
    limits = dataclasses.replace(toy.LIMITS, num_pages=24)  # fewer than the pool has, so that some are preempted
    scheduler = Scheduler(limits, BlockPool(limits.num_pages, limits.page_size))
    stem = rng.integers(0, toy.VOCAB, 12).tolist()
    seqs = []
    for i in range(30):
        prompt = tuple(stem[: rng.integers(0, 13)] + rng.integers(0, toy.VOCAB, rng.integers(1, 20)).tolist())
        params = SamplingParams(max_tokens=int(rng.integers(1, 25)), temperature=0.0)
        seqs.append(Sequence.create(GenerationRequest(str(i), prompt, params), limits))
        scheduler.add(seqs[-1])
    waiting = collections.deque()
    while (plan := scheduler.schedule()) or waiting:
        if plan:
            for seq in plan.admits:
                runner.admit(seq)
            runner.copy_pages(plan.copies)
            waiting.append((plan, runner.dispatch(plan)))
        if len(waiting) > 1 or not plan:
            done, pending = waiting.popleft()
            scheduler.confirm(done, pending.result())
            scheduler.check_integrity()
    for seq in seqs:
        assert seq.output_ids == toy.generate(seq.prompt_ids, seq.params.max_tokens), seq.id
    assert scheduler.num_preemptions > 0 and scheduler.pool.hit_tokens > 0
    assert runner.compilations == 0
