"""A model written as a Hugging Face directory: what `HFCheckpoint` reads."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxserve.errors import UserError
from jaxserve.models.checkpoint import GenerationDefaults
from jaxserve.models.config import ModelConfig
from jaxserve.models.registry import FAMILIES
from jaxserve.models.safetensors_reader import SINGLE
from jaxserve.pallas_kernels import LinearScaling, Llama3Scaling


def write_checkpoint(
    folder: Path, config: ModelConfig, params: Iterable[tuple[str, np.ndarray]], generation: GenerationDefaults
) -> None:
    """config.json, generation_config.json and model.safetensors in a folder that exists; parameters by path, in their
    dtypes. UserError when config.json cannot say what the model is."""
    fields = hf_fields(config)
    sources = FAMILIES[config.family].hf_sources(config)
    tensors = {sources[path].name: np.ascontiguousarray(value) for path, value in params}
    save_file(tensors, folder / SINGLE)
    ids = {"eos_token_id": list(generation.eos_ids), "bos_token_id": generation.bos_id}
    sampling = {name: getattr(generation, name) for name in ("temperature", "top_p", "top_k", "repetition_penalty")}
    _write_json(folder / "generation_config.json", ids | sampling)
    _write_json(folder / "config.json", fields | ids)


def hf_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields of a config.json that `ModelConfig.from_hf` turns into `config`; UserError when there are none."""
    fields = {
        "model_type": config.family,
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_theta": config.rope.theta, **_scaling(config.rope.scaling)},
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": config.max_positions,
        "hidden_act": config.activation,
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
    }
    windows = sorted({window for window in config.windows if window is not None})
    if config.family == "mistral":
        fields["sliding_window"] = windows[0] if windows else None
    elif windows:
        kinds = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
        fields |= {"use_sliding_window": True, "sliding_window": windows[0], "layer_types": kinds}
    if ModelConfig.from_hf(fields) != config:
        raise UserError(f"a config.json cannot describe this {config.family} model")
    return fields


def _scaling(scaling: LinearScaling | Llama3Scaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
