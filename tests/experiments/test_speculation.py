"""What the experiment makes of answers, without a model."""

import json

import pytest

from jaxserve.errors import UserError
from jaxserve.experiments.speculation import Answer, predicted, summarize
from jaxserve.questions import read_questions
from jaxserve.serving.ngram import NgramProposer
from jaxserve.serving.speculation import Speculation


def test_questions_by_category(tmp_path):
    lines = [{"category": c, "turns": [f"{c} {i}", "again"]} for c in ("math", "coding", "rag") for i in range(3)]
    file = tmp_path / "q.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    assert len(read_questions(file, 1, "--questions")) == 9
    assert read_questions(file, 2, "--questions") == [
        ("mt_bench", "math 0"), ("mt_bench", "math 2"), ("mt_bench", "coding 1"), ("rag", "rag 0"), ("rag", "rag 2")
    ]  # fmt: skip


def test_a_turn_may_hold_any_character(tmp_path):
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps({"category": "rag", "turns": ["two\u2028lines"]}, ensure_ascii=False), encoding="utf-8")
    assert read_questions(file, 1, "--questions") == [("rag", "two\u2028lines")]


@pytest.mark.parametrize(
    "text",
    [
        *("{}", "no json", '{"category": "rag", "turns": []}', '{"category": "rag", "turns": "one"}'),
        *('{"category": "rag", "turns": [5]}', '{"category": "rag", "turns": [""]}', '{"category": 5, "turns": ["a"]}'),
    ],
)
def test_other_files_are_refused(tmp_path, text):
    file = tmp_path / "q.jsonl"
    file.write_text(text)
    with pytest.raises(UserError, match=r"--questions .*not the questions of Spec-Bench"):
        read_questions(file, 1, "--questions")
    with pytest.raises(UserError, match="--questions"):
        read_questions(tmp_path / "missing", 1, "--questions")


def test_a_category_in_one_line():
    plain = [Answer([1] * 11, 10, 1.0), Answer([2] * 21, 20, 2.0), Answer([3], 0, 0.0)]
    fast = [Answer([1] * 11, 5, 0.5), Answer([2] * 20 + [9], 10, 2.0), Answer([3], 0, 0.0)]
    row = summarize("rag", "ngram", list(zip(plain, fast, strict=True)))
    assert (row.category, row.proposer, row.questions, row.unequal) == ("rag", "ngram", 3, 1)
    assert row.tokens_per_step == 30 / 15
    assert row.speedup == pytest.approx(1.5) and row.overall == pytest.approx(3.0 / 2.5)


def test_the_prediction_counts_steps_at_their_measured_seconds():
    speculation = Speculation(NgramProposer(), (1, 2, 4))
    assert predicted(speculation) is None
    for size, seconds, steps in ((1, 1.0, 10), (4, 1.5, 10)):
        for _ in range(steps):
            speculation.costs.add(size, seconds)
    speculation.num_accepted = 20
    assert predicted(speculation) == pytest.approx(40 / 25)
