"""The Llama-like families against the logits and greedy ids of the reference implementation."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.config import ModelConfig
from jaxserve.models.family import apply_params, param_specs
from jaxserve.models.registry import FAMILIES, make_module
from jaxserve.models.safetensors_reader import HFCheckpoint
from jaxserve.pallas_kernels import RopeSpec
from tests.models.helpers import Runner, copy_fixture

NAMES = ("llama", "llama_rope3", "mistral", "qwen2", "qwen3")


def assert_close(logits, expected):
    """Equal within what two float32 implementations may differ by."""
    np.testing.assert_allclose(logits, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("spelling", ["config.json", "config_v4.json"])
@pytest.mark.parametrize("name", NAMES)
def test_matches_reference(shared, tmp_path, name, spelling):
    source = shared / "fixtures" / name
    folder = copy_fixture(source, tmp_path / name)
    shutil.copyfile(source / spelling, folder / "config.json")
    checkpoint = HFCheckpoint(folder)
    assert checkpoint.unused == ()
    assert not checkpoint.native
    expected = np.load(source / "expected.npz")
    runner = Runner(checkpoint)
    for k in (0, 1):
        prompt = expected[f"input_ids_{k}"]
        assert_close(runner.logits(prompt)[0], expected[f"logits_{k}"])
        assert runner.greedy(prompt, 8) == expected[f"greedy_{k}"].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_packed_prompts_do_not_see_each_other(shared, name):
    expected = np.load(shared / "fixtures" / name / "expected.npz")
    first, second = expected["input_ids_0"], expected["input_ids_1"]
    packed = Runner(HFCheckpoint(shared / "fixtures" / name)).logits(first, second)
    assert_close(packed[0], expected["logits_0"])
    assert_close(packed[1], expected["logits_1"])


def test_stories(shared):
    expected = np.load(shared / "fixtures" / "stories260K" / "expected.npz")
    runner = Runner(HFCheckpoint(shared / "fixtures" / "stories260K"), length=80)
    assert_close(runner.logits(expected["input_ids"])[0], expected["logits"])
    assert runner.greedy(expected["input_ids"], 64) == expected["greedy"].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_bf16(shared, name):
    """Activations and weights in bf16: float32 logits that stay near those of float32."""
    expected = np.load(shared / "fixtures" / name / "expected.npz")
    runner = Runner(HFCheckpoint(shared / "fixtures" / name), dtype="bfloat16")
    (logits,) = runner.logits(expected["input_ids_1"])
    assert logits.dtype == np.float32
    error = np.abs(logits - expected["logits_1"])
    assert 0 < error.mean() < 0.05 * expected["logits_1"].std()


def test_parameters_of_another_dtype_are_cast_where_used(shared):
    checkpoint = HFCheckpoint(shared / "fixtures" / "qwen2")
    module = make_module(checkpoint.config, jnp.dtype("bfloat16"))
    wide = {path: jnp.asarray(checkpoint.read(path)) for path in checkpoint.specs()}
    narrow = {path: array.astype(jnp.bfloat16) for path, array in wide.items()}
    index = jnp.arange(5, dtype=jnp.int32)
    run = jax.jit(lambda params: apply_params(module, params, index, index, index * 0, index))
    np.testing.assert_array_equal(run(wide), run(narrow))


def test_logit_rows_choose_and_order_rows(shared):
    checkpoint = HFCheckpoint(shared / "fixtures" / "llama")
    module = make_module(checkpoint.config, jnp.dtype("float32"))
    params = {path: jnp.asarray(checkpoint.read(path)) for path in checkpoint.specs()}
    index = jnp.arange(6, dtype=jnp.int32)
    full = apply_params(module, params, index, index, index * 0, index)
    some = apply_params(module, params, index, index, index * 0, jnp.array([4, 1], jnp.int32))
    np.testing.assert_allclose(some, full[jnp.array([4, 1])], rtol=1e-5, atol=1e-5)


BASE = ModelConfig(
    family="llama", vocab=11, width=8, layers=2, heads=4, kv_heads=2, head_dim=6, mlp=10, norm_eps=1e-5,
    rope=RopeSpec(6, 1e4), tied=False, max_positions=16, windows=(None, None),
)  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": True},
        {"qkv_bias": True, "o_bias": True},
        {"mlp_bias": True, "qk_norm": True},
        {"activation": "gelu", "windows": (2, None)},
    ],
    ids=str,
)
def test_parameters_are_those_that_checkpoints_name(changes):
    config = dataclasses.replace(BASE, **changes)
    specs = param_specs(make_module(config, jnp.dtype("bfloat16")))
    assert set(specs) == set(FAMILIES["llama"].hf_sources(config))
    assert {spec.dtype.name for spec in specs.values()} == {"bfloat16"}
    assert specs["layers_1/self_attn/q_proj/kernel"].shape == (24, 8)
    assert specs["layers_1/self_attn/v_proj/kernel"].shape == (12, 8)
    assert specs["layers_0/mlp/down_proj/kernel"].shape == (8, 10)
    assert ("lm_head/kernel" in specs) is not config.tied
    logits = jax.eval_shape(
        lambda params, index: apply_params(
            make_module(config, jnp.dtype("bfloat16")), params, index, index, index, index[:3]
        ),
        specs,
        jax.ShapeDtypeStruct((7,), jnp.int32),
    )
    assert (logits.shape, logits.dtype) == ((3, 11), jnp.float32)


def test_large_shapes_are_described_without_allocating():
    config = dataclasses.replace(BASE, vocab=200_000, width=16384, mlp=65536).with_layers(1)
    assert param_specs(make_module(config, jnp.dtype("float32")))["lm_head/kernel"].shape == (200_000, 16384)


def test_with_layers_cuts_windows():
    config = dataclasses.replace(BASE, windows=(3, None))
    assert config.with_layers(1).windows == (3,)
    with pytest.raises(ValueError, match="windows has 2 entries for 5 layers"):
        dataclasses.replace(config, layers=5)
