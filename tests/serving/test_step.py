"""The step function with a model whose logits give away any wrong token, position, slot or page."""

import types

import jax
import numpy as np
import pytest

from jaxserve.serving import state as st
from jaxserve.serving.request import Limits
from jaxserve.serving.step import (
    COPY_PAGES,
    FORWARD_ARGS,
    Bucket,
    copy_pages,
    copy_specs,
    default_buckets,
    expand_inputs,
    forward_specs,
    input_specs,
    step_function,
    unpack_rows,
    unpack_top,
)
from tests.serving import toy_model as toy

SCRATCH = toy.LIMITS.max_num_seqs


def inputs_for(bucket, rows, limits=toy.LIMITS):
    """rows: (slot, token ids or -1 each, samples, pages)."""
    inputs = {name: np.zeros(spec.shape, spec.dtype) for name, spec in input_specs(bucket, limits).items()}
    inputs["slots"][:] = limits.max_num_seqs
    at = 0
    for i, (slot, tokens, sample, pages) in enumerate(rows):
        inputs["tokens"][at : at + len(tokens)] = tokens
        at += len(tokens)
        inputs["slots"][i], inputs["query_counts"][i] = slot, len(tokens)
        inputs["block_tables"][i, : len(pages)] = pages
        if bucket.kind == "step":
            inputs["samples"][i] = sample
    return inputs


def state_with(lengths, last=(), limits=toy.LIMITS):
    state = st.init_state(limits)
    for slot, length in dict(lengths).items():
        state["length"] = state["length"].at[slot].set(length)
    for slot, token in dict(last).items():
        state["last_token"] = state["last_token"].at[slot].set(token)
    return state


def test_positions_slots_and_rows_of_a_mixed_step():
    bucket = Bucket("step", 8, 4)
    state = state_with({2: 5, 0: 0, 3: 7}, last={3: 77, 2: 66})
    rows = [(2, [9, 8, 7], False, [30, 31]), (3, [-1], True, [20, 21]), (0, [4, 5], True, [10])]
    args = jax.jit(lambda i, s: expand_inputs(i, s, bucket, toy.LIMITS))(inputs_for(bucket, rows), state)
    expected = {
        "tokens": [9, 8, 7, 77, 4, 5, 0, 0],
        "positions": [5, 6, 7, 7, 0, 1, 0, 0],
        "segments": [0, 0, 0, 1, 2, 2, 4, 4],
        "kv_slots": [31 * 4 + 1, 31 * 4 + 2, 31 * 4 + 3, 21 * 4 + 3, 40, 41, -1, -1],
        "logit_rows": [3, 5, 0, 0],
        "query_starts": [0, 3, 4, 6, 6],
        "context_lens": [8, 8, 2, 0],
    }
    for name, value in expected.items():
        assert args[name].tolist() == value, name
    assert set(args) == set(FORWARD_ARGS)
    specs = forward_specs(bucket, toy.LIMITS)
    assert {name: (a.shape, a.dtype) for name, a in args.items()} == {n: (s.shape, s.dtype) for n, s in specs.items()}


def test_positions_past_the_block_table_write_nothing():
    bucket = Bucket("step", 2, 1)
    end = toy.LIMITS.pages_per_seq * toy.LIMITS.page_size
    inputs = inputs_for(bucket, [(0, [1, 2], True, range(16))])
    args = jax.jit(lambda i, s: expand_inputs(i, s, bucket, toy.LIMITS))(inputs, state_with({0: end - 1}))
    assert args["kv_slots"].tolist() == [16 * 4 - 1, -1]


@pytest.fixture(scope="module")
def mixed():
    return toy.compile_step(Bucket("step", 8, 4))


def run(program, caches, state, inputs, offset=0.0):
    """The step's outputs by name."""
    packed = np.concatenate([array.ravel() for array in inputs.values()])
    caches, state, outputs = program({"offset": np.float32(offset)}, caches, state, packed)
    assert outputs.keys() == {"rows", "top"}
    tokens, logprob, finite, _ = unpack_rows(np.asarray(outputs["rows"]))
    ids, logprobs = unpack_top(np.asarray(outputs["top"]))
    return (
        caches,
        state,
        types.SimpleNamespace(tokens=tokens, logprob=logprob, finite=finite, top_ids=ids, top_logprobs=logprobs),
    )


def test_chunked_prefill_beside_decode_gives_the_tokens_of_the_whole(mixed):
    bucket = Bucket("step", 8, 4)
    prompts = {1: [3, 1, 4, 1, 5, 9, 2], 2: [8, 8]}
    pages = {1: [7, 3, 30], 2: [11, 5, 6]}
    caches, state = toy.new_caches(), st.init_state(toy.LIMITS)
    steps = [  # slot 2 decodes from the device's state alone while slot 1's prompt comes in three chunks
        [(2, [8, 8], True), (1, [3, 1, 4], False)],
        [(1, [1, 5], False), (2, [-1], True)],
        [(2, [-1], True), (1, [9, 2], True)],
        [(1, [-1], True), (2, [-1], True)],
    ]
    made = {1: [], 2: []}
    for rows in steps:
        inputs = inputs_for(bucket, [(*row, pages[row[0]]) for row in rows])
        caches, state, out = run(mixed, caches, state, inputs)
        for i, slot in enumerate(slot for slot, _, sample in rows if sample):
            made[slot].append(int(out.tokens[i]))
        assert out.finite.tolist()[: len(rows)] == [True] * len(rows)
    assert made == {1: toy.generate(prompts[1], 2), 2: toy.generate(prompts[2], 4)}
    assert state["length"].tolist() == [0, 8, 5, 0, 0, 0]
    assert state["last_token"].tolist()[1:3] == [made[1][-1], made[2][-1]]
    for slot in (1, 2):
        assert np.array(state["counts"])[slot].tolist() == np.bincount(made[slot], minlength=toy.VOCAB).tolist()


def test_padding_rows_change_nothing(mixed):
    bucket = Bucket("step", 8, 4)
    caches, state = toy.new_caches(), state_with({slot: 9 for slot in range(5)}, last={SCRATCH: 0})
    before = {name: np.array(array) for name, array in (caches | state).items()}
    caches, state, out = run(mixed, caches, state, inputs_for(bucket, []))
    for name, array in (caches | state).items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    assert out.finite.tolist() == [True] * 4


def test_rows_that_do_not_sample_keep_their_last_token_and_counts(mixed):
    state = state_with({0: 0}, last={0: 42})
    _, state, _ = run(mixed, toy.new_caches(), state, inputs_for(Bucket("step", 8, 4), [(0, [1, 2], False, [0])]))
    assert state["last_token"].tolist()[0] == 42 and state["length"].tolist()[0] == 2
    assert not state["counts"].any()


def test_poisoned_logits_are_flagged_and_the_token_stays_in_range(mixed):
    inputs = inputs_for(Bucket("step", 8, 4), [(0, [1, 2], True, [0])])
    _, state, out = run(mixed, toy.new_caches(), st.init_state(toy.LIMITS), inputs, np.nan)
    assert not out.finite[0] and 0 <= int(out.tokens[0]) < toy.VOCAB
    assert int(state["counts"].sum()) == 1


def test_decode_bucket_takes_one_token_a_row():
    bucket = Bucket("step", 2, 2)
    program = toy.compile_step(bucket)
    caches, state = toy.new_caches(), state_with({4: 0, 1: 0})
    tokens = {4: [6], 1: [9]}
    for given in ([6], [9]), ([-1], [-1]), ([-1], [-1]):
        inputs = inputs_for(bucket, [(4, given[0], True, [1]), (1, given[1], True, [2])])
        caches, state, out = run(program, caches, state, inputs)
        tokens[4].append(int(out.tokens[0]))
        tokens[1].append(int(out.tokens[1]))
    assert tokens == {4: [6, *toy.generate([6], 3)], 1: [9, *toy.generate([9], 3)]}


def test_score_bucket_gives_the_logprobs_of_targets():
    bucket = Bucket("score", 8, 1)
    program = toy.compile_step(bucket)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35]
    prompt.append(toy.checksum(prompt))
    caches, state = toy.new_caches(), st.init_state(toy.LIMITS)
    logprobs, best = [], []
    for start, count in ((0, 7), (7, 3)):
        inputs = inputs_for(bucket, [(2, prompt[start : start + count], False, [9, 1, 17])])
        inputs["targets"][:count] = prompt[start + 1 : start + 1 + count]
        caches, state, out = run(program, caches, state, inputs)
        logprobs += out.logprob.tolist()[:count]
        best += out.top_ids[:count, :2].tolist()
        assert out.finite.all() and out.top_logprobs.shape == (8, 20)
        np.testing.assert_allclose(out.top_logprobs[:count, 0], 10 - toy.LOG_TOTAL, atol=1e-6)
    expected = [toy.logprob_of(prompt[i + 1], prompt[: i + 1]) for i in range(10)]
    np.testing.assert_allclose(logprobs, expected, rtol=1e-6, atol=1e-6)
    assert expected[-1] > -1 > expected[0]
    assert best == [[c, (c + 1) % toy.VOCAB] for c in (toy.checksum(prompt[: i + 1]) for i in range(10))]
    assert state["length"].tolist()[2] == 10 and not state["counts"].any()


def test_copied_pages_equal_their_source_and_others_stay():
    """In every array of a cache, whatever its axes and dtype."""
    program = jax.jit(copy_pages, donate_argnums=0)
    pages = np.arange(3 * 40 * 4, dtype=np.int32).reshape(3, 40, 4)
    arrays = {"k": pages, "v": -pages, "codes": pages[..., None].astype(np.uint8), "scale": pages.astype(np.float16)}
    sources, destinations = np.zeros(COPY_PAGES, np.int32), np.full(COPY_PAGES, -1, np.int32)
    sources[:2], destinations[:2] = [3, 39], [10, 0]
    caches = program({name: jax.device_put(array) for name, array in arrays.items()}, sources, destinations)
    for name, array in arrays.items():
        expected = array.copy()
        expected[:, 10], expected[:, 0] = array[:, 3], array[:, 39]
        np.testing.assert_array_equal(caches[name], expected)
        assert caches[name].dtype == array.dtype


def _bytes(specs):
    return sum(int(np.prod(spec.shape)) * spec.dtype.itemsize for spec in specs.values())


def test_the_step_updates_caches_and_state_in_place():
    """Temporaries neither hold a copy of the state nor grow with its slots or with the pool."""
    bucket, temporaries = Bucket("step", 8, 4), []
    for slots, pages in ((8, 40), (256, 40), (8, 4000)):
        limits = Limits(slots, 64, 4, pages, vocab_size=toy.VOCAB, token_budget=512)
        step = step_function(toy.toy_forward, bucket, limits)
        memory = toy.memory_of(step, *toy.step_specs(bucket, limits), donate=(1, 2))
        assert memory.alias_size_in_bytes >= _bytes(st.state_specs(limits)) + _bytes(toy.cache_specs(limits))
        temporaries.append(memory.temp_size_in_bytes)
    one_row_set = 4 * toy.VOCAB * 4
    assert max(temporaries) - min(temporaries) < one_row_set


def test_page_copies_happen_in_place():
    small, large = (
        toy.memory_of(copy_pages, toy.cache_specs(Limits(8, 64, 4, pages, toy.VOCAB, 512)), *copy_specs())
        for pages in (100, 10000)
    )
    assert large.temp_size_in_bytes == small.temp_size_in_bytes
    assert large.alias_size_in_bytes == 2 * 10000 * 4 * 4


SIZES = [(1, 1), (1, 512), (4, 4), (5, 40), (32, 512), (64, 512), (256, 512), (300, 301)]


@pytest.mark.parametrize("most, budget", SIZES)
def test_some_bucket_fits_every_plan(most, budget):
    limits = Limits(most, 2048, 16, 100, toy.VOCAB, budget)
    buckets = default_buckets(limits)
    assert len(set(buckets)) == len(buckets) and buckets[-1] == Bucket("score", 128, 1)
    for seqs in {1, 2, most // 2, most - 1, most} - {0}:
        for tokens in {seqs, seqs + 1, budget // 2, budget}:
            if seqs <= min(tokens, most) and tokens <= budget:
                for samples in (0, seqs, min(tokens, limits.row_sizes[-1])):
                    assert any(b.fits("step", tokens, seqs, samples) for b in buckets), (seqs, tokens, samples)
    assert max(b.tokens for b in buckets if b.kind == "step") == budget


def test_default_buckets_of_the_default_limits():
    steps = [(b.tokens, b.seqs) for b in default_buckets(Limits(32, 2048, 16, 100, 49152, 512)) if b.kind == "step"]
    assert steps == [
        *((1, 1), (2, 2), (4, 4), (8, 8), (16, 16)),
        *((32, 8), (32, 32), (64, 16), (128, 32), (256, 32), (512, 32)),
    ]


def test_buckets_refuse_more_than_their_sizes():
    assert Bucket("step", 4, 4).fits("step", 4, 1, 4)
    assert not Bucket("step", 4, 4).fits("step", 5, 1, 1)
    assert not Bucket("step", 32, 4).fits("step", 5, 1, 5)
    assert not Bucket("step", 32, 4).fits("step", 5, 5, 1)
    assert not Bucket("step", 8, 4).fits("score", 3, 1, 0)
    assert Bucket("score", 8, 1).fits("score", 3, 1, 0)


def test_forward_sees_only_named_arguments():
    seen = {}

    def forward(params, caches, args):
        seen.update({name: (arg.shape, arg.dtype) for name, arg in args.items()})
        return toy.toy_forward(params, caches, args)

    bucket = Bucket("score", 8, 1)
    jax.eval_shape(step_function(forward, bucket, toy.LIMITS), *toy.step_specs(bucket))
    assert seen == {n: (s.shape, s.dtype) for n, s in forward_specs(bucket, toy.LIMITS).items()}
