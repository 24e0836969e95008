"""A trained model with outlier channels planted in it, and every recipe on a context of 8192 tokens.

The planted model computes what the trained one does: channels of the norms are multiplied by a power of two, and the
columns of the weights that read them are divided by it. Its activations are now such as large models have (Dettmers et
al., arXiv:2208.07339), which is what SmoothQuant was made for (Xiao et al., arXiv:2211.10438).
"""

import json
import math
import pathlib
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.calibration import CalibrationOptions
from jaxserve.experiments.scoring import window_nll
from jaxserve.passes.recipes import RECIPES, find_recipe
from jaxserve.rewritten import rewritten_model
from tests.models.helpers import fixture_tensors

OUTLIERS, FACTOR = (3, 40), 128.0
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def plant(tensors: dict[str, np.ndarray], layers: int) -> None:
    """Moves `FACTOR` from the weights that read a norm's channels into the norm."""
    for layer in range(layers):
        for norm, readers in READERS.items():
            tensors[f"model.layers.{layer}.{norm}.weight"][list(OUTLIERS)] *= FACTOR
            for reader in readers:
                tensors[f"model.layers.{layer}.{reader}.weight"][:, list(OUTLIERS)] /= FACTOR


def write_planted(folder: pathlib.Path, source: pathlib.Path, layers: int) -> pathlib.Path:
    """The first layers of the model with outliers, and with room for 8192 positions."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.npz", "*.safetensors"))
    tensors = {name: array.copy() for name, array in fixture_tensors(source).items()}
    plant(tensors, layers)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "num_hidden_layers": layers, "max_position_embeddings": 8192})
    )
    return folder


@pytest.fixture(scope="module")
def planted(stories_model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The whole model."""
    return write_planted(tmp_path_factory.mktemp("planted") / "model", stories_model, layers=5)


CALIBRATION = CalibrationOptions(sequences=8, length=128)  # the built-in text, little of it


def perplexity(model: pathlib.Path, spec: str, ids: list[int]) -> float:
    """exp of the mean of -log p of ids[1:]."""
    logits = rewritten_model(model, spec, len(ids), CALIBRATION).window_logits(ids)
    return math.exp(float(window_nll(logits, np.asarray(ids, np.int32))))


def w8a8(scheme: str, fold: str = "") -> str:
    """W8A8 with float32 between the matmuls, so that nothing else rounds."""
    rule = rf"quantize-matmul{{rules='^layers_\d+/={scheme}'}}"
    return ",".join(
        filter(None, ("canonicalize,lower-dense-matmul", fold, "fuse-qkv,fuse-gate-up", rule, "insert-paged-kv"))
    )


def test_smoothquant_recovers_what_static_w8a8_loses(
    planted: pathlib.Path, stories_model: pathlib.Path, story: list[int]
):
    exact = perplexity(planted, find_recipe("f32").spec(), story)
    assert exact == pytest.approx(perplexity(stories_model, find_recipe("f32").spec(), story), rel=1e-4)
    naive = perplexity(planted, w8a8("w8a8:static"), story)
    smooth = perplexity(planted, w8a8("w8a8:static", "fold-scales{scheme='w8a8:static'}"), story)
    assert naive > 10 * exact
    assert smooth < 1.10 * exact


def finite_at_8k(recipe: str, model: pathlib.Path, story: list[int]) -> None:
    ids = np.resize(np.asarray(story, np.int32), 8192)
    logits = np.asarray(rewritten_model(model, find_recipe(recipe).spec(), len(ids), CALIBRATION).window_logits(ids))
    assert logits.shape[0] == 8192 and np.isfinite(logits).all()


def test_one_layer_is_finite_at_8k(stories_model: pathlib.Path, tmp_path: pathlib.Path, story: list[int]):
    """With every kind of rounding that there is, in weights, activations and cache."""
    finite_at_8k("w4a8kv4-qserve", write_planted(tmp_path / "model", stories_model, layers=1), story)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_finite_at_8k(recipe: str, planted: pathlib.Path, story: list[int]):
    finite_at_8k(recipe, planted, story)
