"""The per-slot device state: loading sequences, in place, without touching other slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.serving import state as st
from jaxserve.serving.request import GenerationRequest, Limits, SamplingParams, Sequence
from tests.serving.toy_model import memory_of

LIMITS = Limits(
    max_num_seqs=4,
    max_model_len=64,
    page_size=8,
    num_pages=16,
    vocab_size=50,
    token_budget=16,
    eos_ids=(2, 3),
    max_bias=6,
)


def make_sequence(slot=1, prompt=(5, 6, 5), outputs=(), admitted=0, limits=LIMITS, **params):
    request = GenerationRequest("r", tuple(prompt), SamplingParams(max_tokens=params.pop("max_tokens", 9), **params))
    seq = Sequence.create(request, limits)
    seq.tokens += outputs
    seq.slot, seq.num_admitted = slot, admitted
    return seq


def admit(state, seqs, limits=LIMITS):
    slots = np.full(st.ADMIT_ROWS, limits.max_num_seqs, np.int32)
    rows = st.neutral_rows(st.ADMIT_ROWS, limits).view(np.int32).reshape(st.ADMIT_ROWS, -1)
    for i, seq in enumerate(seqs):
        slots[i], rows[i] = seq.slot, st.pack_row(seq, limits)
    return jax.jit(st.admit, donate_argnums=0)(state, slots, rows)


def fields_of(state, limits=LIMITS):
    """Every field of every slot, by name."""
    slots = jnp.arange(limits.max_num_seqs + 1)
    fields = {name: state[name] for name in ("last_token", "length")} | st.select_options(state, slots, limits)
    return {name: np.array(array) for name, array in fields.items()}


def test_initial_state_has_the_shapes_that_the_specs_say():
    state, specs = st.init_state(LIMITS), st.state_specs(LIMITS)
    assert {name: (array.shape, array.dtype) for name, array in state.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in specs.items()
    }
    assert state["counts"].shape == (5, 50)
    assert fields_of(state)["stop_ids"].shape == (5, 2 + LIMITS.max_stop_ids)


def test_admit_loads_every_field_and_leaves_other_slots_alone():
    full = make_sequence(
        slot=1,
        outputs=[9],
        admitted=2,
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        min_p=0.125,
        seed=11,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        logit_bias=((4, -100.0), (8, 3.5)),
        logprobs=5,
        min_tokens=3,
        stop_token_ids=(30, 20),
    )
    before = fields_of(st.init_state(LIMITS))
    after = fields_of(admit(st.init_state(LIMITS), [full]))
    expected = {
        "last_token": 9,
        "length": 2,
        "key": full.seed,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "min_p": 0.125,
        "presence": 1.5,
        "frequency": -0.5,
        "repetition": 1.25,
        "min_length": 3 + 3,
        "num_logprobs": 5,
        "bias_ids": [4, 8, -1, -1, -1, -1],
        "bias_values": [-100, 3.5, 0, 0, 0, 0],
        "stop_ids": [2, 3, 20, 30] + [-1] * (LIMITS.max_stop_ids - 2),
    }
    assert set(expected) == set(before)
    for name, value in expected.items():
        np.testing.assert_array_equal(after[name][1], np.asarray(value, after[name].dtype), err_msg=name)
        np.testing.assert_array_equal(np.delete(after[name], 1, 0), np.delete(before[name], 1, 0), err_msg=name)


def test_a_new_sequence_in_a_slot_inherits_nothing():
    state = admit(
        st.init_state(LIMITS), [make_sequence(temperature=0.5, logit_bias=((4, 1.0),), min_tokens=1, logprobs=1)]
    )
    plain = make_sequence(temperature=0.0)
    reused = fields_of(admit(state, [plain]))
    fresh = fields_of(admit(st.init_state(LIMITS), [plain]))
    for name in fresh:
        if name != "key":  # drawn at random
            np.testing.assert_array_equal(reused[name], fresh[name], err_msg=name)


def test_ids_that_do_not_end_the_request_may_be_generated_at_once():
    state = admit(st.init_state(LIMITS), [make_sequence(slot=0, min_tokens=2, ignore_eos=True, stop_token_ids=(9,))])
    assert sorted(set(fields_of(state)["stop_ids"][0].tolist())) == [-1, 9]


def test_largest_seeds_survive_packing():
    seq = make_sequence()
    seq.seed = (2**32 - 1, 2**31)
    assert fields_of(admit(st.init_state(LIMITS), [seq]))["key"][1].tolist() == [2**32 - 1, 2**31]


def test_penalty_rows_count_outputs_and_mark_the_prompt():
    seq = make_sequence(prompt=(5, 6, 5), outputs=[7, 7, 49], presence_penalty=1.0)
    counts, mask = st.penalty_rows(seq, LIMITS)
    assert counts.dtype == np.int32 and len(counts) == len(mask) == 50
    assert {i: n for i, n in enumerate(counts.tolist()) if n} == {7: 2, 49: 1}
    assert np.flatnonzero(mask).tolist() == [5, 6]
    state = jax.jit(st.load_penalties, donate_argnums=0)(st.init_state(LIMITS), np.int32(3), counts, mask)
    np.testing.assert_array_equal(state["counts"][3], counts)
    np.testing.assert_array_equal(state["prompt_mask"][3], mask)
    assert int(state["counts"].sum()) == 3 and int(state["prompt_mask"].sum()) == 2


@pytest.mark.parametrize("program", ["admit", "load_penalties"])
def test_programs_update_the_state_in_place(program):
    limits = Limits(64, 64, 8, 16, vocab_size=4096, token_budget=64)
    function = st.admit if program == "admit" else st.load_penalties
    specs = st.admit_specs(limits) if program == "admit" else st.load_penalties_specs(limits)
    state = st.state_specs(limits)
    memory = memory_of(function, state, *specs)
    size = sum(np.prod(spec.shape) * spec.dtype.itemsize for spec in state.values())
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < 2 * limits.vocab_size * 4 + 64 * 1024
