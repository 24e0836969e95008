"""Flags of experiments as a command line would set them, and a tiny trained model with a text."""

import contextlib
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator

import pytest
from absl import flags
from absl.testing import flagsaver

from jaxserve.experiments.common import Settings

TEXT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her dog. "


@pytest.fixture(scope="session")
def one_layer(shared: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The first layer of the trained model, with its embeddings and tokenizer: quick to compile."""
    source, folder = shared / "fixtures" / "stories260K", tmp_path_factory.mktemp("one_layer")
    for path in source.iterdir():
        if path.suffix != ".npz":
            shutil.copy(path, folder)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return folder


@pytest.fixture
def parse(one_layer: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[Callable[..., Settings]]:
    """parse(name=value, ...) sets flags on top of those of a small run (`...`: not given), and gives the settings."""
    text = tmp_path / "story.txt"
    text.write_text(TEXT * 12)
    small = {
        "model": one_layer,
        "calibration": text,
        "calibration_sequences": 2,
        "calibration_length": 32,
        "text": text,
        "context": 64,
        "windows": 3,
    }
    with contextlib.ExitStack() as stack:

        def parse(**given: object) -> Settings:
            stack.close()
            both = {name: value for name, value in {**small, **given}.items() if name in given or name in flags.FLAGS}
            both = {name: value for name, value in both.items() if value is not ...}
            words = {name: value if isinstance(value, list) else str(value) for name, value in both.items()}
            stack.enter_context(flagsaver.as_parsed(**words))
            flags.FLAGS.mark_as_parsed()
            return Settings.from_flags()

        yield parse
