"""Peak memory and time of compiling a random Llama in bf16: `python tools/compile_memory.py --recipe w4a16-gptq`.

Writes a Hugging Face folder with random weights (1.5 billion parameters by default) and the tokenizer of another
model, runs `jaxserve compile` on it in a process of its own with a single small step, and prints the most memory that
process held at once, as a multiple of the bf16 weights, with its processor time a billion parameters.
"""

import argparse
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

SHAPE = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
SMALL = ["--max-num-seqs", "1", "--max-num-batched-tokens", "16", "--max-model-len", "512", "--kv-tokens", "512"]


def write_model(folder: pathlib.Path, tokenizer: pathlib.Path, layers: int, vocab: int) -> int:
    """A checkpoint with a file a layer; the number of its parameters."""
    width, mlp = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    kv = width // SHAPE["num_attention_heads"] * SHAPE["num_key_value_heads"]
    for path in tokenizer.glob("tokenizer*"):
        shutil.copy(path, folder)
    config = {**json.loads((tokenizer / "config.json").read_text()), **SHAPE, "head_dim": 64, "torch_dtype": "bfloat16"}
    config |= {"num_hidden_layers": layers, "vocab_size": vocab, "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    rng, count, where = np.random.default_rng(0), 0, {}

    def write(name: str, shapes: dict[str, tuple[int, ...]]) -> None:
        nonlocal count
        tensors = {key: _random(rng, shape) for key, shape in shapes.items()}
        save_file(tensors, folder / name)
        where.update(dict.fromkeys(tensors, name))
        count += sum(tensor.size for tensor in tensors.values())

    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes: dict[str, tuple[int, ...]] = {f"{at}.self_attn.{name}_proj.weight": (width, width) for name in "qo"}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (kv, width) for name in "kv"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (mlp, width) for name in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (width, mlp)}
        shapes |= {f"{at}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
        write(f"model-{layer}.safetensors", shapes)
    write("model-ends.safetensors", {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return count


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) == 1:
        return np.ones(shape, ml_dtypes.bfloat16)
    return (rng.standard_normal(shape, np.float32) / shape[-1] ** 0.5).astype(ml_dtypes.bfloat16)


def measure(arguments: list[str]) -> tuple[float, float, float]:
    """Runs the command line in a child: peak resident bytes, processor seconds, seconds."""
    start, child = time.perf_counter(), os.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-m", "jaxserve.cli", *arguments])
    _, status, usage = os.wait4(child, 0)
    if status:
        sys.exit(f"jaxserve {' '.join(arguments)}: exit status {os.waitstatus_to_exitcode(status)}")
    return usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime, time.perf_counter() - start


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default="w4a16", help="what to compile with (default w4a16)")
    parser.add_argument("--tokenizer", type=pathlib.Path, required=True, help="a Llama's folder: its tokenizer is used")
    parser.add_argument("--layers", type=int, default=24, help="layers of 60.8 million parameters (default 24)")
    parser.add_argument("--vocab", type=int, default=16384, help="tokens in the vocabulary (default 16384)")
    parser.add_argument("--calibration-sequences", help="of 512 tokens, for recipes that are calibrated")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jaxserve-memory-") as scratch:
        model = pathlib.Path(scratch) / "model"
        model.mkdir()
        count = write_model(model, options.tokenizer, options.layers, options.vocab)
        flags = ["--recipe", options.recipe, *SMALL]
        if options.calibration_sequences:
            flags += ["--calibration-sequences", options.calibration_sequences]
        peak, cpu, clock = measure(["compile", str(model), "-o", f"{scratch}/artifact", *flags])
    size, billions = 2 * count, count / 1e9
    print(f"{options.recipe}: {billions:.2f} billion parameters, {size / 1e9:.2f} GB in bf16")
    print(f"peak {peak / 1e9:.2f} GB, {peak / size:.2f} times the weights")
    print(f"{cpu / billions:.0f} s of processor time a billion parameters, {clock:.0f} s")


if __name__ == "__main__":
    main()
