"""How many proposals are checked, and what prompt lookup proposes."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import UserError
from jaxserve.serving.ngram import NgramProposer
from jaxserve.serving.ngram_table import NGRAMS, Next, NgramTable
from jaxserve.serving.request import GenerationRequest, Limits, SamplingParams, Sequence
from jaxserve.serving.speculation import Proposer, Rate, Speculation, StepCosts, expected_tokens

SIZES = (1, 2, 4, 8, 16)
NOTHING = [0.0] * 15  # seconds beside a step
LIMITS = Limits(8, 256, 16, 64, vocab_size=100, token_budget=64)


def sequence(tokens, prompt_len=None):
    prompt = tokens[:prompt_len]
    seq = Sequence.create(GenerationRequest("r", tuple(prompt), SamplingParams(max_tokens=200)), LIMITS)
    seq.tokens = list(tokens)
    return seq


@pytest.mark.parametrize(
    ("rate", "count", "tokens"), [(0.8, 5, 3.69), (0.7, 4, 2.77), (0, 3, 1), (1, 3, 4), (0.5, 0, 1)]
)
def test_expected_tokens(rate, count, tokens):
    assert expected_tokens(rate, count) == pytest.approx(tokens, abs=0.005)


def measured(**seconds):
    costs = StepCosts(SIZES)
    for size, value in seconds.items():
        for _ in range(3):
            costs.add(int(size[1:]), value)
    return costs


CHEAP = dict(s1=9.8e-3, s2=10.5e-3, s4=11.9e-3, s8=16e-3, s16=24.6e-3)


def brute_force(costs, rate, extra=0.0):
    def speed(count):
        size = next(size for size in SIZES if size > count)
        return expected_tokens(rate, count) / (costs.seconds(size) + (extra if count else 0))

    return max(range(SIZES[-1]), key=speed), speed


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.97])
@pytest.mark.parametrize("extra", [0.0, 2e-3])
def test_one_sequence_brings_as_many_proposals_as_pay(rate, extra):
    costs = measured(**CHEAP)
    count, _ = costs.best(1, [rate**k for k in range(1, 16)], [extra] * 15)
    best, speed = brute_force(costs, rate, extra)
    assert speed(count) == pytest.approx(speed(best))
    assert (count == 0) == (best == 0)


def test_what_does_not_pay_is_not_checked():
    assert measured(s1=1, s2=2, s4=4, s8=8, s16=16).best(1, [0.9**k for k in range(1, 16)], NOTHING)[0] == 0
    assert measured(s1=1, s2=1, s4=1, s8=1, s16=1).best(1, [0.1], NOTHING)[0] == 1
    assert measured(s1=1, s2=1, s4=1, s8=1, s16=1).best(1, [0.9] * 5, NOTHING)[0] == 5


def test_rows_that_the_step_has_anyway_are_filled():
    """Five sequences run in a step of eight, in which three proposals cost nothing."""
    assert measured(s8=1, s16=2).best(5, [0.1] * 9, NOTHING)[0] == 3
    assert measured(s8=1, s16=1.8).best(5, [0.9] * 11, NOTHING)[0] == 11


def test_nothing_is_tried_before_plain_steps_are_known_and_then_one_size_after_another():
    costs = StepCosts(SIZES)
    gains = [0.9**k for k in range(1, 16)]
    assert costs.best(1, gains, NOTHING)[0] == 0
    for size, seconds, count in ((1, 1.0, 1), (2, 1.1, 3), (4, 1.2, 7), (8, 1.6, 15), (16, 10.0, 7)):
        for _ in range(3):
            costs.add(size, seconds)
        assert costs.best(1, gains, NOTHING)[0] == count
    for _ in range(3100):  # what was measured long ago is tried again
        costs.add(1, 1.0)
    assert costs.seconds(2) is None and costs.seconds(1) == 1.0
    assert costs.best(1, gains, NOTHING)[0] == 1


def test_other_sequences_change_the_pace_of_all_sizes():
    costs = measured(s1=1.0, s4=1.5)
    costs.interrupt()
    costs.add(1, 3.0)
    assert (costs.seconds(1), costs.seconds(4)) == (3.0, 4.5)
    costs.interrupt()
    costs.add(4, 6.0)
    assert (costs.seconds(1), costs.seconds(4)) == (4.0, 6.0)


def test_slow_steps_behind_prompts_do_not_move_one_size_against_the_others():
    costs = measured(s1=1.0, s4=1.5)
    for _ in range(30):
        costs.interrupt()
        for seconds in (3.0, 1.0, 1.0):
            costs.add(1, seconds)
    assert (costs.seconds(1), costs.seconds(4)) == (1.0, 1.5)


def test_contexts_that_grow_do_not_hide_what_a_size_costs():
    costs = StepCosts(SIZES)
    for step in range(60):
        size = (1, 1, 4)[step % 3]
        costs.add(size, (1 + step / 20) * {1: 1.0, 4: 1.5}[size])
    one, four = costs.seconds(1), costs.seconds(4)
    assert one and four
    assert four == pytest.approx(1.5 * 4, rel=0.1) and four / one == pytest.approx(1.5, rel=0.1)


def test_one_slow_step_changes_nothing():
    costs = measured(s1=1.0, s4=1.2)
    costs.add(4, 100.0)
    assert costs.seconds(4) == 1.2


def test_a_rate_starts_at_its_prior_and_forgets():
    rate = Rate()
    assert rate.value(prior=0.3) == 0.3
    for _ in range(200):
        rate.add(1, 1)
    assert rate.value(prior=0.3) > 0.85
    for _ in range(200):
        rate.add(0, 1)
    assert rate.value(prior=0.3) < 0.1


class Fixed(Proposer):
    """Each sequence's rates and nothing else."""

    def __init__(self, rates, each=0.0):
        self.by_seq, self.each = rates, each

    def rates(self, seq):
        return self.by_seq[seq]

    def propose(self, wanted):
        return {seq: [0] * count for seq, count in wanted.items()}

    def seconds(self, count):
        return self.each * count

    def learn(self, seq, proposed, accepted):
        pass

    def forget(self, seq):
        pass


def test_the_best_proposals_of_all_sequences_share_the_step():
    sure, doubtful, none = (sequence([i]) for i in range(3))
    proposer = Fixed({sure: [0.9] * 15, doubtful: [0.7] * 15, none: []})
    speculation = Speculation(proposer, SIZES)
    speculation.costs = measured(s4=1.0, s8=1.1, s16=9.0)
    made = speculation.propose({sure: 15, doubtful: 15, none: 15}, 3, 13)
    assert {seq: len(tokens) for seq, tokens in made.items()} == {sure: 4, doubtful: 1}
    made = speculation.propose({sure: 2, doubtful: 15, none: 15}, 3, 13)
    assert {seq: len(tokens) for seq, tokens in made.items()} == {sure: 2, doubtful: 3}
    made = speculation.propose({sure: 0, doubtful: -1, none: 15}, 3, 13)
    assert made == {}


def test_drafts_cost_by_their_depth():
    """Two sequences share the draft's steps: four proposals of two take as long as two of one."""
    one, two = sequence([1]), sequence([2])
    speculation = Speculation(Fixed({one: [0.8] * 15, two: [0.8] * 15}, each=0.3), SIZES)
    speculation.costs = measured(s1=1.0, s2=1.0, s4=1.0, s8=1.0, s16=1.0)
    assert sum(map(len, speculation.propose({one: 15}, 1, 15).values())) == 3
    made = speculation.propose({one: 15, two: 15}, 2, 14)
    assert [len(tokens) for tokens in made.values()] == [3, 3]
    expensive = Speculation(Fixed({one: [0.8] * 15}, each=1.0), SIZES)
    expensive.costs = speculation.costs
    assert expensive.propose({one: 15}, 1, 15) == {}


def test_waiting_must_pay_for_itself():
    seq = sequence([1])
    speculation = Speculation(Fixed({seq: [0.5] * 15}), SIZES)
    speculation.costs = measured(**CHEAP)
    assert speculation.worth_waiting([seq], 1, 15)
    for _ in range(100):
        speculation.measured(1, 9.8e-3, idle=20e-3)
    assert not speculation.worth_waiting([seq], 1, 15)
    assert not Speculation(Fixed({seq: []}), SIZES).worth_waiting([seq], 1, 15)


def test_a_full_batch_does_not_ask_for_rates():
    """A step of as many sequences as rows has no room, and must not spend time on proposals."""
    seq, proposer = sequence([1, 2]), Fixed({})
    speculation = Speculation(proposer, SIZES)
    proposer.rates = lambda seq: pytest.fail("asked")
    assert not speculation.worth_waiting([seq], 16, 0)
    assert speculation.propose({seq: 15}, 16, 0) == {}


def test_what_is_counted():
    seq = sequence([1])
    speculation = Speculation(Fixed({}), SIZES)
    for proposed, accepted in ((5, 2), (3, 3), (1, 0)):
        speculation.learn(seq, proposed, accepted)
    stats = speculation.stats()
    assert (stats["num_drafts"], stats["num_proposed"], stats["num_accepted"]) == (3, 9, 5)
    assert stats["accepted_at"][:4] == [2, 2, 1, 0]


# ---- prompt lookup


def proposed(tokens, count=5):
    proposer, seq = NgramProposer(), sequence(tokens)
    return proposer.propose({seq: count})[seq]


def test_the_latest_longest_match_goes_on():
    assert proposed([1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 7, 2, 3]) == [5, 8, 7, 2, 3]
    assert proposed([1, 2, 3, 4, 9, 0, 5, 3, 8, 1, 2, 3], 2) == [4, 9], "two tokens match there, one later"
    assert proposed([7, 1, 2, 3, 4, 5, 1, 2, 3, 6, 9, 7, 1, 2, 3], 1) == [4], "four tokens match there, three later"


def test_a_loop_is_continued_past_the_end():
    assert proposed([5, 1, 2, 1, 2], 6) == [1, 2, 1, 2, 1, 2]
    assert proposed([3, 3], 4) == [3, 3, 3, 3]


def test_without_a_match_there_is_nothing():
    proposer = NgramProposer()
    for tokens in ([1], [1, 2, 3, 4]):
        assert proposer.rates(sequence(tokens)) == [] and proposed(tokens) == []


def test_longer_matches_are_trusted_more_and_every_token_teaches():
    proposer, seq = NgramProposer(), sequence([1, 2, 3, 4, 5, 6, 1], 7)
    start = proposer.rates(seq)
    assert len(start) == 31 and start == sorted(start)
    for token in (2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1):  # one by one, each as foreseen
        seq.tokens.append(token)
        learned = proposer.rates(seq)
    assert learned[-1] > start[-1] and learned[0] > start[0]
    assert proposer.rates(sequence([1, 2, 1]))[0] > start[0], "another sequence begins with what was learned"
    proposer.forget(seq)
    proposer.forget(seq)


def test_prompts_teach_nothing():
    """Whether a prompt repeats itself says little of how the model does."""
    proposer = NgramProposer()
    assert proposer.rates(sequence([1, 2] * 50)) == proposer.rates(sequence([3] * 100))


def test_extending_bit_by_bit_equals_all_at_once():
    tokens = [i * i % 7 for i in range(60)]
    proposer, whole = NgramProposer(), sequence(tokens)
    bits = sequence(tokens[:1])
    for end in itertools.chain(range(2, 40, 3), range(40, 61)):
        bits.tokens = tokens[:end]
        proposer.rates(bits)
    assert proposer.propose({bits: 15})[bits] == proposer.propose({whole: 15})[whole]


# ---- with a table


def table(*texts, start=1):
    return NgramTable.count((text, range(start, len(text))) for text in texts)


def test_a_table_knows_what_mostly_follows():
    counted = table([1, 2, 3, 4], [1, 2, 3, 4], [9, 2, 3, 5])
    assert counted.after([1, 2, 3]) == Next(4, 1.4 / 2.3, 3)
    assert counted.after([7, 2, 3]) == Next(4, 1.4 / 3.3, 2), "seen three times, twice with 4"
    assert counted.after([3]) is None, "a single token must be seen four times"
    assert counted.after([9, 9]) is None and counted.after([]) is None
    assert [said.token for said in counted.chain([0, 1, 2])] == [3, 4], "after 1, 2, 3, 4 nothing is known"
    assert len(table([1] * 9).chain([1])) == 6
    assert table([1, 2, 3, 4], [1, 2, 3, 4], start=3).after([1, 2]) is None, "prompts are not counted"


def test_a_table_is_read_as_it_was_written(tmp_path):
    counted = table([1, 2, 3, 4] * 8, [1, 3] * 9)
    counted.save(tmp_path / NGRAMS)
    read = NgramTable.load(tmp_path / NGRAMS, 5)
    for tail in itertools.product(range(5), repeat=3):
        assert read.chain(tail) == [said._replace(rate=float(np.float32(said.rate))) for said in counted.chain(tail)]
    with pytest.raises(UserError, match="more than 4 tokens"):
        NgramTable.load(tmp_path / NGRAMS, 4)
    table().save(tmp_path / NGRAMS)
    assert len(NgramTable.load(tmp_path / NGRAMS, 5)) == 0
    whole = (tmp_path / NGRAMS).read_bytes()
    flipped = bytearray(whole)
    flipped[60] ^= 255
    for damaged in (b"", whole[:-30], b"PK" + bytes(50), b"no table", bytes(flipped)):
        (tmp_path / NGRAMS).write_bytes(damaged)
        with pytest.raises(UserError, match="damaged"):
            NgramTable.load(tmp_path / NGRAMS, 5)


def test_whatever_byte_is_damaged_a_table_is_refused_or_the_same(tmp_path):
    counted, file = table([1, 2, 3, 4] * 8), tmp_path / NGRAMS
    counted.save(file)
    whole = file.read_bytes()
    expected = NgramTable.load(file, 5)._entries
    refused = 0
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            assert NgramTable.load(file, 5)._entries == expected
        except UserError:
            refused += 1
    assert refused > len(whole) / 2


@pytest.mark.parametrize(
    "changed",
    [
        dict(tails=np.int32(3)),
        dict(tails=np.zeros((2, 3), np.int32)),
        dict(tokens=np.array([1.0])),
        dict(rates=np.array(["likely"])),
        dict(rates=np.array([0.5 + 0j])),
        dict(rates=np.array([np.nan], np.float32)),
        dict(rates=np.array([2.0], np.float32)),
        dict(rates=np.array(["2020-01-01"], "M8[D]")),
    ],
)
def test_arrays_that_are_no_table_are_refused(changed, tmp_path):
    arrays: dict[str, Any] = dict(
        tails=np.array([[-1, 1, 2]], np.int32), tokens=np.array([1], np.int32), rates=np.array([0.5], np.float32)
    )
    np.savez(tmp_path / NGRAMS, **arrays)
    assert len(NgramTable.load(tmp_path / NGRAMS, 5)) == 1
    np.savez(tmp_path / NGRAMS, **arrays | changed)
    with pytest.raises(UserError, match="damaged"):
        NgramTable.load(tmp_path / NGRAMS, 5)


def test_what_is_likelier_is_proposed():
    proposer = NgramProposer(table(*[[1, 2, 3, 4]] * 9))
    nothing, both = sequence([8, 9, 1, 2]), sequence([1, 2, 7, 7, 1, 2])
    assert proposer.propose({nothing: 5}) == {nothing: [3, 4]}
    assert proposer.rates(nothing) == [pytest.approx(8.4 / 9.3)] * 2
    assert proposer.propose({nothing: 1}) == {nothing: [3]}
    assert proposer.propose({both: 2}) == {both: [3, 4]}, "0.9 is more than a match of two tokens says"
    assert proposer.propose({sequence([7, 8, 9]): 4}).popitem()[1] == []
    weak = NgramProposer(table([1, 2, 3], [1, 2, 3], [1, 2, 4]))
    assert weak.propose({both: 3}) == {both: [7, 7, 1]}, "0.42 is less"


def test_a_table_that_is_wrong_is_no_longer_asked():
    proposer, seq = NgramProposer(table(*[[1, 2, 3]] * 9)), sequence([1, 2], 2)
    start = proposer.rates(seq)
    for token in (4, 1, 2) * 9:  # the table says 3 after 1, 2
        seq.tokens.append(token)
        proposer.rates(seq)
    assert proposer.propose({seq: 1}) == {seq: [4]} and proposer.rates(sequence([9, 1, 2]))[0] < start[0] / 2
    taught = NgramProposer(table(*[[1, 2, 3]] * 9))
    prompt = sequence([1, 2, 4] * 9)
    assert taught.rates(prompt) and taught.rates(sequence([9, 1, 2])) == start, "prompts teach nothing"


def test_row_sizes_are_those_of_limits():
    assert LIMITS.row_sizes == (1, 2, 4, 8, 16)
    assert dataclasses.replace(LIMITS, max_num_seqs=40).row_sizes == (1, 2, 4, 8, 16, 32, 40)
    assert dataclasses.replace(LIMITS, max_num_seqs=2, token_budget=3).row_sizes == (1, 2, 3)
