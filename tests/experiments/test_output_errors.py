"""Layer errors against outputs that are really computed, and scales found again and folded back."""

import json
import shutil

import numpy as np
import pytest

from jaxserve.calibration import open_tokenizer
from jaxserve.experiments import layer_error
from jaxserve.experiments.common import Settings
from jaxserve.experiments.output_errors import original_model, output_errors, relative_error, scaling
from jaxserve.models.resolve import resolve
from jaxserve.pallas_kernels import quantize_rtn
from jaxserve.passes.recipes import find_recipe, parse_spec
from jaxserve.passes.rules import parse_scheme
from tests.models.test_quantized import FIXTURES

LAYOUT = "canonicalize,lower-dense-matmul,fuse-qkv,fuse-gate-up"
KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def matrix() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(24, 16)).astype("float32")


def test_scales_are_found_again(matrix):
    rng = np.random.default_rng(1)
    rows, columns = np.exp(rng.normal(size=24)), np.exp(2 * rng.normal(size=16))
    folded = (rows[:, None] * matrix * columns).astype("float32")
    a, b = scaling(matrix, folded)
    np.testing.assert_allclose(a[:, None] * b, rows[:, None] * columns, rtol=1e-5)
    np.testing.assert_array_equal(np.concatenate(scaling(matrix, matrix)), 1)


def test_scales_are_found_where_half_the_elements_are_zero(matrix):
    rng = np.random.default_rng(2)
    rows, columns = np.exp(rng.normal(size=24)), np.exp(rng.normal(size=16))
    folded = (rows[:, None] * matrix * columns).astype("float32")
    folded[rng.uniform(size=matrix.shape) < 0.5] = 0
    a, b = scaling(matrix, folded)
    np.testing.assert_allclose(a[:, None] * b, rows[:, None] * columns, rtol=1e-4)


def test_what_is_no_scaling_is_refused(matrix):
    with pytest.raises(ValueError, match="changed its sign"):
        scaling(matrix, -matrix)
    with pytest.raises(ValueError, match="not the original one with scaled inputs and outputs"):
        scaling(matrix, matrix + np.sign(matrix) * 0.1)


def inputs_of_the_first_attention(settings: Settings) -> np.ndarray:
    """x [T, D] that q, k and v of layer 0 read, computed in numpy from the calibration text."""
    checkpoint, options = resolve(settings.model), settings.calibration
    assert options.text is not None
    ids = open_tokenizer(checkpoint).encode(options.text.read_text())[: options.sequences * options.length]
    rows = checkpoint.read("embed_tokens/embedding").astype("float64")[np.array(ids)]
    rows /= np.sqrt((rows**2).mean(axis=1, keepdims=True) + checkpoint.config.norm_eps)
    return rows * checkpoint.read("layers_0/input_layernorm/scale")


def test_errors_are_those_of_the_outputs(parse):
    """Round to nearest in 4 bits: q, k and v of the first layer, whose inputs anybody can compute."""
    settings = parse()
    passes = parse_spec(f"{LAYOUT},quantize-matmul{{rules='layers_=w4a16'}}")
    errors = output_errors(passes, original_model(passes, settings), settings)
    assert set(map(layer_error.kind_of, errors)) == set(KINDS)
    x, checkpoint = inputs_of_the_first_attention(settings), resolve(settings.model)
    form = parse_scheme("w4a16").format
    assert form is not None
    for name in "qkv":
        path = f"layers_0/self_attn/{name}_proj/kernel"
        weight = checkpoint.read(path)
        change = quantize_rtn(weight, form).dequantize() - weight
        expected = np.linalg.norm(x @ change.T) / np.linalg.norm(x @ weight.T)
        assert errors[path] == pytest.approx(expected, rel=1e-3)


def test_nothing_done_is_no_error_and_more_bits_less(parse):
    settings = parse()
    chosen = {
        "nothing": parse_spec(LAYOUT),
        "w8a16": parse_spec(f"{LAYOUT},quantize-matmul{{rules='layers_=w8a16'}}"),
        "pruned": parse_spec("canonicalize,lower-dense-matmul,prune,fuse-qkv,fuse-gate-up"),
    }
    errors = layer_error.measure(chosen, settings)
    assert all(set(map(layer_error.kind_of, found)) == set(KINDS) for found in errors.values())
    for path, error in errors["nothing"].items():
        assert error == 0 < errors["w8a16"][path] < 0.03 < 0.1 < errors["pruned"][path] < 0.9


def test_blocks_that_are_kept_are_no_error(parse, shared, tmp_path):
    """Looking at weights on the way must not make the pipeline forget in which form the checkpoint has them."""
    model = tmp_path / "gptq"
    model.mkdir()
    for file in (*(FIXTURES / "gptq").iterdir(), *(shared / "fixtures" / "stories260K").glob("tokenizer*")):
        shutil.copyfile(file, model / file.name)
    errors = layer_error.measure({"native": parse_spec(find_recipe("native").spec(loops=False))}, parse(model=model))
    assert set(errors["native"].values()) == {0.0}


def test_folded_scales_are_folded_back(parse):
    """SmoothQuant and SmoothAttention change weights by large factors and, before they are rounded, no output."""
    settings = parse()
    fold = "fold-scales{method=smoothquant,alpha=0.5},smooth-attention"
    chosen = {
        "folded": parse_spec(f"canonicalize,lower-dense-matmul,{fold},fuse-qkv,fuse-gate-up"),
        "rounded": parse_spec(
            f"canonicalize,lower-dense-matmul,{fold},fuse-qkv,fuse-gate-up,quantize-matmul{{rules='layers_=w8a16'}}"
        ),
    }
    errors = layer_error.measure(chosen, settings)
    assert max(errors["folded"].values()) < 1e-5 < min(errors["rounded"].values())
    assert max(errors["rounded"].values()) < 0.05


def test_the_command(parse, tmp_path, capsys):
    file, plot = tmp_path / "errors.json", tmp_path / "errors.svg"
    layer_error.run(parse(recipes=["w8a16,w4a16"], activations="f32", json=file, plot=plot))
    data = json.loads(file.read_text())
    rows = {(row["name"], row["kind"]): row for row in data["rows"]}
    assert data["experiment"] == "layer_error" and len(rows) == len(data["rows"]) == 2 * len(KINDS)
    table = capsys.readouterr().out
    for kind in KINDS:
        assert rows["w8a16", kind]["error"] < 0.2 * rows["w4a16", kind]["error"] and rows["w4a16", kind]["layer"] == 0
        assert f"{rows['w4a16', kind]['error']:.5g}" in table  # one layer, so the mean is its error
    assert plot.read_text().startswith("<svg")


def test_a_weight_that_gives_nothing():
    zero, one, gram = np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32), np.eye(3, dtype=np.float32)
    assert relative_error(zero, zero, gram) == 0 and relative_error(one, zero, gram) == np.inf
    assert relative_error(one, 2 * one, gram) == 0.5
