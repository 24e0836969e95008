"""Tokenizers that the tests of this folder share."""

import json
import pathlib
import shutil
import typing

import pytest

from jaxserve.text import Tokenizer, gguf_tokenizer, load_tokenizer
from jaxserve.text.fast import FastBackend
from jaxserve.text.pieces import byte_level_alphabet
from jaxserve.text.pretokenizers import PRE_TOKENIZERS, byte_level_bpe
from jaxserve.text.tokenizer import SpecialTokens


@pytest.fixture(scope="session")
def tokenizer_cases(shared: pathlib.Path) -> list[dict[str, typing.Any]]:
    """Strings with their ids and decoded text, from reference implementations."""
    return json.loads((shared / "fixtures" / "tokenizer_cases.json").read_text(encoding="utf-8"))["cases"]


@pytest.fixture(scope="session")
def chat_cases(shared: pathlib.Path) -> list[dict[str, typing.Any]]:
    """Chats with their templated text and ids for the sample model."""
    return json.loads((shared / "fixtures" / "expected_smollm2.json").read_text(encoding="utf-8"))["cases"]


@pytest.fixture(scope="session")
def sample_metadata(sample_gguf: pathlib.Path) -> dict[str, typing.Any]:
    """The sample model's tokenizer metadata, as a GGUF reader hands it over."""
    import gguf

    fields = gguf.GGUFReader(sample_gguf).fields
    return {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}


@pytest.fixture(scope="session")
def sample(sample_metadata: dict[str, typing.Any]) -> Tokenizer:
    return gguf_tokenizer(sample_metadata)


@pytest.fixture(scope="session")
def stories(shared: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """stories260K through its sentencepiece model (beside a tokenizer.json that would be preferred)."""
    folder = tmp_path_factory.mktemp("stories")
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copyfile(shared / "fixtures" / "stories260K" / name, folder / name)
    return load_tokenizer(folder)


@pytest.fixture(scope="session")
def stories_json(shared: pathlib.Path) -> Tokenizer:
    """stories260K through its tokenizer.json: byte fallback in the `tokenizers` library."""
    return load_tokenizer(shared / "fixtures" / "stories260K")


BYTE_TOKENS = [*byte_level_alphabet(), "Ġt", "he", "Ġthe", "ä½", "ðŁ", "<|end|>", "<think>"]
BYTE_MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("ä", "½"), ("ð", "Ł")]


@pytest.fixture(scope="session")
def byte_bpe() -> Tokenizer:
    """A small byte-level BPE: every byte, a few merges (two make parts of characters), a special and an added token."""
    import tokenizers

    vocab = {token: index for index, token in enumerate(BYTE_TOKENS)}
    backend = byte_level_bpe(vocab, BYTE_MERGES, PRE_TOKENIZERS["gpt-2"])
    backend.add_special_tokens([tokenizers.AddedToken("<|end|>", normalized=False, special=True)])
    backend.add_tokens([tokenizers.AddedToken("<think>", normalized=False, special=False)])
    return Tokenizer(FastBackend(backend), SpecialTokens(bos="<|end|>", eos="<|end|>"))
