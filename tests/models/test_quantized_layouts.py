"""Packing of quantized safetensors against plain numpy, and files whose parts do not fit together."""

import json
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxserve.cli import main
from jaxserve.errors import UserError
from jaxserve.models.errors import CheckpointError
from jaxserve.models.packed import unpack_words
from jaxserve.models.safetensors_reader import HFCheckpoint
from jaxserve.pallas_kernels import QuantFormat, QuantizedTensor
from tests.models.helpers import edit_json, read_safetensors, write_safetensors
from tests.models.test_quantized import FIXTURES

Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"
Q_PATH = "layers_0/self_attn/q_proj/kernel"
Tensors = dict[str, np.ndarray]


def load(folder: pathlib.Path) -> Tensors:
    header, data = read_safetensors(folder / "model.safetensors")
    header.pop("__metadata__", None)
    kinds = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I8": np.int8, "I32": np.int32, "I64": np.int64}
    kinds["F8_E4M3"] = np.uint8
    return {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], kinds[entry["dtype"]]).reshape(entry["shape"]).copy()
        for name, entry in header.items()
    }


def save(folder: pathlib.Path, tensors: Tensors) -> None:
    names = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int8": "I8", "int32": "I32", "int64": "I64"}
    names["uint8"] = "F8_E4M3"
    header, data = {}, b""
    for name, array in tensors.items():
        blob = np.ascontiguousarray(array).tobytes()
        place = [len(data), len(data) + len(blob)]
        header[name] = {"dtype": names[array.dtype.name], "shape": list(array.shape), "data_offsets": place}
        data += blob
    write_safetensors(folder / "model.safetensors", header, data)


@pytest.fixture
def copy(tmp_path: pathlib.Path) -> Callable[[str], pathlib.Path]:
    """Makes a writable copy of a fixture."""

    def make(name: str) -> pathlib.Path:
        (tmp_path / name).mkdir()
        for file in ("config.json", "model.safetensors"):
            shutil.copyfile(FIXTURES / name / file, tmp_path / name / file)
        return tmp_path / name

    return make


def edited(folder: pathlib.Path, change: Callable[[Tensors], Any]) -> pathlib.Path:
    tensors = load(folder)
    change(tensors)
    save(folder, tensors)
    return folder


def set_quantization(folder: pathlib.Path, **changes: Any) -> None:
    values = json.loads((folder / "config.json").read_text())["quantization_config"] | changes
    edit_json(folder / "config.json", quantization_config={k: v for k, v in values.items() if v is not ...})


def set_scheme(folder: pathlib.Path, section: str, **changes: Any) -> None:
    groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
    groups["group_0"][section] = (groups["group_0"][section] or {}) | changes
    set_quantization(folder, config_groups=groups)


# ---- packing


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_codes_follow_one_another_from_the_lowest_bit_on(bits):
    """Against whole rows as one large number: 40 codes, whose last word is not full where bits does not divide it."""
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 40), dtype=np.uint8)
    rows = [sum(int(code) << (bits * place) for place, code in enumerate(row)) for row in codes]
    size = -(-40 * bits // 32)
    words = np.array([np.frombuffer(row.to_bytes(4 * size, "little"), np.int32) for row in rows])
    np.testing.assert_array_equal(unpack_words(words, bits, 40), codes)


def test_nibbles_of_awq_by_hand(copy):
    """One word, written down as AutoAWQ's documentation orders it: outputs 0 2 4 6 1 3 5 7 from the lowest bits on."""

    def set_word(tensors: Tensors) -> None:
        tensors[f"{Q}.qweight"][5, 1] = 0x75316420  # output 8 + k holds code k

    native = HFCheckpoint(edited(copy("awq"), set_word)).read_native(Q_PATH)
    assert isinstance(native, QuantizedTensor)
    assert native.codes()[8:16, 5].tolist() == list(range(8))


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Rows of codes as int32 words, for widths that fill them."""
    rows = [sum(int(code) << (bits * place) for place, code in enumerate(row)) for row in codes]
    return np.array([np.frombuffer(row.to_bytes(codes.shape[1] * bits // 8, "little"), np.int32) for row in rows])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_of_every_width_against_numpy(copy, bits, version):
    """w = s * (q - z), with zero points from 1 to the largest and groups in no order."""
    rng, folder = np.random.default_rng(bits), copy("gptq_act_order")
    outputs, inputs, group = 64, 64, 32
    codes = rng.integers(0, 1 << bits, (outputs, inputs))
    zeros, scales = rng.integers(1, 1 << bits, (2, outputs)), rng.standard_normal((2, outputs)).astype(np.float16)
    index = rng.permutation(np.arange(inputs) // group).astype(np.int32)

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith((".qweight", ".qzeros"))]:
            layer = name.rpartition(".")[0]
            width, count = tensors[f"{layer}.scales"].shape[1], tensors[f"{layer}.g_idx"].shape[0]
            tensors[f"{layer}.qweight"] = np.zeros((count * bits // 32, width), np.int32)
            tensors[f"{layer}.qzeros"] = np.zeros((count // group, width * bits // 32), np.int32)
        tensors[f"{Q}.qweight"] = pack(codes, bits).T
        tensors[f"{Q}.qzeros"] = pack(zeros - (version == "gptq"), bits)
        tensors[f"{Q}.scales"], tensors[f"{Q}.g_idx"] = scales, index

    edited(folder, change)
    set_quantization(folder, bits=bits, checkpoint_format=version)
    native = HFCheckpoint(folder).read_native(Q_PATH)
    assert isinstance(native, QuantizedTensor)
    assert native.format == QuantFormat(max(bits, 3), group, "zero", "float16", ordered=True)
    weight = scales.T.astype(np.float32)[:, index] * (codes - zeros.T[:, index]).astype(np.float32)
    np.testing.assert_array_equal(native.dequantize(), weight)


def test_groups_by_index_in_compressed_tensors(copy):
    """`actorder: group`, as llm-compressor wrote it until 2026: made here, since it no longer does."""
    index = np.random.default_rng(0).permutation(np.arange(64) // 32).astype(np.int32)
    folder = edited(copy("ct_w4a16"), lambda tensors: tensors.update({f"{Q}.weight_g_idx": index}))
    plain = HFCheckpoint(FIXTURES / "ct_w4a16").read_native(Q_PATH)
    native = HFCheckpoint(folder).read_native(Q_PATH)
    assert isinstance(plain, QuantizedTensor) and isinstance(native, QuantizedTensor)
    assert native.format == QuantFormat(4, 32, "zero", "bfloat16", ordered=True)
    levels = plain.codes().astype(np.float32) - plain.arrays["zero"].astype(np.float32)[:, index]
    np.testing.assert_array_equal(native.dequantize(), plain.arrays["scale"].astype(np.float32)[:, index] * levels)


def test_a_scale_and_zero_point_for_the_whole_matrix(copy):
    """Strategy `tensor` of int-quantized, asymmetric: signed codes and zero point become unsigned ones."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".weight_scale")]:
            tensors[name] = np.array([0.5], np.float32)
            tensors[name.replace("scale", "zero_point")] = np.array([-3], np.int8)

    folder = edited(copy("ct_w8a8"), change)
    set_scheme(folder, "weights", strategy="tensor", symmetric=False)
    codes, native = load(folder)[f"{Q}.weight"], HFCheckpoint(folder).read_native(Q_PATH)
    assert isinstance(native, QuantizedTensor)
    assert native.format == QuantFormat(8, None, "zero", "float32")
    np.testing.assert_array_equal(native.dequantize(), 0.5 * (codes.astype(np.float32) + 3))


def test_zero_points_that_are_not_packed(copy):
    """As compressed-tensors wrote them until 0.9."""
    plain = HFCheckpoint(FIXTURES / "ct_w4a16").read_native(Q_PATH)
    assert isinstance(plain, QuantizedTensor)

    def change(tensors: Tensors) -> None:
        tensors[f"{Q}.weight_zero_point"] = plain.arrays["zero"].astype(np.int8) - np.int8(8)

    native = HFCheckpoint(edited(copy("ct_w4a16"), change)).read_native(Q_PATH)
    assert isinstance(native, QuantizedTensor)
    np.testing.assert_array_equal(native.arrays["zero"], plain.arrays["zero"])


@pytest.mark.parametrize(
    ("name", "file", "fields"),
    [
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": 64, "desc_act": False, "sym": True}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
    ],
)
def test_settings_in_a_file_of_their_own(copy, name, file, fields):
    """As AutoGPTQ and AutoAWQ wrote them before config.json held them."""
    folder, there = copy(name), HFCheckpoint(FIXTURES / name)
    edit_json(folder / "config.json", quantization_config=...)
    (folder / file).write_text(json.dumps(fields))
    assert HFCheckpoint(folder).specs() == there.specs()


def test_biases_of_zeros_are_nothing(copy):
    """AutoGPTQ gave every layer a bias."""
    folder = edited(copy("gptq"), lambda tensors: tensors.update({f"{Q}.bias": np.zeros(64, np.float16)}))
    assert HFCheckpoint(folder).unused == ()
    edited(folder, lambda tensors: tensors.update({f"{Q}.bias": np.ones(64, np.float16)}))
    with pytest.raises(CheckpointError, match=rf"tensor '{re.escape(Q)}\.bias' is not zero, but this llama model"):
        HFCheckpoint(folder)


def test_layers_that_were_left_alone_stay_dense(copy):
    """`modules_to_not_convert` and `ignore` are told by the tensors themselves."""

    def change(tensors: Tensors) -> None:
        for part in ("qweight", "qzeros", "scales"):
            del tensors[f"{UP}.{part}"]
        tensors[f"{UP}.weight"] = np.ones((128, 64), np.float16)

    checkpoint = HFCheckpoint(edited(copy("awq"), change))
    assert checkpoint.specs()["layers_1/mlp/up_proj/kernel"].format is None
    value = checkpoint.read_native("layers_1/mlp/up_proj/kernel")
    assert isinstance(value, np.ndarray) and value.dtype == np.float16


# ---- what does not fit


def drop(*parts: str) -> Callable[[Tensors], Any]:
    return lambda tensors: [tensors.pop(f"{Q}.{part}") for part in parts]


def put(part: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({f"{Q}.{part}": change(tensors[f"{Q}.{part}"])})


NAME = re.escape(Q)
DAMAGED_TENSORS = [
    (
        "gptq",
        drop("g_idx"),
        rf"model\.safetensors: tensor '{NAME}\.g_idx' is missing, which this quantized layer needs",
    ),
    ("gptq", drop("scales"), rf"'{NAME}\.scales' is missing"),
    ("awq", drop("qzeros"), rf"'{NAME}\.qzeros' is missing"),
    (
        "awq",
        drop("qweight"),
        r"tensor 'model\.layers\.0\.self_attn\.q_proj\.weight' is missing, which this llama model",
    ),
    (
        "gptq",
        put("scales", lambda a: a[:, :40]),
        rf"'{NAME}\.scales' has shape \[1, 40\]; 4-bit codes .* need \[1, 64\]",
    ),
    ("gptq", put("qzeros", lambda a: a[:, :4]), rf"'{NAME}\.qzeros' has shape \[1, 4\]; .* need \[1, 8\]"),
    ("awq", put("qzeros", lambda a: a[:1]), rf"'{NAME}\.qzeros' has shape \[1, 8\]; .* need \[2, 8\]"),
    ("gptq", put("qweight", lambda a: a[:4]), rf"'{NAME}\.g_idx' has shape \[64\]; .* 32 inputs need \[32\]"),
    ("gptq", put("qweight", lambda a: a.view(np.float32)), rf"'{NAME}\.qweight' is stored as F32; it must be I32"),
    ("gptq", put("qweight", lambda a: a[0]), rf"'{NAME}\.qweight' has shape \[64\]; it must have rows and columns"),
    ("gptq", put("g_idx", lambda a: a - 1), rf"'{NAME}\.g_idx' must put 64 inputs into each of 1 groups"),
    ("gptq_act_order", put("g_idx", lambda a: a * 0), rf"'{NAME}\.g_idx' must put 32 inputs into each of 2 groups"),
    ("ct_w4a16", drop("weight_scale"), rf"'{NAME}\.weight_scale' is missing"),
    ("ct_w4a16", drop("weight_zero_point"), rf"'{NAME}\.weight_zero_point' is missing"),
    ("ct_w4a16", drop("weight_shape"), rf"'{NAME}\.weight_shape' is missing"),
    ("ct_w4a16", put("weight_shape", lambda a: a + 8), rf"'{NAME}\.weight_packed' has .* weight_shape says \[72, 72\]"),
    ("ct_w4a16", put("weight_scale", lambda a: a[:, :1]), rf"'{NAME}\.weight_scale' has shape \[64, 1\]; .* \[64, 2\]"),
    (
        "ct_w4a16",
        put("weight_shape", lambda a: a - [0, 1]),
        rf"'{NAME}\.weight_packed' cannot be kept: 4-bit codes are",
    ),
    ("gptq", lambda t: t.update({f"{Q}.weight": t[f"{Q}.scales"]}), rf"'{NAME}\.weight' stands beside {NAME}\.qweight"),
    ("ct_w8a8_static", drop("input_scale"), rf"'{NAME}\.input_scale' is missing"),
    ("ct_w8a8", drop("weight_scale"), rf"'{NAME}\.weight' is stored as I8, which is not supported"),
    ("ct_w8a8", put("weight", lambda a: a.astype(np.float16)), rf"'{NAME}\.weight' is stored as F16; it must be I8"),
    ("ct_w8a8", put("weight_scale", lambda a: a.T), rf"'{NAME}\.weight_scale' has shape \[1, 64\]; .* \[64, 1\]"),
]


@pytest.mark.parametrize(("name", "change", "message"), DAMAGED_TENSORS)
def test_parts_that_do_not_fit_are_named(copy, name, change, message):
    folder = edited(copy(name), change)
    with pytest.raises(CheckpointError, match=message) as caught:
        HFCheckpoint(folder)
    assert "\n" not in str(caught.value)


DAMAGED_VALUES = [
    (
        "gptq",
        put("qzeros", lambda a: a + 1),
        rf"'{NAME}\.qzeros' holds other zero points than 8, though the config says",
    ),
    ("awq_gptqmodel", put("qzeros", lambda a: a + 1), rf"'{NAME}\.qzeros' holds other zero points than 8"),
    ("gptq", put("qzeros", lambda a: a * 0 - 1), rf"'{NAME}\.qzeros' holds a zero point of 0, which the tools read in"),
    ("gptq", put("scales", lambda a: a * np.float16(np.inf)), rf"'{NAME}\.weight' holds inf at \[0, 0\] of its scale;"),
    ("ct_fp8", put("weight", lambda a: a | 0x7F), rf"'{NAME}\.weight' holds nan at .* of its codes;"),
]


@pytest.mark.parametrize(("name", "change", "message"), DAMAGED_VALUES)
def test_values_that_are_not_allowed_are_named(copy, name, change, message):
    """Found when the weight is read: until then only headers and orders have been."""
    checkpoint = HFCheckpoint(edited(copy(name), change))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.read_native(Q_PATH)


def test_static_scales_of_activations(copy):
    """bfloat16 [1] in the file, float32 [] for the passes; nothing but a positive number is one."""
    scale = HFCheckpoint(FIXTURES / "ct_w8a8_static").read_native(f"{Q_PATH}/input_scale")
    stored = load(FIXTURES / "ct_w8a8_static")[f"{Q}.input_scale"]
    assert isinstance(scale, np.ndarray) and scale.dtype == np.float32 and scale.shape == ()
    assert scale == (stored.astype(np.uint32) << 16).view(np.float32)[0]
    for bits in (0, 0x8000 | int(stored[0]), 0x7F80, 0x7FC0):  # zero, negative, infinite, NaN
        folder = edited(copy("ct_w8a8_static"), put("input_scale", lambda a, bits=bits: a * 0 + bits))
        with pytest.raises(CheckpointError, match=rf"'{NAME}\.input_scale' is .*; a scale must be finite and greater"):
            HFCheckpoint(folder).read_native(f"{Q_PATH}/input_scale")
        shutil.rmtree(folder)


SETTINGS = [
    (
        "gptq",
        {"quant_method": "bitsandbytes"},
        "quant_method is 'bitsandbytes', .* supported: awq, gptq, compressed-ten",
    ),
    ("gptq", {"quant_method": ...}, r"'quantization_config\.quant_method' is missing"),
    ("gptq", {"bits": 5}, r"'quantization_config\.bits' is 5; supported: 2, 3, 4, 8"),
    ("gptq", {"bits": "4"}, r"'quantization_config\.bits' must be a whole number, got '4'"),
    ("gptq", {"bits": 8}, r"'[\w.]+qzeros' has shape \[1, 8\]; 8-bit codes .* 32 inputs need \[1, 16\]"),
    ("gptq", {"group_size": 0}, r"'quantization_config\.group_size' is 0"),
    ("gptq", {"group_size": 32}, r"'[\w.]+scales' has shape"),
    (
        "gptq",
        {"checkpoint_format": "marlin"},
        r"'quantization_config\.checkpoint_format' is 'marlin'; supported: gptq, ",
    ),
    ("awq", {"version": "gemv"}, r"'quantization_config\.version' is 'gemv'; of AWQ's layouts gemm is supported"),
    ("awq", {"bits": 8}, r"'quantization_config\.bits' is 8; AWQ is supported with 4 bits"),
    ("awq", {"group_size": 64}, r"'[\w.]+scales' has shape"),
    ("ct_w4a16", {"format": "marlin-24", "config_groups": ...}, r"config_groups' must hold one group"),
    (
        "ct_w4a16",
        {"config_groups": {"a": {}, "b": {}}},
        r"'quantization_config\.config_groups' must hold one .* holds 2",
    ),
    ("ct_w4a16", {"config_groups": {"a": {"targets": []}}}, "holds a group that does not quantize weights"),
    ("ct_w4a16", {"kv_cache_scheme": {"num_bits": 8}}, r"'quantization_config\.kv_cache_scheme' is set"),
    (
        "ct_w4a16",
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        r"'quantization_config\.sparsity_config' is set",
    ),
    ("ct_w4a16", {"transform_config": {"R1": {}}}, r"'quantization_config\.transform_config' is set"),
]


@pytest.mark.parametrize(("name", "changes", "message"), SETTINGS)
def test_settings_that_are_not_supported_are_named(copy, name, changes, message):
    folder = copy(name)
    set_quantization(folder, **changes)
    with pytest.raises(UserError, match=message) as caught:
        HFCheckpoint(folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


SCHEMES = [
    ("ct_w4a16", "weights", {"num_bits": 16}, r"weights\.num_bits' is 16 of type 'int'; supported: int of 2 to 8"),
    ("ct_w4a16", "weights", {"type": "float"}, r"weights\.num_bits' is 4 of type 'float'; supported: int of 2 to 8"),
    ("ct_w4a16", "weights", {"type": "complex"}, r"weights\.type' is 'complex'; supported: int, float"),
    ("ct_fp8", "weights", {"symmetric": False}, r"weights\.symmetric' is false"),
    ("ct_w4a16", "weights", {"strategy": "block"}, r"weights\.strategy' is 'block'; supported: tensor, channel, group"),
    ("ct_w4a16", "weights", {"group_size": None}, r"weights\.group_size' is None; strategy 'group' needs"),
    ("ct_w4a16", "weights", {"dynamic": True}, r"weights\.dynamic' is set"),
    ("ct_w4a16", "output_activations", {"num_bits": 8}, r"output_activations' is set"),
    ("ct_w8a8", "input_activations", {"num_bits": 4}, r"input_activations' are 4 bits int, dynamic by token"),
    ("ct_w8a8", "input_activations", {"symmetric": False}, r"input_activations\.symmetric' is false"),
    ("ct_w8a8", "input_activations", {"strategy": "tensor"}, r"input_activations' are 8 bits int, dynamic by tensor"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "section", "changes", "message"), SCHEMES)
def test_schemes_that_are_not_supported_are_named(copy, name, section, changes, message):
    folder = copy(name)
    set_scheme(folder, section, **changes)
    with pytest.raises(CheckpointError, match=r"'quantization_config\.config_groups\.group_0\." + message):
        HFCheckpoint(folder)


@pytest.mark.parametrize("change", [drop("g_idx"), put("qzeros", lambda a: a + 1)])
def test_the_command_ends_in_one_line(copy, shared, tmp_path, capsys, change):
    folder = edited(copy("gptq"), change)
    for file in (shared / "fixtures" / "stories260K").glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    assert main(["compile", str(folder), "-o", str(tmp_path / "artifact"), "--no-verify"]) == 2
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("jaxserve ")]
    assert len(errors) == 1 and captured.err.endswith(errors[0] + "\n") and Q in errors[0]
    assert not (tmp_path / "artifact").exists()
