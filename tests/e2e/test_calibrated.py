"""A calibrated pipeline from a checkpoint to an artifact: what is recorded, what is written, what stays behind."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.calibration import CalibrationOptions
from jaxserve.compile import compile_model
from jaxserve.errors import UserError
from jaxserve.plan import CompileOptions
from jaxserve.reporting import Reporter
from tests.e2e.support import ask_one, greedy, load

PRUNED = "canonicalize,lower-dense-matmul,prune{sparsity=0.25},fuse-qkv,fuse-gate-up,insert-paged-kv{page=16,kv=f32}"
LIMITS = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "kv_tokens": 512}


def compiled(folder: pathlib.Path, model: pathlib.Path, pipeline: str, **options) -> dict:
    asked = CompileOptions(model=str(model), output=folder, pipeline=pipeline, **LIMITS, **options)
    return compile_model(asked, Reporter(quiet=True))


def test_a_calibrated_artifact(tmp_path: pathlib.Path, stories_model: pathlib.Path, story: list[int]):
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little girl. She liked to play in the park. " * 40)
    summary = compiled(tmp_path / "made", stories_model, PRUNED, calibration=CalibrationOptions(text, 8, 64))
    assert summary["calibration"] == "8 sequences of 64 tokens of text.txt" and summary["calibration_seconds"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "text.txt"]
    assert "calibration" not in {path.name for path in (tmp_path / "made").iterdir()}
    assert "8 sequences of 64 tokens of text.txt" in (tmp_path / "made" / "report.html").read_text()
    session = load(tmp_path / "made")
    record = session.manifest.calibration
    assert record is not None and (record.sequences, record.length, record.text) == (8, 64, "text.txt")
    for path, value in session.runner.params.items():
        zeros = float(jnp.mean(jnp.asarray(value) == 0))
        np.testing.assert_allclose(zeros, 0.25 if path.startswith("layers_") and value.ndim == 2 else 0.0, atol=0.01)
    with session.running() as engine:
        assert len(ask_one(engine, story[:16], greedy(8)).ids) == 8
    session.runner.close()


def test_calibration_that_nobody_reads(tmp_path: pathlib.Path, stories_model: pathlib.Path):
    with pytest.raises(UserError, match=r"--calibration: no pass of this pipeline looks at activations \(canon"):
        compiled(
            tmp_path / "made",
            stories_model,
            "canonicalize,insert-paged-kv",
            calibration=CalibrationOptions(),
            verify=False,
        )
    assert list(tmp_path.iterdir()) == []


def test_a_text_that_is_too_short(tmp_path: pathlib.Path, stories_model: pathlib.Path):
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time.")
    with pytest.raises(UserError, match=r"--calibration: text\.txt has \d+ tokens, less than 64 sequences of 512"):
        compiled(tmp_path / "made", stories_model, PRUNED, calibration=CalibrationOptions(text), verify=False)
    assert list(tmp_path.iterdir()) == [text]
