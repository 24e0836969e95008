"""Models in memory: the reference's logits, whatever the pipeline does, and one compilation."""

import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.calibration import CalibrationOptions
from jaxserve.errors import UserError
from jaxserve.pallas_kernels import OPS
from jaxserve.pallas_kernels._native import CUSTOM_CALLS, is_available
from jaxserve.passes.recipes import find_recipe, parse_spec
from jaxserve.rewritten import rewritten_model
from tests.calibration_support import Watch

FUSED = "canonicalize,lower-dense-matmul,fuse-qkv,fuse-gate-up"
PAGED = f"{FUSED},insert-paged-kv{{page=128,kv=f32}}"
SHORT_PAGES = f"{FUSED},insert-paged-kv{{page=5,kv=f32}}"  # 16 tokens do not fill four of them


@pytest.fixture(scope="module")
def stories(shared: pathlib.Path) -> pathlib.Path:
    return shared / "fixtures" / "stories260K"


@pytest.fixture(scope="module")
def expected(stories: pathlib.Path):
    return np.load(stories / "expected.npz")


@pytest.mark.parametrize("text", ["canonicalize", PAGED, SHORT_PAGES])
def test_logits_are_the_reference(stories, expected, text):
    ids = expected["input_ids"]
    model = rewritten_model(stories, text, len(ids))
    logits = np.asarray(model.window_logits(ids))
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected["logits"], atol=2e-4, rtol=1e-4)
    assert [stage.step.name for stage in model.stages] == [step.name for step in parse_spec(text)]
    assert set(model.params) == {entry.path for entry in model.stages[-1].result.graph.of_kind("param")}


@pytest.mark.parametrize("recipe", ["f32", "native", "w4a16", "w4a8kv4-qserve"])
def test_references_take_no_part_of_a_kernel(stories, expected, recipe):
    """The same weights give nearly the same logits, of programs with and without calls of the native library."""
    ids = expected["input_ids"]
    model = rewritten_model(stories, find_recipe(recipe).spec(loops=False), len(ids), CalibrationOptions(None, 2, 32))
    calls = [
        re.findall(r"custom_call @(\w+)", function.lower(model.params, ids).as_text())  # pyright: ignore
        for function in (model._logits, model._reference_logits)
    ]
    assert bool(set(calls[0]) & set(CUSTOM_CALLS)) == is_available()
    assert not set(calls[1]) & set(CUSTOM_CALLS)
    logits, references = (np.asarray(model.window_logits(ids, references=each)) for each in (False, True))
    assert references.dtype == np.float32
    close = 2e-4 if recipe == "f32" else 0.2
    np.testing.assert_allclose(logits, references, atol=close, rtol=1e-4)


def test_a_wrong_kernel_shows(stories, expected):
    ids = expected["input_ids"]
    OPS["jaxserve.dense_matmul"].register("cpu", lambda *_, out_dtype: lambda x, w: jnp.tanh(x @ w.T), name="wrong")
    try:
        model = rewritten_model(stories, PAGED, len(ids))
        np.testing.assert_allclose(model.window_logits(ids, references=True), expected["logits"], atol=2e-4, rtol=1e-4)
        assert np.abs(np.asarray(model.window_logits(ids)) - expected["logits"]).max() > 1
    finally:
        OPS["jaxserve.dense_matmul"].unregister("cpu", "wrong")


def test_windows_of_another_length(stories, expected):
    model = rewritten_model(stories, "canonicalize", 16)
    model.window_logits(expected["input_ids"])
    model.window_logits([1] * 16)
    assert model._logits._cache_size() == 1  # pyright: ignore[reportFunctionMemberAccess]
    with pytest.raises(ValueError, match=r"built for 16 tokens, not for \[15\]"):
        model.window_logits([1] * 15)


def test_calibrated_on_a_file_and_on_the_built_in_sample(stories, tmp_path):
    """Passes that only watch: what they saw depends on the text, what comes out does not."""
    file = tmp_path / "text.txt"
    file.write_text("Once upon a time there was a little dog. " * 40)
    seen = []
    for options in (CalibrationOptions(file, 4, 32), CalibrationOptions(sequences=4, length=32)):
        step = Watch("absmean")
        model = rewritten_model(stories, [*parse_spec(FUSED), step], 16, options)
        seen.append(step.seen)
    assert seen[0].keys() == seen[1].keys() and len(seen[0]) == 5 * 4
    path = "layers_0/mlp/gate_up_proj/kernel"
    assert not np.allclose(seen[0][path], seen[1][path], rtol=0.05)
    plain = rewritten_model(stories, FUSED, 16)
    for name, value in plain.params.items():
        np.testing.assert_array_equal(model.params[name], value)
    with pytest.raises(UserError, match=r"--calibration: text\.txt has \d+ tokens, less than 64 sequences of 512"):
        rewritten_model(stories, [*parse_spec(FUSED), Watch()], 16, CalibrationOptions(file))


def test_plain_pipelines_do_not_read_the_text(stories):
    rewritten_model(stories, FUSED, 16, CalibrationOptions(pathlib.Path("/nowhere")))
