"""From a name to a checkpoint, without a network."""

import pytest

from jaxserve.errors import UserError
from jaxserve.models.checkpoint import CheckpointError
from jaxserve.models.gguf_reader import GGUFCheckpoint
from jaxserve.models.resolve import resolve
from jaxserve.models.safetensors_reader import HFCheckpoint
from tests.models.helpers import fixture_tensors, write_gguf


@pytest.fixture
def gguf_file(shared, tmp_path):
    folder = shared / "fixtures" / "llama"
    path = tmp_path / "m.gguf"
    write_gguf(path, HFCheckpoint(folder).config, fixture_tensors(folder))
    return path


def test_directories_and_files(shared, gguf_file):
    folder = shared / "fixtures" / "llama"
    checkpoint = resolve(str(folder))
    assert isinstance(checkpoint, HFCheckpoint)
    assert checkpoint.origin == str(folder)
    assert isinstance(resolve(gguf_file), GGUFCheckpoint)
    assert resolve(gguf_file.parent).origin == str(gguf_file)


def test_ambiguous_or_empty_directories(gguf_file, tmp_path):
    (tmp_path / "a.gguf").write_bytes(gguf_file.read_bytes())
    with pytest.raises(UserError, match=r"holds 2 \.gguf files; give one of them: a\.gguf"):
        resolve(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"neither a config\.json nor a \.gguf file"):
        resolve(tmp_path / "empty")


def test_other_files(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="of safetensors give the directory"):
        resolve(tmp_path / "model.safetensors")
    (tmp_path / "x.gguf").write_bytes(b"hello")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        resolve(tmp_path / "x.gguf")


@pytest.mark.parametrize("name", ["llama", "./no/such/dir", "a/b/c", "models/x.gguf", ""])
def test_names_of_nothing_say_what_was_tried(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"smollm2-135m-instruct|neither a config"):
        resolve(name)


def test_first_layers_of_a_model(shared):
    whole = resolve(str(shared / "fixtures" / "stories260K"))
    cut = whole.first_layers(2)
    assert (cut.config.layers, whole.config.layers) == (2, 5)
    assert set(cut.specs()) == {
        path for path in whole.specs() if not path.startswith(("layers_2", "layers_3", "layers_4"))
    }
    assert cut.stored_bytes < whole.stored_bytes
    assert cut.read("norm/scale").shape == (64,)
    for count in (0, 6):
        with pytest.raises(ValueError, match=f"{count} layers of a model of 5"):
            whole.first_layers(count)
