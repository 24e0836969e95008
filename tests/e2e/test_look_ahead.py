"""A look-ahead head in a real artifact with native kernels: trained, compiled, served, and no answer changes."""

import pathlib
from collections.abc import Iterator

import pytest

from jaxserve.cli import main
from jaxserve.compile import compile_model
from jaxserve.distill import HeadOptions, distill
from jaxserve.distill_rows import Source
from jaxserve.errors import UserError
from jaxserve.models.look_ahead import LOOK_AHEAD
from jaxserve.ngram_draft import count_ngrams
from jaxserve.pallas_kernels._native import is_available
from jaxserve.plan import CompileOptions
from jaxserve.reporting import Reporter
from jaxserve.serving.head import HeadProposer
from jaxserve.serving.session import Session
from tests.distill_support import write_stories
from tests.e2e.support import compile_artifact, load
from tests.e2e.test_speculation import answers, requests, spendthrift

pytestmark = pytest.mark.skipif(not is_available(), reason="XLA's own dots depend on the rows beside a row")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, stories_model: pathlib.Path) -> pathlib.Path:
    """Trained for seconds on a text such as the model writes: right often enough to be seen."""
    folder = tmp_path_factory.mktemp("head")
    text = write_stories(folder / "text.txt")
    options = HeadOptions(
        model=str(stories_model), text=text, output=folder / "out", length=32, batch=256, steps=60, head_vocab=400
    )
    distill(options, Reporter(quiet=True))
    return folder / "out"


@pytest.fixture(scope="module", params=["w8a16", "bf16"])
def session(request, artifacts: pathlib.Path, stories_model: pathlib.Path, head: pathlib.Path) -> Iterator[Session]:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_tokens": 2048}
    folder = artifacts / f"stories-head-{request.param}"
    opened = load(compile_artifact(folder, stories_model, request.param, look_ahead=head, **limits))
    opened.runner.warmup()
    yield opened
    opened.runner.close()


def test_answers_are_those_without(session: Session, story: list[int]):
    asked = requests(story)
    plain = answers(session, asked, None)
    speculation = spendthrift(session, "head")
    found = answers(session, asked, speculation)
    assert [ids for ids, *_ in found] == [ids for ids, *_ in plain]
    alone, lookup = spendthrift(session, "head"), spendthrift(session, "ngram")
    for each in asked[::4]:
        expected = answers(session, [each], None)
        assert [ids for ids, *_ in answers(session, [each], alone)] == [ids for ids, *_ in expected]
        answers(session, [each], lookup)
    assert alone.proposer.foresight > 0.1 and alone.num_accepted > lookup.num_accepted


def test_costs_as_measured_change_nothing_either(session: Session, story: list[int]):
    asked = requests(story)[::2]
    plain, speculation = answers(session, asked, None), session.speculation("head")
    assert [ids for ids, *_ in answers(session, asked, speculation)] == [ids for ids, *_ in plain]


def test_a_table_beside_the_head_changes_nothing_either(
    session: Session, stories_model: pathlib.Path, story: list[int], tmp_path: pathlib.Path, monkeypatch
):
    source = Source(model=str(stories_model), output=tmp_path / "table", text=write_stories(tmp_path / "text.txt"))
    count_ngrams(source, Reporter(quiet=True))
    asked, speculation = requests(story)[::2], spendthrift(session, f"head+{source.output}")
    plain = answers(session, asked, None)
    assert [ids for ids, *_ in answers(session, asked, speculation)] == [ids for ids, *_ in plain]
    assert isinstance(speculation.proposer, HeadProposer)
    assert any(tail for tail, _ in speculation.proposer._counted), "the table was asked, too"
    assert speculation.proposer.foresight > 0.1
    with pytest.raises(UserError, match=r"--speculate head\+.*: .* holds no ngrams.npz; `jaxserve distill"):
        session.speculation(f"head+{tmp_path}")
    monkeypatch.chdir(source.output)
    with pytest.raises(UserError, match=r"--speculate head\+: name the folder that holds ngrams.npz"):
        session.speculation("head+")


def test_the_commands_say_that_there_is_a_head(session: Session, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(session.folder)]) == 0
    assert "a head in the steps, for --speculate head" in capsys.readouterr().out


def test_what_does_not_go_together_is_refused(
    stories_artifact: pathlib.Path, stories_model: pathlib.Path, head: pathlib.Path, tmp_path: pathlib.Path
):
    without = load(stories_artifact)
    with pytest.raises(UserError, match="was compiled without a look-ahead head"):
        without.speculation("head")
    without.runner.close()
    with pytest.raises(UserError, match="leave out one of them"):
        compile_artifact(tmp_path / "a", stories_model, "f32", look_ahead=head, draft="layers:2")
    with pytest.raises(UserError, match="--stop-after makes none"):
        options = CompileOptions(model=str(stories_model), output=None, look_ahead=head, stop_after="canonicalize")
        compile_model(options, Reporter(quiet=True))
    broken = (head / LOOK_AHEAD).read_bytes()[:-50]
    (tmp_path / LOOK_AHEAD).write_bytes(broken)
    for file in head.iterdir():
        if file.name != LOOK_AHEAD:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UserError, match="damaged"):
        compile_artifact(tmp_path / "b", stories_model, "f32", look_ahead=tmp_path)
    assert not (tmp_path / "b").exists()
