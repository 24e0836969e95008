"""Configs: the fields of config.json and of GGUF metadata, right and wrong."""

import json
import math

import pytest

from jaxserve.errors import UserError
from jaxserve.models.checkpoint import GenerationDefaults
from jaxserve.models.config import Fields, ModelConfig
from jaxserve.models.errors import CheckpointError
from jaxserve.pallas_kernels import LinearScaling, Llama3Scaling, RopeSpec

LLAMA = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "llama_rope3", "mistral", "qwen2", "qwen3"])
def test_both_spellings_mean_the_same(shared, name):
    folder = shared / "fixtures" / name
    new, old = (json.loads((folder / file).read_text()) for file in ("config.json", "config_v4.json"))
    assert ModelConfig.from_hf(new) == ModelConfig.from_hf(old)


def test_a_config_describes_itself_in_json():
    values = json.loads(json.dumps(ModelConfig.from_hf(LLAMA).to_json()))
    assert values["width"] == 64
    assert values["rope"] == {"dim": 16, "theta": 10000.0, "scaling": None, "interleaved": False}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, RopeSpec(16, 10000.0)),
        ({"rope_theta": 5e5}, RopeSpec(16, 5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeSpec(16, 10000.0, LinearScaling(2.0))),
        ({"rope_parameters": {"rope_theta": 7.0, "partial_rotary_factor": 0.5}}, RopeSpec(8, 7.0)),
        ({"head_dim": 32, "partial_rotary_factor": 0.25}, RopeSpec(8, 10000.0)),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            RopeSpec(16, 5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        ),
    ],
)  # fmt: skip
def test_rotations(changes, expected):
    assert ModelConfig.from_hf(LLAMA | changes).rope == expected


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral"}, (4096, 4096)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None)),
        ({"model_type": "mistral", "sliding_window": 7}, (7, 7)),
        ({"model_type": "qwen2", "sliding_window": 7}, (None, None)),
        ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}, (None, 7)),
        (
            {
                "model_type": "qwen3", "sliding_window": 7, "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (7, None),
        ),
        ({"sliding_window": 7}, (None, None)),
    ],
)  # fmt: skip
def test_windows(changes, windows):
    assert ModelConfig.from_hf(LLAMA | changes).windows == windows


def test_flags_of_the_families():
    llama = ModelConfig.from_hf(LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias, llama.qk_norm) == (True, True, True, False)
    qwen2 = ModelConfig.from_hf(LLAMA | {"model_type": "qwen2"})
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.head_dim) == (True, False, 16)
    qwen3 = ModelConfig.from_hf(LLAMA | {"model_type": "qwen3"})
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)


def test_old_configs_lack_fields():
    config = ModelConfig.from_hf({name: value for name, value in LLAMA.items() if name != "num_key_value_heads"})
    assert (config.kv_heads, config.head_dim, config.tied, config.activation) == (4, 16, False, "silu")


def test_unknown_family_lists_the_known():
    with pytest.raises(UserError, match=r"model_type is 'mamba'.*supported: llama, mistral, qwen2, qwen3"):
        ModelConfig.from_hf(LLAMA | {"model_type": "mamba"})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", ..., "'hidden_size' is missing"),
        ("hidden_size", "64", "'hidden_size' must be a whole number, got '64'"),
        ("hidden_size", 64.0, "'hidden_size' must be a whole number"),
        ("hidden_size", True, "'hidden_size' must be a whole number"),
        ("hidden_size", 2**60, "'hidden_size' is 1152921504606846976, outside"),
        ("num_hidden_layers", 10**9, "'num_hidden_layers' is 1000000000, outside"),
        ("num_hidden_layers", -1, "'num_hidden_layers' is -1, outside"),
        ("num_key_value_heads", 3, "'num_key_value_heads' is 3, which does not divide"),
        ("head_dim", 15, "'head_dim' is 15, of which 15 channels"),
        ("rms_norm_eps", math.nan, "'rms_norm_eps' is nan; it must be finite"),
        ("rms_norm_eps", math.inf, "'rms_norm_eps' is inf; it must be finite"),
        ("rms_norm_eps", 0, "'rms_norm_eps' is 0; it must be finite"),
        ("rope_theta", math.nan, "'rope_theta' is nan; it must be finite"),
        ("rope_theta", 10**400, "'rope_theta' is 1000.*; it must be finite"),
        ("rope_theta", "big", "'rope_theta' must be a number, got 'big'"),
        ("rope_scaling", {"type": "yarn", "factor": 2}, "'rope_scaling.type' is 'yarn'; supported: default, linear"),
        ("rope_scaling", {"rope_type": "linear", "factor": -2}, "'rope_scaling.factor' is -2; it must be"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 2}, "'rope_scaling.low_freq_factor' is missing|must be"),
        ("rope_scaling", [1], "'rope_scaling' must be an object"),
        ("rope_parameters", {"partial_rotary_factor": 9}, "of which 144 channels would rotate"),
        ("tie_word_embeddings", "no", "'tie_word_embeddings' must be true or false"),
        ("hidden_act", "swoosh", "'hidden_act' is 'swoosh'; supported: gelu"),
        ("model_type", 3, "'model_type' must be a string"),
    ],
)
def test_bad_fields_are_named(field, value, message):
    values = {name: item for name, item in (LLAMA | {field: value}).items() if item is not ...}
    with pytest.raises(CheckpointError, match=message) as caught:
        ModelConfig.from_hf(values, "dir/config.json")
    assert str(caught.value).startswith("dir/config.json: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_layer_types_must_fit():
    values = LLAMA | {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["full_attention"]}
    with pytest.raises(CheckpointError, match="'layer_types' must list 2"):
        ModelConfig.from_hf(values)


GGUF = {
    "general.architecture": "llama", "llama.block_count": 2, "llama.embedding_length": 64,
    "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2, "llama.feed_forward_length": 96,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.context_length": 128, "llama.vocab_size": 256,
}  # fmt: skip


def test_gguf_metadata_and_tensors_make_a_config():
    config = ModelConfig.from_gguf(GGUF, {"token_embd.weight": (300, 64), "blk.0.attn_q.bias": (64,)})
    assert (config.vocab, config.tied, config.qkv_bias, config.o_bias) == (300, True, True, False)
    assert config.rope == RopeSpec(16, 10000.0)
    scaled = GGUF | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    config = ModelConfig.from_gguf(scaled | {"llama.attention.sliding_window": 5}, {"output.weight": (300, 64)})
    assert (config.vocab, config.tied, config.windows) == (256, False, (5, 5))
    assert config.rope == RopeSpec(16, 10000.0, LinearScaling(4.0))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("llama.block_count", ..., "'llama.block_count' is missing"),
        ("llama.block_count", 2**40, "'llama.block_count' is 1099511627776, outside"),
        ("llama.attention.head_count", [4, 4], "'llama.attention.head_count' must be a whole number"),
        ("llama.attention.head_count_kv", 3, "'llama.attention.head_count_kv' is 3, which does not divide"),
        ("llama.attention.layer_norm_rms_epsilon", math.nan, "'llama.attention.layer_norm_rms_epsilon' is nan"),
        ("llama.rope.scaling.type", "yarn", "'llama.rope.scaling.type' is 'yarn'; supported: none, linear"),
        ("llama.rope.dimension_count", 18, "'llama.rope.dimension_count' is 18; it must be even and at most"),
        ("llama.expert_count", 8, "'llama.expert_count' is set"),
        ("llama.attention.value_length", 8, "'llama.attention.value_length' must equal"),
        ("general.architecture", ..., "'general.architecture' is missing"),
    ],
)
def test_bad_gguf_fields_are_named(field, value, message):
    values = {name: item for name, item in (GGUF | {field: value}).items() if item is not ...}
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_gguf(values, {}, "model.gguf")


def test_unknown_architecture_lists_the_known():
    with pytest.raises(UserError, match=r"m\.gguf: general\.architecture is 'rwkv'.*supported: llama, qwen2, qwen3"):
        ModelConfig.from_gguf({"general.architecture": "rwkv"}, {}, "m.gguf")


def test_generation_defaults():
    fallback = GenerationDefaults(eos_ids=(2,), bos_id=1)
    values = {"eos_token_id": [7, 5, 7], "temperature": 0, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1}
    defaults = GenerationDefaults.from_fields(Fields(values, "g.json"), 10, fallback)
    assert defaults == GenerationDefaults((7, 5), 1, 0.0, 0.9, 40, 1.1)
    assert GenerationDefaults.from_json(json.loads(json.dumps(defaults.to_json()))) == defaults
    assert GenerationDefaults.from_fields(Fields({"eos_token_id": None}, "g.json"), 10, fallback) == fallback
    assert GenerationDefaults.from_fields(Fields({"eos_token_id": 3}, "g.json"), 10).eos_ids == (3,)


@pytest.mark.parametrize(
    "values", [{"eos_token_id": 10}, {"eos_token_id": ["x"]}, {"bos_token_id": -1}, {"temperature": -0.1}]
)
def test_bad_generation_defaults(values):
    with pytest.raises(CheckpointError, match=f"g.json: field '{next(iter(values))}'"):
        GenerationDefaults.from_fields(Fields(values, "g.json"), 10)
