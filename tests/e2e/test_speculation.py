"""Speculation on a real artifact with native kernels: the same answers, whatever proposes, and nothing is compiled."""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxserve.distill import DistillOptions, distill
from jaxserve.distill_rows import Rows, Source, make_rows
from jaxserve.errors import UserError
from jaxserve.models.resolve import resolve
from jaxserve.ngram_draft import count_ngrams
from jaxserve.pallas_kernels._native import is_available
from jaxserve.reporting import Reporter
from jaxserve.serving.request import SamplingParams
from jaxserve.serving.session import Session
from jaxserve.serving.speculation import Speculation
from tests.e2e.support import Ask, ask, compile_artifact, greedy, load, settle

pytestmark = pytest.mark.skipif(not is_available(), reason="XLA's own dots depend on the rows beside a row")

OPTIONS: list[dict[str, Any]] = [
    dict(temperature=0.0, ignore_eos=True),
    dict(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.3),
    dict(temperature=0.8, seed=1, top_p=0.9, presence_penalty=0.5, logprobs=2),
    dict(temperature=1.2, seed=2, top_k=20, min_p=0.02, ignore_eos=True, min_tokens=3),
    dict(temperature=0.0, stop=("and", "."), logprobs=0),
]


@pytest.fixture(scope="module")
def session(artifacts: pathlib.Path, stories_model: pathlib.Path) -> Iterator[Session]:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_tokens": 2048}
    folder = compile_artifact(artifacts / "stories-int8", stories_model, "w8a16", **limits)
    opened = load(folder)
    opened.runner.warmup()
    yield opened
    for runner in (opened.runner, *opened.drafts.values()):
        runner.close()


def spendthrift(session: Session, proposer: str) -> Speculation:
    """Checks whatever fits, so that a test does not hang on what steps cost."""
    speculation = session.speculation(proposer)
    assert speculation is not None
    speculation.costs.best = lambda rows, gains, extra: (len(gains), rows + len(gains))  # type: ignore[method-assign]
    return speculation


def requests(story: list[int]) -> list[Ask]:
    """Parts of a story, some of them twice over so that it repeats itself, and random tokens."""
    rng = np.random.default_rng(0)
    prompts = [story[i : i + 10 + i % 17] * (1 + i % 3) for i in range(0, 40, 2)]
    prompts += [rng.integers(3, 500, 20).tolist() for _ in range(10)]
    return [
        Ask(prompt, SamplingParams(max_tokens=8 + 5 * (i % 9), **OPTIONS[i % len(OPTIONS)]), n=1 + (i % 7 == 0))
        for i, prompt in enumerate(prompts)
    ]


def answers(session: Session, asked: list[Ask], speculation: Speculation | None, **options: Any) -> list[Any]:
    compilations = session.runner.compilations
    with session.running(speculation=speculation, **options) as engine:
        results = ask(engine, *asked)
        settle(engine)
        engine.scheduler.pool.check_integrity([])
    assert session.runner.compilations == compilations
    return [
        (each.ids, each.text, [(one.id, one.top) for one in each.logprobs], each.finish_reason, each.stop_reason)
        for choices in results
        for each in choices
    ]


def test_answers_are_those_without(session: Session, story: list[int]):
    """Many at once, beside prompts in chunks, with every option; and the same one by one."""
    asked = requests(story)
    plain = answers(session, asked, None)
    speculation = spendthrift(session, "ngram")
    found = answers(session, asked, speculation)
    assert [ids for ids, *_ in found] == [ids for ids, *_ in plain]
    assert [rest[0:1] + rest[2:] for _, *rest in found] == [rest[0:1] + rest[2:] for _, *rest in plain]
    assert speculation.num_accepted > 3 and speculation.num_proposed > speculation.num_accepted
    alone = spendthrift(session, "ngram")
    one_by_one = [answers(session, [each], alone)[0][0] for each in asked[::5]]
    assert one_by_one == [answers(session, [each], None)[0][0] for each in asked[::5]]
    assert alone.num_accepted > 0


def test_as_measured_costs_have_it(session: Session, story: list[int]):
    asked = requests(story)
    plain, speculation = answers(session, asked, None), session.speculation("ngram")
    assert [ids for ids, *_ in answers(session, asked, speculation)] == [ids for ids, *_ in plain]


@pytest.fixture(scope="module")
def early_exit(session: Session, stories_model: pathlib.Path) -> pathlib.Path:
    """The first three of five layers, with fewer slots and pages than the target, in the target's folder."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_tokens": 512}
    return compile_artifact(session.folder / "draft", stories_model, "w8a16", draft="layers:3", **limits)


def test_a_draft_changes_no_answer(session: Session, early_exit: pathlib.Path, story: list[int]):
    asked = requests(story)
    speculation = spendthrift(session, "draft")
    session.drafts[early_exit].warmup()
    found = answers(session, asked, speculation)
    assert [ids for ids, *_ in found] == [ids for ids, *_ in answers(session, asked, None)]
    assert speculation.num_accepted > 10


def test_a_draft_equal_to_its_target_is_always_right(session: Session, artifacts: pathlib.Path, story: list[int]):
    """Sampled tokens too: it uses the same noise."""
    asked = [Ask(story[:20], SamplingParams(max_tokens=40, **options)) for options in (OPTIONS[0], OPTIONS[3])]
    speculation = spendthrift(session, str(artifacts / "stories-int8"))
    for runner in session.drafts.values():
        runner.warmup()
    found = [answers(session, [one], speculation) for one in asked]
    assert found == [answers(session, [one], None) for one in asked]
    assert speculation.num_accepted == speculation.num_proposed > 50


def test_a_distilled_draft_learns_from_answers_and_changes_none(
    session: Session, artifacts: pathlib.Path, stories_model: pathlib.Path, story: list[int], tmp_path: pathlib.Path
):
    """Trained on what the target's engine answers, compiled, and asked again."""
    turns = ["Once upon a time, there was a", "Tom and Lily went to the", "One day, a little dog", "The sun was"]
    questions = [{"category": kind, "turns": [f"{turn} {kind}"]} for kind in ("cat", "bird") for turn in turns]
    file, folder = tmp_path / "prompts.jsonl", tmp_path / "draft"
    file.write_text("\n".join(map(json.dumps, questions)))
    options = DistillOptions(
        model=str(stories_model), output=folder, layers=3, prompts=file, artifact=artifacts / "stories-int8",
        answer_tokens=32, length=48, batch=4, steps=40, learning_rate=3e-3,
    )  # fmt: skip
    acceptance = distill(options, Reporter(quiet=True))["acceptance"]
    assert acceptance.keys() == {"cat", "bird", "all"}
    assert acceptance["all"]["distilled"] > acceptance["all"]["cut"]
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_tokens": 512}
    draft = compile_artifact(tmp_path / "artifact", folder, "w8a16", **limits)
    asked = [Ask(session.tokenizer.encode_prompt(q["turns"][0]), greedy(32)) for q in questions]
    plain, speculation = answers(session, asked, None), spendthrift(session, str(draft))
    session.drafts[draft].warmup()
    assert answers(session, asked, speculation) == plain
    assert speculation.num_accepted > 10


def test_counted_ngrams_change_no_answer(
    session: Session, artifacts: pathlib.Path, stories_model: pathlib.Path, story: list[int], tmp_path: pathlib.Path
):
    """Counted in what the target's engine answers, and asked again."""
    turns = ["Once upon a time, there was a", "Tom and Lily went to the", "One day, a little dog", "The sun was"] * 4
    file, folder = tmp_path / "prompts.jsonl", tmp_path / "draft"
    file.write_text("\n".join(json.dumps({"category": "story", "turns": [turn]}) for turn in turns))
    source = Source(
        model=str(stories_model), output=folder, prompts=file, artifact=artifacts / "stories-int8", answer_tokens=48
    )
    found = count_ngrams(source, Reporter(quiet=True))["acceptance"]
    assert found.keys() == {"story", "all"} and found["all"]["right"] > 0.9, "each prompt was seen"
    asked = [Ask(session.tokenizer.encode_prompt(turn), greedy(48)) for turn in turns[:4]]
    asked += [Ask(story[:20], SamplingParams(max_tokens=40, **options)) for options in OPTIONS]
    speculation = spendthrift(session, str(folder))
    assert answers(session, asked, speculation) == answers(session, asked, None)
    assert speculation.num_accepted > 100
    for tokens, words in ((0, "less than 1"), (10_000, "not between 1 and")):
        with pytest.raises(UserError, match=f"--answer-tokens {tokens} is {words}"):
            unwanted = dataclasses.replace(source, output=tmp_path / "none", answer_tokens=tokens)
            count_ngrams(unwanted, Reporter(quiet=True))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    one, two = list(vocab)[400:402]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="another tokenizer than the target: its token 400 is"):
        session.speculation(str(folder))


def test_what_is_neither_known_nor_a_folder_is_refused(session: Session):
    with pytest.raises(
        UserError, match="--speculate eagle: allowed are off, ngram, head, draft, or the folder of a draft"
    ):
        session.speculation("eagle")


def test_an_artifact_without_a_draft_says_how_to_make_one(session: Session, early_exit: pathlib.Path):
    with pytest.raises(UserError, match=r"holds none; .*jaxserve compile MODEL --draft layers:N -o .*draft/draft"):
        load(session.folder / "draft").speculation("draft")


def test_further_answers_are_to_prompts_that_are_learned_from(
    stories_model: pathlib.Path, session: Session, tmp_path: pathlib.Path
):
    questions, samples = tmp_path / "questions.jsonl", 2
    asked = [{"category": "ab"[i % 2], "turns": [f"{i} Once upon a time"]} for i in range(6)]
    questions.write_text("".join(json.dumps(each) + "\n" for each in asked))
    source = Source(
        model=str(stories_model), output=tmp_path / "out", prompts=questions, artifact=session.folder,
        samples=samples, answer_tokens=40, length=64,
    )  # fmt: skip
    rows = make_rows(source, resolve(source.model), Reporter(quiet=True))
    assert rows.samples == 8 and rows.kinds == (*"ababab", *"abab" * samples)
    assert np.flatnonzero(rows.held_out()).tolist() == [0, 1]
    starts = [row[:6].tolist() for row in rows.ids]
    assert starts[6:10] == starts[10:14] == starts[2:6], "the same prompts"
    assert len({tuple(row) for row in rows.ids[2:]}) > 8, "and other answers"
    assert rows.early()[:6].any(axis=1).all() and not rows.early()[6:].any(), "each prompt counts once"
    rows.save(tmp_path / "rows.npz")
    assert Rows.load(tmp_path / "rows.npz").samples == 8


def test_the_target_makes_up_prompts_and_answers_them(
    stories_model: pathlib.Path, session: Session, tmp_path: pathlib.Path
):
    source = Source(
        model=str(stories_model), output=tmp_path / "out", invented=9, artifact=session.folder, answer_tokens=20,
        length=200,
    )  # fmt: skip
    with pytest.raises(UserError, match="no chat template"):
        make_rows(source, resolve(source.model), Reporter(quiet=True))
    source = dataclasses.replace(source, artifact=tmp_path / "artifact")
    shutil.copytree(session.folder, tmp_path / "artifact")
    template = tmp_path / "artifact" / "tokenizer" / "chat_template.jinja"
    template.write_text("{{ bos_token }}Ask: {% for each in messages %}{{ each.content }}\nTell: {% endfor %}")
    rows = make_rows(source, resolve(source.model), Reporter(quiet=True))

    def prompts(rows: Rows) -> list[str]:
        ends = rows.wanted.argmax(axis=1) + 1
        return [session.tokenizer.decode(ids[:end]) for ids, end in zip(rows.ids, ends, strict=True)]

    texts = prompts(rows)
    assert rows.kinds == ("invented",) * 9 and len(set(texts)) == 9 and rows.held_out().sum() == 2
    assert all(text.startswith("Ask: ") and text.endswith("Tell:") and len(text) > 20 for text in texts)
    # A turn that ends with no EOS.
    template.write_text("{{ bos_token }}Once upon a time, {{ messages[0].content }} was\nTell: ")
    rows = make_rows(source, resolve(source.model), Reporter(quiet=True))
    assert all(text.count("was") == 1 and text.endswith(" was\nTell:") for text in prompts(rows))
    # Where little is left of them some are alike, and held-out rows would be learned from.
    letter = "{% if messages[0].content == 'user-turn' %}user-turn{% else %}{{ messages[0].content[0] }}{% endif %}"
    template.write_text("{{ bos_token }}Ask: " + letter)
    rows = make_rows(dataclasses.replace(source, samples=1), resolve(source.model), Reporter(quiet=True))
    once = prompts(rows)[: len(rows.ids) - rows.samples]
    assert 1 < len(once) == len(set(once)) < 9 and rows.samples == len(once) - 1
    template.write_text("{% for each in messages %}{{ each.content }}{% endfor %}")
    with pytest.raises(UserError, match="does not say where a user's turn begins"):
        make_rows(source, resolve(source.model), Reporter(quiet=True))
