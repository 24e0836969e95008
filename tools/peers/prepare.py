"""Writes what a peer needs to quantize and score the same model on the same tokens as this project does.

    python tools/peers/prepare.py --work=DIR --calibration=wiki.valid.tokens --text=wiki.test.raw

Runs in the project's own environment. DIR/original is a Hugging Face folder: config.json, float32 model.safetensors (a
GGUF's blocks dequantized), the tokenizer. DIR/tokens.npz holds `calibration` [sequences, length] and `windows`
[windows, context], token ids int32, and `text`, the name of the second: peers then need no tokenizer, and cannot cut
the texts otherwise than we do.
"""

import json
import pathlib
from typing import Any

import numpy as np
from absl import app, flags
from safetensors.numpy import save_file

from jaxserve.calibration import CalibrationOptions, open_tokenizer, read_calibration
from jaxserve.errors import UserError
from jaxserve.evaluate import read_text, text_windows
from jaxserve.models.checkpoint import Checkpoint
from jaxserve.models.config import ModelConfig
from jaxserve.models.llama import hf_sources
from jaxserve.models.resolve import resolve
from jaxserve.reporting import Reporter

WORK = flags.DEFINE_string("work", None, "folder to write to", required=True)
MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "what `jaxserve compile` takes; a model of type llama")
CALIBRATION = flags.DEFINE_string("calibration", None, "UTF-8 text to calibrate on", required=True)
SEQUENCES = flags.DEFINE_integer("calibration_sequences", 64, "sequences of the calibration text", lower_bound=1)
LENGTH = flags.DEFINE_integer("calibration_length", 512, "tokens of each of them", lower_bound=1)
TEXT = flags.DEFINE_string("text", None, "UTF-8 text to measure perplexity on", required=True)
CONTEXT = flags.DEFINE_integer("context", 2048, "tokens a window of it", lower_bound=2)
WINDOWS = flags.DEFINE_integer("windows", 40, "how many windows; 0 means all", lower_bound=0)


def llama_config(config: ModelConfig) -> dict[str, Any]:
    """The fields of a `config.json` of model_type llama; UserError for what that type cannot say."""
    if config.family != "llama" or config.qk_norm or config.rope.scaling is not None:
        raise UserError(f"only plain models of type llama can be written, not {config.family}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.activation,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied,
    }


def write_model(checkpoint: Checkpoint, folder: pathlib.Path) -> None:
    """The whole checkpoint as float32 in a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(llama_config(checkpoint.config), indent=1) + "\n")
    tensors = {
        source.name: np.ascontiguousarray(checkpoint.read(path), np.float32)
        for path, source in hf_sources(checkpoint.config).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint.write_tokenizer(folder)


def main(_: Any) -> None:
    """The command."""
    work, checkpoint = pathlib.Path(WORK.value), resolve(MODEL.value)
    write_model(checkpoint, work / "original")
    tokenizer = open_tokenizer(checkpoint)
    options = CalibrationOptions(pathlib.Path(CALIBRATION.value), SEQUENCES.value, LENGTH.value)
    calibration = read_calibration(options, tokenizer, checkpoint.config).ids
    text = pathlib.Path(TEXT.value)
    vocab, report = checkpoint.config.vocab, Reporter()
    windows = text_windows(tokenizer, vocab, read_text(text), CONTEXT.value, WINDOWS.value, report)
    np.savez(
        work / "tokens.npz", calibration=calibration, windows=np.asarray(windows, np.int32), text=np.asarray(text.name)
    )
    print(f"{work}: calibration {calibration.shape}, windows {len(windows)} of {CONTEXT.value} tokens")


if __name__ == "__main__":
    app.run(main)
