"""Recipe `native` on checkpoints as quantization tools publish them: the whole pipeline, and what people are told."""

import numpy as np
import pytest

from jaxserve.cli import main
from jaxserve.models.resolve import resolve
from jaxserve.pallas_kernels import QuantizedTensor
from jaxserve.pallas_kernels.quantized_matmul.layout import pack
from jaxserve.passes.recipes import find_recipe
from jaxserve.rewritten import Rewritten, rewritten_model
from tests.models.helpers import Runner, write_gguf
from tests.models.test_quantized import FIXTURES, FORMATS

GGUF = FIXTURES / "gguf"
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
    # One stack a kind of weight, of both layers; without orders of their own q, k, v and gate, up are one.
    assert len(kept) == (7 if FORMATS[name].ordered else 4)
    stored = checkpoint.read_native("layers_0/mlp/down_proj/kernel")
    assert isinstance(stored, QuantizedTensor)
    for field, array in stored.arrays.items():
        found = np.asarray(model.params[f"layers_0-1/mlp/down_proj/kernel/{field}"])[0]
        np.testing.assert_array_equal(found, pack(field, array))


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


# ---- GGUF


def test_the_file_that_llama_cpp_runs_gives_the_logits_of_its_float32():
    """Q4_K_M as llama.cpp wrote it, against llama.cpp on its own float32 of the file, cache in float32."""
    expected = np.load(GGUF / "expected.npz")
    model = rewritten_model(GGUF / "model.gguf", find_recipe("native").spec(activations="f32"), 16)
    np.testing.assert_allclose(model.window_logits(expected["input_ids"]), expected["logits"], atol=2e-4, rtol=1e-4)
    forms = {str(entry.stored) for entry in model.stages[0].result.graph.inputs if entry.stored}
    assert forms == {"int4 g32 minimum f32", "int8 g16 none f32"}
    kept = {path for path in model.params if path.endswith("/codes")}
    assert len(kept) == 7  # Q6_K of v keeps it apart from q and k, but gate and up are one; the embedding is tied


def test_explain_says_what_became_of_every_block_type(capsys):
    assert main(["compile", str(GGUF / "model.gguf"), "--stop-after", "quantize-matmul", "--explain"]) == 0
    told = capsys.readouterr().err
    assert "layers_0/mlp/down_proj/kernel [256, 256]: Q6_K kept exactly as int8 g16 none f32" in told
    assert "layers_0/self_attn/o_proj/kernel [256, 256]: Q4_K kept exactly as int4 g32 minimum f32" in told
    assert "embed_tokens/embedding [64, 256], rows: Q6_K kept exactly as" in told


@pytest.fixture
def ternary(tmp_path):
    """A model in a type that no format holds."""
    config, rng = resolve(GGUF / "model.gguf").config, np.random.default_rng(0)
    sizes = {"q_proj": (256, 256), "k_proj": (64, 256), "v_proj": (64, 256), "o_proj": (256, 256)}
    layer = {f"self_attn.{name}": size for name, size in sizes.items()}
    layer |= {f"mlp.{name}_proj": (256, 256) for name in ("gate", "up", "down")}
    tensors = {f"model.layers.0.{name}.weight": 0.1 * rng.standard_normal(size) for name, size in layer.items()}
    tensors["model.embed_tokens.weight"] = rng.standard_normal((64, 256))
    for name in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        tensors[f"model.{name}.weight"] = np.ones(256)
    arrays = {name: array.astype(np.float32) for name, array in tensors.items()}
    write_gguf(tmp_path / "ternary.gguf", config, arrays, type="TQ2_0", llama__vocab_size=64)
    return tmp_path / "ternary.gguf"


def test_other_types_are_requantized_and_explain_says_so(ternary, capsys):
    assert main(["compile", str(ternary), "--recipe", "native", "--stop-after", "quantize-matmul", "--explain"]) == 0
    told = capsys.readouterr().err
    assert told.count("int8 g32 none f32 by rtn; no form holds TQ2_0 exactly, int8 g32 none f32 is the nearest") == 6


def test_requantized_types_stay_near_and_other_recipes_read_them_as_they_are(ternary):
    checkpoint, ids = resolve(ternary), list(range(16))
    assert not checkpoint.native  # so the default recipe is no other than that of a dense checkpoint
    (exact,) = Runner(checkpoint, length=16).logits(ids)
    near = rewritten_model(ternary, find_recipe("native").spec(activations="f32"), 16).window_logits(ids)
    same = rewritten_model(ternary, find_recipe("f32").spec(), 16).window_logits(ids)
    np.testing.assert_allclose(same, exact, atol=2e-4, rtol=1e-4)
    assert 0 < np.linalg.norm(near - exact) < 0.02 * np.linalg.norm(exact)
