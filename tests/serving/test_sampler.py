"""The sampler against plain numpy references that sort, and against the probabilities it should draw from."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.serving import state as st
from jaxserve.serving.request import Limits
from jaxserve.serving.sampler import sample
from tests.pallas_kernels.oracles import kept_tokens

VOCAB, SLOTS = 1000, 8  # most tests share one compiled program


def limits(vocab, slots):
    return Limits(slots, 64, 8, 16, vocab_size=vocab, token_budget=512, eos_ids=(2,), max_bias=4, max_stop_ids=3)


def make_state(vocab=VOCAB, slots=SLOTS, **fields: Any):
    """A state whose slots hold `fields`: one value for all of them, or a list with the first slots' values."""
    sizes = limits(vocab, slots)
    state = {name: np.array(array) for name, array in st.init_state(sizes).items()}
    options = st.neutral_rows(slots + 1, sizes)
    for name, value in fields.items():
        array = state[name] if name in state else options[name]
        rows = np.asarray(value, array.dtype)
        array[: len(rows) if rows.ndim == array.ndim else slots] = rows
    state["options"] = options.view(np.int32).reshape(slots + 1, -1)
    return {name: jnp.asarray(array) for name, array in state.items()}


@jax.jit
def run(logits, state, slots, positions, active):
    sizes = limits(state["counts"].shape[1], len(state["counts"]) - 1)
    return sample(logits, state, slots, positions, active, sizes)


def draw(logits, state, slots: Any = None, positions: Any = 10, active: Any = True, batch=SLOTS):
    """Samples of `logits`, in a batch that idle rows fill up to `batch`."""
    rows = len(logits)
    slots = np.arange(rows) if slots is None else slots

    def fill(values, value):
        values = np.broadcast_to(np.asarray(values), (rows, *np.shape(values)[1:]))
        return np.concatenate([values, np.full((batch - rows, *values.shape[1:]), value, values.dtype)])

    scratch = len(state["counts"]) - 1
    samples = run(
        fill(np.asarray(logits, np.float32), 0),
        state,
        fill(np.asarray(slots, np.int32), scratch),
        fill(np.asarray(positions, np.int32), 0),
        fill(np.asarray(active), False),
    )
    return type(samples)(*(np.asarray(array)[:rows] for array in samples))


def float32s(values):
    return jnp.asarray(values, jnp.float32)


def keys(count, seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, (count, 2), dtype=np.uint32)


def random_logits(seqs, vocab, seed=0, scale=3.0):
    return (np.random.default_rng(seed).standard_normal((seqs, vocab)) * scale).astype(np.float32)


@pytest.mark.parametrize(
    "option",
    [
        dict(temperature=0.7),
        dict(temperature=1.0, top_k=5),
        dict(temperature=1.5, top_p=0.8),
        dict(temperature=1.0, min_p=0.1),
    ],
)
def test_draws_follow_the_exact_probabilities(option):
    vocab, seqs, rounds = 40, 512, 16
    logits = random_logits(1, vocab, seed=3, scale=1.5)
    state = make_state(vocab, seqs, key=keys(seqs), **option)
    counts = np.zeros(vocab)
    for i in range(rounds):
        out = draw(np.repeat(logits, seqs, 0), state, positions=np.arange(seqs) % 7 + 100 * i, batch=seqs)
        counts += np.bincount(out.tokens, minlength=vocab)
    kept, _ = kept_tokens(
        logits[0], option["temperature"], option.get("top_k", 0), option.get("top_p", 1.0), option.get("min_p", 0.0)
    )
    probs = np.where(kept, np.exp(logits[0].astype(np.float64) / option["temperature"]), 0)
    expected = probs / probs.sum() * counts.sum()
    assert counts[~kept].sum() == 0
    likely = expected > 5
    chi_square = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    freedom = likely.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)  # about one in ten thousand, were the seeds not fixed
    assert freedom < 10 or chi_square > freedom / 4  # nor suspiciously regular


def test_a_row_does_not_depend_on_its_batch():
    slots = SLOTS
    logits = random_logits(slots, VOCAB, seed=1, scale=1.0)
    options: dict[str, Any] = dict(temperature=[0.8, 1, 1.2, 0, 1, 2, 0.5, 1], top_k=[0, 50, 0, 0, 7, 0, 0, 0])
    options |= dict(top_p=[0.9, 1, 1, 1, 0.5, 1, 0.99, 1], min_p=[0, 0, 0.01, 0, 0, 0, 0, 0])
    state = make_state(key=keys(slots), num_logprobs=3, **options)
    positions = np.arange(20, 20 + slots)
    together = draw(logits, state, positions=positions)
    order = np.random.default_rng(0).permutation(slots)
    shuffled = draw(logits[order], state, slots=order, positions=positions[order])
    np.testing.assert_array_equal(shuffled.tokens, together.tokens[order])
    for row in range(slots):
        alone = draw(logits[row : row + 1], state, slots=[row], positions=positions[row], batch=1)
        assert int(alone.tokens[0]) == int(together.tokens[row])
        assert float(alone.logprob[0]) == pytest.approx(float(together.logprob[row]), rel=1e-6)


def test_seed_and_position_decide_the_draw():
    logits = np.zeros((8, VOCAB), np.float32)
    same = make_state(key=np.repeat(keys(1), 8, 0), temperature=1)
    assert len(set(draw(logits, same).tokens.tolist())) == 1
    assert len(set(draw(logits, same, positions=np.arange(8)).tokens.tolist())) > 5
    assert len(set(draw(logits, make_state(key=keys(8), temperature=1)).tokens.tolist())) > 5


def test_penalties_follow_the_published_formulas():
    logits = random_logits(3, VOCAB, seed=2)
    rng = np.random.default_rng(4)
    counts = rng.integers(0, 3, (3, VOCAB)) * rng.integers(0, 2, (3, VOCAB))
    prompt = rng.random((3, VOCAB)) < 0.3
    repetition, presence, frequency = float32s([1.3, 0.8, 1]), float32s([0, 0.9, -1.5]), float32s([0.7, 0, 2])
    seen = (counts > 0) | prompt
    rule = np.where(logits < 0, logits * repetition[:, None], logits / repetition[:, None])
    expected = np.where(seen, rule, logits)
    expected = expected - frequency[:, None] * counts - presence[:, None] * (counts > 0)
    state = make_state(counts=counts, prompt_mask=prompt, repetition=repetition, presence=presence, frequency=frequency)
    np.testing.assert_array_equal(draw(logits, state).tokens, expected.argmax(1))
    # And the whole row, not only its maximum: bias every other token away and compare pairs.
    for a, b in rng.integers(0, VOCAB, (40, 2)):
        pair = np.full_like(logits, -1e9)
        pair[:, [a, b]] = logits[:, [a, b]]
        winner = np.where(expected[:, min(a, b)] >= expected[:, max(a, b)], min(a, b), max(a, b))
        np.testing.assert_array_equal(draw(pair, state).tokens, winner)


def test_penalties_of_one_row_leave_the_others_alone():
    logits = random_logits(2, VOCAB, seed=2)
    best = logits.argmax(1)
    counts = np.zeros((2, VOCAB), np.int32)
    counts[[0, 1], best] = 1
    state = make_state(counts=counts, presence=[2.0, 0.0])
    logits[0, best[0]] = np.sort(logits[0])[-2] + 1
    tokens = draw(logits, state).tokens
    assert tokens[0] != best[0] and tokens[1] == best[1]


def test_logit_bias_bans_and_forces():
    logits = random_logits(3, VOCAB, seed=6)
    best = logits.argmax(1)
    ids = np.full((3, 4), -1)
    ids[0, 0], ids[1, 1] = best[0], 7
    ids[1, 0] = best[1]
    values = np.zeros((3, 4))
    values[0, 0], values[1, 1] = -100, 100
    state = make_state(bias_ids=ids, bias_values=values)
    tokens = draw(logits, state).tokens.tolist()
    assert tokens == [np.argsort(logits[0])[-2], 7, best[2]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_hold_back_every_stop_id(temperature):
    logits = np.zeros((3, VOCAB), np.float32)
    logits[:, 2], logits[:, 9], logits[:, 5] = 90, 80, 40
    state = make_state(key=keys(8), stop_ids=[2, 9, -1, -1], min_length=[12, 11, 10], temperature=temperature)
    # The new token of position 11 is still within row 0's minimum only.
    assert draw(logits, state, positions=11).tokens.tolist() == [5, 2, 2]


def test_logprobs_are_those_of_the_raw_distribution():
    logits = random_logits(3, VOCAB, seed=7)
    state = make_state(
        key=keys(8), temperature=5.0, top_p=0.9, presence=1.0, num_logprobs=[20, 0, -1], bias_ids=[4, -1, -1, -1]
    )
    out = draw(logits, state)
    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    raw = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    np.testing.assert_allclose(out.logprob, raw[np.arange(3), out.tokens], rtol=1e-5)
    order = np.argsort(-logits, axis=1)[:, :20]
    np.testing.assert_array_equal(out.top_ids, order)
    np.testing.assert_allclose(out.top_logprobs, np.take_along_axis(raw, order, 1), rtol=1e-5)
    chosen_only = draw(logits[1:2], state, slots=[1])
    np.testing.assert_allclose(chosen_only.logprob[0], raw[1, chosen_only.tokens[0]], rtol=1e-5)
    assert not chosen_only.top_logprobs.any()
    assert not draw(logits[2:], state, slots=[2]).logprob.any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_vocabulary_is_never_chosen(temperature):
    padded = VOCAB + 24
    logits = np.zeros((8, padded), np.float32)
    logits[:, VOCAB:] = 100
    state = make_state(key=keys(8), temperature=temperature, num_logprobs=20)
    for position in range(8):
        out = draw(logits, state, positions=position)
        assert max(out.tokens.tolist()) < VOCAB
        assert int(out.top_ids.max()) < VOCAB
        np.testing.assert_allclose(out.logprob, -np.log(VOCAB), rtol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_flagged_and_harms_no_other(value):
    options: dict[str, Any] = dict(key=keys(8), temperature=[1, 1, 0], top_k=20, top_p=0.9, num_logprobs=5)
    state = make_state(**options)
    clean = random_logits(3, VOCAB, seed=8)
    expected = draw(clean, state)
    dirty = clean.copy()
    dirty[1, 17] = value
    out = draw(dirty, state)
    assert out.finite.tolist() == [True, False, True]
    assert 0 <= int(out.tokens[1]) < VOCAB
    for row in (0, 2):
        assert int(out.tokens[row]) == int(expected.tokens[row])
        assert float(out.logprob[row]) == float(expected.logprob[row])
        np.testing.assert_array_equal(out.top_ids[row], expected.top_ids[row])
    padding = np.pad(clean, ((0, 0), (0, 24)), constant_values=value)  # what stands in padding does not matter
    assert draw(padding, state).finite.all()


def test_inactive_rows_ask_for_nothing():
    logits = random_logits(2, VOCAB, seed=9)
    state = make_state(key=keys(8), temperature=100.0, presence=2.0, num_logprobs=5, bias_ids=[1, 2, 3, 4])
    state["counts"] = state["counts"].at[:, logits[1].argmax()].set(1)
    out = draw(logits, state, active=[False, False])
    np.testing.assert_array_equal(out.tokens, logits.argmax(1))
    assert not out.logprob.any()


def test_extreme_options():
    logits = random_logits(8, VOCAB, seed=10)
    best = logits.argmax(1)
    cold = make_state(
        key=keys(8),
        temperature=[1e-5, 1e-30, 1, 1, 1, 1e-5, 1, 1],
        top_p=[1, 1, 1e-9, 1, 1, 0.1, 1, 1],
        top_k=[0, 0, 0, 1, 2**31 - 1, 0, 0, 0],
        min_p=[0, 0, 0, 0, 1, 0, 1, 1],
    )
    np.testing.assert_array_equal(draw(logits, cold).tokens, best)
    np.testing.assert_array_equal(draw(logits * 1e30, cold).tokens, best)
    flat = np.full((8, VOCAB), -7.5, np.float32)
    assert draw(flat, make_state()).tokens.tolist() == [0] * 8
    assert draw(flat, make_state(temperature=1, top_k=1)).tokens.tolist() == [0] * 8
    tokens = draw(flat, make_state(key=keys(8), temperature=1, top_p=0.3, min_p=1.0)).tokens.tolist()
    assert len(set(tokens)) > 4 and max(tokens) < VOCAB


def _vocab_ops(jaxpr, vocab, names):
    """Names of primitives that touch a [., vocab] array outside every conditional."""
    found = []
    for eqn in jaxpr.eqns:
        wide = any(vocab in getattr(v.aval, "shape", ()) for v in [*eqn.invars, *eqn.outvars])
        if wide and eqn.primitive.name in names:
            found.append(eqn.primitive.name)
        if eqn.primitive.name in ("jit", "pjit"):
            found += _vocab_ops(eqn.params["jaxpr"], vocab, names)
    return found


def test_plain_greedy_steps_skip_the_costly_parts():
    """Random numbers, loops, top-k, exponentials and the gather of the penalty rows happen in conditionals only."""
    state = make_state()
    slots, active = np.arange(8, dtype=np.int32), np.ones(8, bool)
    closed = jax.make_jaxpr(functools.partial(sample, limits=limits(VOCAB, SLOTS)))(
        random_logits(8, VOCAB), state, slots, slots, active
    )
    costly = {"log", "random_fold_in", "threefry2x32", "while", "scan", "top_k", "exp", "gather", "scatter", "sort"}
    assert _vocab_ops(closed.jaxpr, VOCAB, costly) == []
    assert "cond" in _vocab_ops(closed.jaxpr, VOCAB, {"cond"}), "the walk itself must see outer equations"
    assert "top_k" in str(closed) and "gather" in str(closed)
