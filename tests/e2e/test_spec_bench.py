"""The 480 questions of Spec-Bench on the sample model: greedy answers with each proposer are those without."""

import pathlib

import pytest

from jaxserve.pallas_kernels._native import is_available
from jaxserve.questions import prompt_ids, read_questions
from jaxserve.serving.request import SamplingParams
from tests.e2e.support import Ask, ask, compile_artifact, load
from tests.e2e.test_speculation import spendthrift

TOKENS, AT_ONCE = 64, 4  # few at once: a step of 16 rows then has room for proposals


@pytest.mark.slow
@pytest.mark.timeout(3600)  # ten minutes and more on a machine that others use
@pytest.mark.skipif(not is_available(), reason="XLA's own dots depend on the rows beside a row")
def test_answers_are_those_without(artifacts: pathlib.Path, sample_gguf: pathlib.Path, shared: pathlib.Path):
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 128, "verify": False}
    session = load(compile_artifact(artifacts / "spec-bench", sample_gguf, "native", **limits), max_num_seqs=AT_ONCE)
    session.runner.warmup()
    questions = read_questions(shared / "data" / "prompts" / "spec_bench_question.jsonl", 1, "--questions")
    longest = session.limits.max_model_len - TOKENS
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0)
    asked = [Ask(prompt_ids(session.tokenizer, turn, longest), params) for _, turn in questions]
    found = {}
    for name, speculation in (("off", None), ("ngram", spendthrift(session, "ngram"))):
        with session.running(speculation=speculation) as engine:
            found[name] = [result.ids for (result,) in ask(engine, *asked)]
    assert session.runner.compilations == 0
    session.runner.close()
    different = [number for number, pair in enumerate(zip(*found.values(), strict=True)) if pair[0] != pair[1]]
    assert len(questions) == 480 and different == []
