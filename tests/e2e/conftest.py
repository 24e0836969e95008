"""Real artifacts, compiled once a test session, and one server on each of the two that most tests use."""

import pathlib
from collections.abc import Iterator

import numpy as np
import pytest

from tests.e2e.support import Live, compile_artifact, live


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Folder of the session's artifacts."""
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture(scope="session")
def stories_model(shared: pathlib.Path) -> pathlib.Path:
    return shared / "fixtures" / "stories260K"


@pytest.fixture(scope="session")
def story(stories_model: pathlib.Path) -> list[int]:
    """Ids of a text that the small model would write itself: BOS, a prompt and its greedy continuation."""
    expected = np.load(stories_model / "expected.npz")
    return [*expected["input_ids"].tolist(), *expected["greedy"].tolist()]


@pytest.fixture(scope="session")
def stories_artifact(artifacts: pathlib.Path, stories_model: pathlib.Path) -> pathlib.Path:
    return compile_artifact(
        artifacts / "stories", stories_model, "f32", max_num_seqs=16, max_num_batched_tokens=64, kv_tokens=4096
    )


@pytest.fixture(scope="session")
def stories(stories_artifact: pathlib.Path) -> Iterator[Live]:
    with live(stories_artifact) as started:
        yield started


@pytest.fixture(scope="session")
def int8_artifact(artifacts: pathlib.Path, stories_model: pathlib.Path) -> pathlib.Path:
    """The small model with an int8 KV cache."""
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "kv_tokens": 1024}
    return compile_artifact(artifacts / "kv-int8", stories_model, "f32", kv_dtype="int8", **limits)


@pytest.fixture(scope="session")
def sample_artifact(artifacts: pathlib.Path, sample_gguf: pathlib.Path) -> pathlib.Path:
    """The sample model in f32."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 1024, "kv_tokens": 2048}
    return compile_artifact(artifacts / "sample", sample_gguf, "f32", **limits)


@pytest.fixture(scope="session")
def sample(sample_artifact: pathlib.Path) -> Iterator[Live]:
    with live(sample_artifact) as started:
        yield started
