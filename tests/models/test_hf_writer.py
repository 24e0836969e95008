"""What is written is what is read again."""

import dataclasses
import shutil

import numpy as np
import pytest

from jaxserve.errors import UserError
from jaxserve.models.config import ModelConfig
from jaxserve.models.hf_writer import hf_fields, write_checkpoint
from jaxserve.models.resolve import resolve


@pytest.mark.parametrize("name", ["llama", "llama_rope3", "mistral", "qwen2", "qwen3", "stories260K"])
def test_a_checkpoint_survives(name, tmp_path, shared):
    source = resolve(shared / "fixtures" / name)
    write_checkpoint(tmp_path, source.config, ((path, source.read(path)) for path in source.specs()), source.generation)
    for file in (shared / "fixtures" / name).glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    found = resolve(tmp_path)
    assert (found.config, found.generation, found.unused) == (source.config, source.generation, ())
    for path in source.specs():
        np.testing.assert_array_equal(found.read(path), source.read(path))


def test_what_no_config_says_is_refused(shared):
    config = resolve(shared / "fixtures" / "llama").config
    assert ModelConfig.from_hf(hf_fields(config)) == config
    with pytest.raises(UserError, match=r"config\.json cannot describe this llama"):
        hf_fields(dataclasses.replace(config, qk_norm=True))
