"""Checkpoints that other tools quantized, compiled and served: their numbers through artifact and engine."""

import pathlib
import shutil

import jax
import numpy as np
import pytest

from jaxserve.serving.request import SamplingParams
from tests.e2e.support import ask_one, compile_artifact, greedy, load
from tests.models.test_quantized import FIXTURES

TINY = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "kv_tokens": 64}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "logits"),
    [
        ("awq", "logits"),
        ("gptq_act_order", "logits"),
        ("ct_w8a8_static", "tool_logits"),
        ("ct_fp8", "tool_logits"),
    ],
)
def test_served_as_the_tool_would(
    artifacts: pathlib.Path, stories_model: pathlib.Path, tmp_path: pathlib.Path, name: str, logits: str
):
    """Log-probabilities of a prompt, and the next token; `native` is the recipe that is chosen without being named."""
    model = tmp_path / name
    model.mkdir()
    for file in (*(FIXTURES / name).iterdir(), *stories_model.glob("tokenizer*")):
        shutil.copyfile(file, model / file.name)
    artifact = compile_artifact(artifacts / f"imported-{name}", model, None, activations="f32", **TINY)
    session, expected = load(artifact), np.load(FIXTURES / name / "expected.npz")
    assert session.manifest.recipe == "native" and session.manifest.activations == "f32"
    ids, wanted = expected["input_ids"].tolist(), np.asarray(jax.nn.log_softmax(expected[logits], axis=-1))
    with session.running() as engine:
        prompt = ask_one(engine, ids, SamplingParams(max_tokens=0, prompt_logprobs=0)).prompt_logprobs[1:]
        found = np.array([entry.logprob for entry in prompt], np.float32)
        np.testing.assert_allclose(found, wanted[np.arange(len(ids) - 1), ids[1:]], atol=1e-3)
        assert ask_one(engine, ids, greedy(1)).ids == [int(wanted[-1].argmax())]
