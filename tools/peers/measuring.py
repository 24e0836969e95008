"""What the scripts of all peers share: the model and tokens of `prepare.py`, layer errors, perplexity and results.

Perplexity is that of the dequantized weights in float32; positions 1 .. T-1 of every window of T tokens are scored.

The error of a layer is ||X W^T - X Q^T|| / ||X W^T||, X the original model's activations on the calibration text, W its
weight, Q what the peer made of it, with the scales that it folded divided out. With G = X^T X, ||X E^T||^2 =
trace(E G E^T), so X is not kept.

DIR/results/NAME.json is written after quantizing and after every window, and what it holds is not computed again: stop
a script and start it as you like.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

SHOWN = ("layers.0.self_attn.q_proj", "layers.10.mlp.down_proj", "layers.29.self_attn.o_proj")
Weights = dict[str, Tensor]  # [O, I] by the layer's name, `layers.0.self_attn.q_proj`


@dataclasses.dataclass(frozen=True)
class Quantized:
    """`model` after a peer worked on it, read for what is no linear layer of a block (norms); `final` the weights
    that its layers multiply by, dequantized; `folded` those before rounding, if scales were folded into them."""

    model: nn.Module
    final: Weights
    folded: Weights | None = None


@dataclasses.dataclass(frozen=True)
class Peer:
    """`quantize(name, work)` makes a configuration (None: there is none, as for the original model); `prepare(name,
    model)` changes the dequantized model before it is scored; `packages` are those whose versions count."""

    packages: Sequence[str]
    names: Sequence[str]
    quantize: Callable[[str, "Work"], Quantized | None]
    prepare: Callable[[str, PreTrainedModel], None] = lambda name, model: None


class Work:
    """The folder that `prepare.py` has made, and where results go."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        tokens = np.load(folder / "tokens.npz")
        self.calibration = torch.from_numpy(tokens["calibration"].astype(np.int64))
        self.windows = torch.from_numpy(tokens["windows"].astype(np.int64))
        self.text = str(tokens["text"])
        for name in ("results", "weights"):
            (folder / name).mkdir(exist_ok=True)

    def model(self) -> PreTrainedModel:
        """The original model in float32."""
        return AutoModelForCausalLM.from_pretrained(self.folder / "original", dtype=torch.float32).eval()

    def grams(self) -> Weights:
        """X^T X [I, I] of the inputs X of every linear layer, by the first layer that reads them."""
        path = self.folder / "grams.safetensors"
        if not path.exists():
            save_file(collect_grams(self.model(), self.calibration), path)
        return load_file(path)


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers of the blocks of a model by name."""
    for name, module in model.get_submodule("model").named_modules():
        if isinstance(module, nn.Linear):
            yield name, module


def gram_name(layer: str) -> str:
    """The layer under whose name `Work.grams` keeps the Gram matrix of this layer's inputs."""
    stem, name = layer.rsplit(".", 1)
    return f"{stem}.{ {'k_proj': 'q_proj', 'v_proj': 'q_proj', 'up_proj': 'gate_proj'}.get(name, name) }"


@torch.inference_mode()
def collect_grams(model: PreTrainedModel, calibration: Tensor) -> Weights:
    """See `Work.grams`; calibration [S, T] int64."""
    grams: Weights = {}
    for name, module in linear_layers(model):
        if gram_name(name) == name:
            grams[name] = torch.zeros(module.in_features, module.in_features)

            def add(_: nn.Module, inputs: tuple[Tensor, ...], gram: Tensor = grams[name]) -> None:
                x = inputs[0].flatten(0, -2)
                gram.addmm_(x.T, x)

            module.register_forward_pre_hook(add)
    for rows in calibration.split(2):
        model.model(rows)
    return grams


def folded_scales(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """a [O, 1] and b [1, I] with after = a * before * b: what folding did to a weight. Zeros say nothing."""
    logs = (after.double() / before.double()).log()
    logs[before == 0] = math.nan
    rows = torch.zeros(len(before), 1, dtype=torch.float64)
    for _ in range(20):
        columns = (logs - rows).nanmean(0, keepdim=True)
        rows = (logs - columns).nanmean(1, keepdim=True)
    if (logs - rows - columns).nan_to_num().abs().max() > 1e-3:
        raise ValueError("a folded weight is not the original one with scaled inputs and outputs")
    return rows.exp(), columns.exp()


def layer_errors(original: Weights, final: Weights, folded: Weights | None, grams: Weights) -> dict[str, float]:
    """The relative output error of every layer; the arguments are as in `Quantized` and `Work.grams`."""

    def energy(weight: Tensor, gram: Tensor) -> float:
        return float(torch.sum((weight.double() @ gram.double()) * weight.double()))

    errors = {}
    for name, weight in original.items():
        rows, columns = folded_scales(weight, folded[name]) if folded else (1.0, 1.0)
        change = final[name].double() / rows / columns - weight.double()
        gram = grams[gram_name(name)]
        errors[name] = math.sqrt(energy(change, gram) / energy(weight, gram))
    return errors


def make_weights(peer: Peer, name: str, work: Work) -> dict[str, Any]:
    """Quantizes, saves the dequantized model, and says what was measured on the way."""
    start = time.perf_counter()
    made = peer.quantize(name, work)
    if made is None:
        return {}
    seconds = round(time.perf_counter() - start, 1)
    original = work.model()
    weights = {layer: module.weight.detach() for layer, module in linear_layers(original)}
    errors = layer_errors(weights, made.final, made.folded, work.grams())
    linear = {f"model.{layer}.weight": weight.contiguous() for layer, weight in made.final.items()}
    others = {key: value.clone() for key, value in made.model.state_dict().items() if key not in linear}
    wanted = original.state_dict().keys() - {"lm_head.weight" if original.config.tie_word_embeddings else ""}
    state = {key: value for key, value in (others | linear).items() if key in wanted}
    save_file(state, work.folder / "weights" / f"{name}.safetensors")
    return {"quantize_seconds": seconds, "layer_errors": errors}


def load_weights(peer: Peer, name: str, work: Work) -> PreTrainedModel:
    """The dequantized model as it is scored."""
    model, path = work.model(), work.folder / "weights" / f"{name}.safetensors"
    if path.exists():
        missing, unexpected = model.load_state_dict(load_file(path), strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise ValueError(f"{path}: {missing=} {unexpected=}")
    peer.prepare(name, model)
    return model


@torch.inference_mode()
def window_nll(model: PreTrainedModel, ids: Tensor) -> float:
    """Sum over positions 1 .. T-1 of -log p(token | window so far); ids [T] int64."""
    logits = model(ids[None], use_cache=False).logits[0, :-1]
    return float(nn.functional.cross_entropy(logits, ids[1:], reduction="none").double().sum())


def scores(name: str, sums: list[float], text: str, context: int) -> dict[str, Any]:
    """What a result says of perplexity; `jaxserve.experiments.perplexity --against` reads `windows` and `rows`."""
    nll = [total / (context - 1) for total in sums]
    found: dict[str, Any] = {"nll_sums": sums, "scored_a_window": context - 1}
    for count in (8, 40):
        if len(nll) >= count:
            found[f"perplexity_{count}"] = math.exp(math.fsum(nll[:count]) / count)
    row = {"name": name, "nll": nll, "perplexity": math.exp(math.fsum(nll) / len(nll))}
    return {**found, "windows": {"text": text, "context": context, "windows": len(nll)}, "rows": [row]}


def write(path: pathlib.Path, result: Mapping[str, Any]) -> None:
    """Replaces a result at once, so that a run may be stopped at any time."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(path)


def run(peer: Peer, name: str, work: Work, windows: int) -> None:
    """One configuration: whatever of it is not there yet."""
    path, weights = (work.folder / kind for kind in (f"results/{name}.json", f"weights/{name}.safetensors"))
    result = json.loads(path.read_text()) if path.exists() else {}
    if not result or ("layer_errors" in result) != weights.exists():
        versions = {package: version(package) for package in peer.packages}
        result = {"name": name, "versions": versions, **make_weights(peer, name, work)}
        write(path, result)
    sums = result.get("nll_sums", [])
    if len(sums) < windows:
        model = load_weights(peer, name, work)
        for ids in work.windows[len(sums) : windows]:
            start = time.perf_counter()
            sums.append(window_nll(model, ids))
            result |= scores(name, sums, work.text, len(ids))
            write(path, result)
            done = f"{name} {len(sums)} {result['rows'][0]['perplexity']:.4f}"
            print(done, f"{time.perf_counter() - start:.1f} s", flush=True)
    shown = {layer: round(result["layer_errors"][layer], 4) for layer in SHOWN if "layer_errors" in result}
    print(name, {key: value for key, value in result.items() if key.startswith("perplexity")}, shown, flush=True)


def main(peer: Peer, description: str | None) -> None:
    """The command of a peer's script."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder that prepare.py has made")
    parser.add_argument("--windows", type=int, default=8, help="score the first N windows")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    names = ", ".join(peer.names)
    parser.add_argument("names", nargs="+", choices=peer.names, metavar="NAME", help=names)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    work = Work(arguments.work)
    for name in arguments.names:
        run(peer, name, work, min(arguments.windows, len(work.windows)))
