"""What llm-compressor reaches on a model: perplexity by window, and the output error of every linear layer.

It needs an environment of its own, with nothing of this project (Python 3.10 to 3.13):

    python -m venv ENV
    ENV/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1 transformers==5.17.0

    python tools/peers/prepare.py --work=DIR ...              (in the project's environment: model and tokens)
    ENV/bin/python tools/peers/llm_compressor.py --work DIR --windows 8 float32 gptq-int4-g64 awq-int4-g64
    ENV/bin/python tools/peers/llm_compressor.py --work DIR --windows 40 gptq-int4-g64   (scores the other 32)

Only the linear layers of the blocks are quantized. What is scored and how is in `measuring.py`; activations, where a
configuration quantizes them, are rounded by compressed-tensors' own forward. GPTQ runs many small operations: on busy
cores one thread is much faster than several.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import compressed_tensors.quantization as ct
import measuring
import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from measuring import Quantized, Work, linear_layers
from transformers import PreTrainedModel

if not torch.accelerator.is_available():  # AWQ pins its cache, which fails where there is nothing to pin it for
    IntermediatesCache.pin_memory = lambda *_, **__: None

TOKEN_INT8 = ct.QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
GROUP = 64


@dataclasses.dataclass(frozen=True)
class Configuration:
    """`modifiers()` is the recipe; `sequences` of the calibration text are used (None: all); `folds` says that the
    recipe folds scales; `activations` is how the inputs of linear layers are quantized."""

    modifiers: Callable[[], list[Any]]
    sequences: int | None = None
    folds: bool = False
    activations: ct.QuantizationArgs | None = None


def group_scheme(bits: int) -> dict[str, ct.QuantizationScheme]:
    """Weights alone, asymmetric with an integer zero point, in groups."""
    weights = ct.QuantizationArgs(num_bits=bits, type="int", symmetric=False, strategy="group", group_size=GROUP)
    return {"group_0": ct.QuantizationScheme(targets=["Linear"], weights=weights)}


def w8a8_scheme() -> dict[str, ct.QuantizationScheme]:
    """Weights int8 per output channel, activations int8 per token as they come, both symmetric."""
    weights = ct.QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")
    return {"group_0": ct.QuantizationScheme(targets=["Linear"], weights=weights, input_activations=TOKEN_INT8)}


def rounded(scheme: dict[str, ct.QuantizationScheme]) -> QuantizationModifier:
    """Round to nearest."""
    return QuantizationModifier(config_groups=scheme, ignore=["lm_head"])


def awq(bits: int, sequences: int | None = None) -> Configuration:
    """AWQ with llm-compressor's defaults: duo scaling, 20 grid points; it has no clipping."""
    return Configuration(lambda: [AWQModifier(), rounded(group_scheme(bits))], sequences, folds=True)


def gptq(bits: int, order: Literal["static"] | None) -> Configuration:
    """GPTQ with damping 0.01 and groups fixed beforehand; `order` static quantizes loud input channels first.

    llm-compressor 0.14 refuses groups in permuted order (AutoGPTQ's desc_act).
    """

    def modifiers() -> list[Any]:
        actorder = None if order is None else ct.ActivationOrdering(order)
        scheme = group_scheme(bits)
        return [GPTQModifier(config_groups=scheme, ignore=["lm_head"], actorder=actorder, dampening_frac=0.01)]

    return Configuration(modifiers)


def w8a8(alpha: float | None) -> Configuration:
    """W8A8 after SmoothQuant of the inputs of q/k/v and gate/up with strength alpha (None: without)."""

    def modifiers() -> list[Any]:
        smooth = [] if alpha is None else [SmoothQuantModifier(smoothing_strength=alpha)]
        return [*smooth, rounded(w8a8_scheme())]

    return Configuration(modifiers, folds=alpha is not None, activations=TOKEN_INT8)


CONFIGURATIONS = {
    "rtn-int4-g64": Configuration(lambda: [rounded(group_scheme(4))]),
    "rtn-int3-g64": Configuration(lambda: [rounded(group_scheme(3))]),
    "gptq-int4-g64": gptq(4, None),
    "gptq-int4-g64-actorder-static": gptq(4, "static"),
    "gptq-int3-g64": gptq(3, None),
    "gptq-int3-g64-actorder-static": gptq(3, "static"),
    "awq-int4-g64": awq(4),
    "awq-int4-g64-8-sequences": awq(4, sequences=8),
    "awq-int3-g64": awq(3),
    "awq-int3-g64-8-sequences": awq(3, sequences=8),
    "w8a8": w8a8(None),
    "smoothquant-0.5-w8a8": w8a8(0.5),
    "smoothquant-0.8-w8a8": w8a8(0.8),
}


def quantize(name: str, work: Work) -> Quantized | None:
    """Runs llm-compressor."""
    if name not in CONFIGURATIONS:
        return None
    configuration, model = CONFIGURATIONS[name], work.model()
    rows = work.calibration[: configuration.sequences]
    batches: Any = [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in rows]
    oneshot(
        model=model,
        dataset=torch.utils.data.DataLoader(batches, batch_size=None),
        recipe=configuration.modifiers(),
        num_calibration_samples=len(rows),
        max_seq_length=rows.shape[1],
    )
    final, folded = {}, {}
    for layer, module in linear_layers(model):
        scheme: Any = module.quantization_scheme
        final[layer] = ct.forward_quantize(module, module.weight, "weight", scheme.weights).detach()
        folded[layer] = module.weight.detach()
    return Quantized(model, final, folded if configuration.folds else None)


def prepare(name: str, model: PreTrainedModel) -> None:
    """Lets compressed-tensors quantize the inputs of linear layers."""
    activations = CONFIGURATIONS[name].activations if name in CONFIGURATIONS else None
    if activations is not None:
        scheme = ct.QuantizationScheme(targets=["Linear"], input_activations=activations)
        config = ct.QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
        ct.apply_quantization_config(model, config)


PACKAGES = ("llmcompressor", "compressed-tensors", "transformers", "torch")
PEER = measuring.Peer(PACKAGES, ("float32", *CONFIGURATIONS), quantize, prepare)

if __name__ == "__main__":
    measuring.main(PEER, __doc__)
