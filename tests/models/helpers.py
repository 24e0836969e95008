"""Running small models in tests: whole sequences without a cache, and checkpoint files made on the spot."""

import json
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.checkpoint import Checkpoint
from jaxserve.models.config import ModelConfig
from jaxserve.models.family import apply_params
from jaxserve.models.registry import make_module


class Runner:
    """A checkpoint's model on packed, padded prompts; every call has the same shapes, so it compiles once."""

    def __init__(self, checkpoint: Checkpoint, *, length: int = 64, dtype: str = "float32") -> None:
        self.length = length
        self.params = {path: jnp.asarray(checkpoint.read(path)).astype(dtype) for path in checkpoint.specs()}
        module = make_module(checkpoint.config, jnp.dtype(dtype))
        self._run = jax.jit(lambda *arguments: apply_params(module, *arguments))

    def logits(self, *prompts: Sequence[int]) -> list[np.ndarray]:
        """Logits [n, V] of every prompt, all of them packed into one step; padding is a segment of its own."""
        pad = self.length - sum(map(len, prompts))
        tokens = np.concatenate([*(np.asarray(prompt) for prompt in prompts), np.full(pad, 10**6)])
        positions = np.concatenate([*(np.arange(len(prompt)) for prompt in prompts), np.arange(pad)])
        segments = np.repeat(np.arange(len(prompts) + 1), [*map(len, prompts), pad])
        arrays = [jnp.asarray(array, jnp.int32) for array in (tokens, positions, segments, np.arange(self.length))]
        logits = np.asarray(self._run(self.params, *arrays))
        return np.split(logits, np.cumsum([len(prompt) for prompt in prompts]))[:-1]

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The `count` most likely ids after a prompt, one after another."""
        ids = [int(token) for token in prompt]
        for _ in range(count):
            ids.append(int(self.logits(ids)[0][-1].argmax()))
        return ids[len(prompt) :]


def copy_fixture(source: Path, folder: Path) -> Path:
    """A writable copy of a fixture directory's model files."""
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copyfile(source / name, folder / name)
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    """Set fields of a JSON file; `...` removes one."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))


def read_safetensors(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    blob = path.read_bytes()
    (length,) = struct.unpack_from("<Q", blob)
    return json.loads(blob[8 : 8 + length]), blob[8 + length :]


def write_safetensors(path: Path, header: Any, data: bytes) -> None:
    """A safetensors file of whatever header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def fixture_tensors(folder):
    """A fixture's weights by Hugging Face name."""
    header, data = read_safetensors(folder / "model.safetensors")
    header.pop("__metadata__")
    return {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], np.float32).reshape(entry["shape"])
        for name, entry in header.items()
    }


_GGUF_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "model.embed_tokens": "token_embd",
    "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """What llama.cpp calls a tensor of a Hugging Face checkpoint."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, stem = stem.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[stem]}.{kind}"
    return f"{_GGUF_NAMES[stem]}.{kind}"


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's conversion of q and k rows for its `llama` architecture."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write_gguf(
    path: Path, config: ModelConfig, tensors: Mapping[str, np.ndarray], *, type: str = "F32", **metadata: Any
) -> None:
    """A GGUF file of a model given with Hugging Face names; matrices are stored as `type`, vectors as F32."""
    arch = "llama" if config.family == "mistral" else config.family
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.mlp)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in metadata.items():
        writer.add_key_value(name.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    for name, array in tensors.items():
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            array = permute(array, config.heads if ".q_proj." in name else config.kv_heads)
        kind = gguf.GGMLQuantizationType[type if array.ndim == 2 else "F32"]
        known = name if name == "rope_freqs.weight" else gguf_name(name)
        writer.add_tensor(known, gguf.quants.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
