"""Checkpoints that AutoAWQ, GPTQModel and llm-compressor quantized: weights bit for bit, logits in float32."""

import hashlib
import json
import pathlib

import numpy as np
import pytest

from jaxserve.models.safetensors_reader import HFCheckpoint
from jaxserve.pallas_kernels import QuantFormat, QuantizedTensor
from tests.models.helpers import Runner

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "fixtures" / "quantized"
FORMATS = {
    "awq": QuantFormat(4, 32, "zero", "float16"),
    "awq_gptqmodel": QuantFormat(4, 64, "none", "bfloat16"),
    "gptq": QuantFormat(4, 64, "none", "float16"),
    "gptq_act_order": QuantFormat(4, 32, "zero", "float16", ordered=True),
    "gptq_int8": QuantFormat(8, None, "none", "float16"),
    "gptq_int3": QuantFormat(3, 32, "none", "float16"),
    "ct_w4a16": QuantFormat(4, 32, "zero", "bfloat16"),
    "ct_w4a16_sym": QuantFormat(4, 64, "none", "float16"),
    "ct_w3a16": QuantFormat(3, 32, "zero", "float32"),
    "ct_w8a8": QuantFormat(8, None, "none", "float16"),
    "ct_fp8": QuantFormat(8, None, "none", "bfloat16", element="e4m3"),
    "ct_w8a8_static": QuantFormat(8, None, "none", "bfloat16"),
}


def levels(tensor: QuantizedTensor) -> np.ndarray:
    """The integers q - z [O, I] in the model's order of inputs; the bytes of e4m3 codes."""
    if tensor.format.element == "e4m3":
        return tensor.codes().view(np.uint8).astype(np.int16)
    values, size = tensor.codes().astype(np.int16), tensor.format.group_size(tensor.shape[1])
    if tensor.format.offset == "zero":
        values = values - np.repeat(tensor.arrays["zero"], size, axis=1).astype(np.int16)
    if tensor.format.ordered:
        values = values[:, np.argsort(tensor.arrays["order"])]
    return values


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_of_the_tool(name):
    """Integers as the tool unpacks them, and float32 weights with the same bits."""
    checkpoint, expected = HFCheckpoint(FIXTURES / name), np.load(FIXTURES / name / "expected.npz")
    assert checkpoint.native and checkpoint.unused == ()
    sums = json.loads(str(expected["sha256"]))
    for path, spec in checkpoint.specs().items():
        module = path.removesuffix("/kernel").replace("layers_", "model.layers.").replace("/", ".")
        native, weight = checkpoint.read_native(path), checkpoint.read(path)
        if module not in sums:
            assert spec.format is None and not isinstance(native, QuantizedTensor)
            continue
        assert isinstance(native, QuantizedTensor) and native.format == spec.format == FORMATS[name]
        assert hashlib.sha256(native.dequantize().tobytes()).hexdigest() == sums.pop(module)
        assert weight.dtype == np.float32
        np.testing.assert_array_equal(weight, native.dequantize())
        if f"levels/{module}" in expected:
            np.testing.assert_array_equal(levels(native), expected[f"levels/{module}"])
    assert not sums


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_dequantized_weights(name):
    expected = np.load(FIXTURES / name / "expected.npz")
    (logits,) = Runner(HFCheckpoint(FIXTURES / name), length=16).logits(expected["input_ids"])
    np.testing.assert_allclose(logits, expected["logits"], atol=2e-4, rtol=1e-4)
