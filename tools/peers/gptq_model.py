"""What GPTQModel reaches with act-order in AutoGPTQ's sense: groups of inputs in the permuted order (`desc_act`).

It needs an environment of its own, with nothing of this project (Python 3.11 or later):

    python -m venv ENV
    ENV/bin/pip install torch==2.14.1 gptqmodel==7.7.0 transformers==5.24.0

    python tools/peers/prepare.py --work=DIR ...              (in the project's environment: model and tokens)
    CUDA_VISIBLE_DEVICES= ENV/bin/python tools/peers/gptq_model.py --work DIR --windows 8 desc-act-int4-g64

Only the linear layers of the blocks are quantized; asymmetric with an integer zero point, damping 0.01 as in the paper
(GPTQModel's own default is 0.05). Scales are float16, as GPTQModel stores them; weights are dequantized from its
checkpoint in float32. What is scored and how is in `measuring.py`.
"""

from typing import Any

import measuring
import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.quantization import FORMAT
from measuring import Quantized, Work
from safetensors import safe_open

CONFIGURATIONS = {f"desc-act-int{bits}-g64": bits for bits in (4, 3)}


def quantize(name: str, work: Work) -> Quantized:
    """Runs GPTQModel."""
    config = QuantizeConfig(
        bits=CONFIGURATIONS[name],
        group_size=64,
        sym=False,
        desc_act=True,
        act_group_aware=False,  # that would keep groups of neighbours together
        damp_percent=0.01,
        format=FORMAT.GPTQ_V2,  # zero points as they are, not less one
        device="cpu",
    )
    model = GPTQModel.load(str(work.folder / "original"), config, dtype=torch.float32)
    model.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in work.calibration.tolist()])
    folder = work.folder / "checkpoints" / name
    model.save(str(folder))
    return Quantized(work.model(), dequantized(folder))


def dequantized(folder: Any) -> measuring.Weights:
    """The weights [O, I] of a checkpoint as GPTQModel's torch kernel dequantizes them, but multiplied by the scales in
    float32: the kernel would round the product to 16 bits."""
    model = GPTQModel.load(str(folder), backend=BACKEND.GPTQ_TORCH, device="cpu")
    found = {}
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        for name, module in model.model.named_modules():
            if hasattr(module, "dequantize_weight"):
                module.scales = tensors.get_tensor(f"{name}.scales").float()
                found[name.removeprefix("model.")] = module.dequantize_weight().T.contiguous().float()
    return found


PEER = measuring.Peer(("gptqmodel", "transformers", "torch"), tuple(CONFIGURATIONS), quantize)

if __name__ == "__main__":
    measuring.main(PEER, __doc__)
