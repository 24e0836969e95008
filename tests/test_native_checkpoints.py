"""Recipe `native` on checkpoints as quantization tools publish them: the whole pipeline, and what people are told."""


import numpy as np
import pytest

from jaxserve.cli import main
from jaxserve.models.resolve import resolve
from jaxserve.pallas_kernels import QuantizedTensor
from jaxserve.passes.recipes import find_recipe
from jaxserve.rewritten import Rewritten, rewritten_model
from tests.models.test_quantized import FIXTURES, FORMATS

WHOLE = [name for name in FORMATS if not name.startswith(("ct_w8a8", "ct_fp8"))]
ROUNDED_ACTIVATIONS = ["ct_w8a8", "ct_w8a8_static", "ct_fp8"]


def native(name: str, activations: str = "f32") -> tuple[Rewritten, np.ndarray, dict[str, np.ndarray]]:
    expected = dict(np.load(FIXTURES / name / "expected.npz"))
    model = rewritten_model(FIXTURES / name, find_recipe("native").spec(activations=activations), 16)
    return model, np.asarray(model.window_logits(expected["input_ids"])), expected


@pytest.mark.parametrize("name", WHOLE)
def test_logits_are_those_of_the_dequantized_checkpoint(name):
    """With activations in float32, to float tolerance; every weight is used as it is stored."""
    model, logits, expected = native(name)
    np.testing.assert_allclose(logits, expected["logits"], atol=2e-4, rtol=1e-4)
    checkpoint = resolve(FIXTURES / name)
    kept = [path for path in model.params if path.endswith("/codes")]
    assert len(kept) == (14 if FORMATS[name].ordered else 8)  # without orders of their own q, k, v and gate, up are one
    stored = checkpoint.read_native("layers_0/mlp/down_proj/kernel")
    assert isinstance(stored, QuantizedTensor)
    for field, array in stored.arrays.items():
        np.testing.assert_array_equal(np.asarray(model.params[f"layers_0/mlp/down_proj/kernel/{field}"]), array)


@pytest.mark.parametrize("name", ROUNDED_ACTIVATIONS)
def test_activations_are_quantized_as_the_checkpoint_says(name):
    """e4m3 and static activations give the logits of the tool's own model. Its dynamic int8 scale is absmax / 127.5 and
    ours absmax / 127, so there the errors of rounding are others, but of the same size."""
    _, logits, expected = native(name)
    moved = np.abs(expected["tool_logits"] - expected["logits"]).mean()
    if name == "ct_w8a8":
        assert 0.5 * moved < np.abs(logits - expected["logits"]).mean() < 1.5 * moved
    else:
        assert np.abs(logits - expected["tool_logits"]).mean() < 0.02 * moved


def test_the_default_recipe_keeps_what_is_quantized(capsys):
    """And --explain says of each weight what it was and what became of it."""
    assert main(["compile", str(FIXTURES / "gptq"), "--stop-after", "quantize-matmul", "--explain"]) == 0
    told = capsys.readouterr().err
    assert told.count("GPTQ kept exactly as int4 g64 none f16") == 8
    assert "embed_tokens/embedding: no match, the checkpoint stores it in no quantized form that we keep" in told
