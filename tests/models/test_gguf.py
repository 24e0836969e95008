"""GGUF files: every type against the package's own dequantizer, blocks bit for bit, and damaged headers."""

import hashlib
import json
import struct
from typing import Any

import gguf
import numpy as np
import pytest

from jaxserve.models.errors import CheckpointError
from jaxserve.models.finite import first_not_finite
from jaxserve.models.gguf_blocks import KEPT, unpack_blocks
from jaxserve.models.gguf_reader import GGUFCheckpoint, GGUFStore
from jaxserve.models.safetensors_reader import HFCheckpoint
from jaxserve.pallas_kernels import Llama3Scaling, QuantFormat, QuantizedTensor
from tests.models.helpers import Runner, fixture_tensors, write_gguf
from tests.models.test_quantized import FIXTURES

NATIVE = {
    "Q4_0": QuantFormat(4, 32, "none", "float16"),
    "Q4_1": QuantFormat(4, 32, "minimum", "float16"),
    "Q5_0": QuantFormat(8, 32, "none", "float16"),
    "Q5_1": QuantFormat(8, 32, "minimum", "float16"),
    "Q8_0": QuantFormat(8, 32, "none", "float16"),
    "Q2_K": QuantFormat(3, 16, "minimum", "float32"),
    "Q3_K": QuantFormat(3, 16, "none", "float32"),
    "Q4_K": QuantFormat(4, 32, "minimum", "float32"),
    "Q5_K": QuantFormat(8, 32, "minimum", "float32"),
    "Q6_K": QuantFormat(8, 16, "none", "float32"),
    "IQ4_NL": QuantFormat(8, 32, "none", "float16"),
    "IQ4_XS": QuantFormat(8, 32, "none", "float32"),
}
ROUNDED = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "MXFP4")
# Where the float16 numbers of a block lie; the others have one at its start.
HALVES = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (), "IQ1_M": (),
}  # fmt: skip


def random_blocks(kind, rows, columns):
    """Random bytes in the blocks of a type, with scales that are ordinary numbers (any bytes of codes are valid)."""
    rng = np.random.default_rng(0)
    if kind.name in ("F32", "F16", "BF16"):
        return gguf.quants.quantize(rng.standard_normal((rows, columns), np.float32), kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    if kind.name == "MXFP4":
        blocks[..., 0] = rng.integers(120, 130, blocks.shape[:2])  # a power of two
    if kind.name == "IQ1_M":
        blocks[..., 55] &= 0x2F  # the highest bits of its scale, which is scattered over the block
    for place in HALVES.get(kind.name, (0,)):
        numbers = rng.standard_normal((rows, columns // block, 1)).astype(np.float16)
        blocks[..., place : place + 2] = numbers.view(np.uint8).reshape(rows, -1, 2)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", *NATIVE, *ROUNDED])
def test_every_type_reads_as_the_package_dequantizes_it(tmp_path, name):
    kind = gguf.GGMLQuantizationType[name]
    blocks = random_blocks(kind, 6, 512)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("pad.weight", np.ones(3, np.float32))
    writer.add_tensor("w.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    store = GGUFStore(tmp_path / "t.gguf")
    stored = store.tensors["w.weight"]
    rounded = QuantFormat(8, 32, "none", "float32") if name in ROUNDED else None
    assert (stored.shape, stored.stored, stored.format) == ((6, 512), name, NATIVE.get(name, rounded))
    assert stored.exact is (name not in ROUNDED)
    array = store.read("w.weight")
    assert array.dtype.name == stored.dtype == {"F16": "float16", "BF16": "bfloat16"}.get(name, "float32")
    expected = gguf.quants.dequantize(blocks, kind)
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(array.astype(np.float32), expected)
    native = store.read_native("w.weight")
    assert isinstance(native, QuantizedTensor) is (name in NATIVE)
    if isinstance(native, QuantizedTensor):
        assert native.format == NATIVE[name]
        np.testing.assert_array_equal(native.dequantize().view(np.uint32), expected.view(np.uint32))
    np.testing.assert_array_equal(store.read("pad.weight"), np.ones(3, np.float32))


def stored(folder, blocks, kind):
    """A GGUF file that holds these blocks as its only tensor, w.weight."""
    writer = gguf.GGUFWriter(folder / "t.gguf", "llama")
    writer.add_tensor("w.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFStore(folder / "t.gguf")


@pytest.mark.parametrize("name", [*NATIVE, *ROUNDED])
def test_blocks_that_are_not_finite_are_read_without_a_warning(tmp_path, name):
    """They are refused by name afterwards, as in every checkpoint."""
    kind = gguf.GGMLQuantizationType[name]
    blocks = random_blocks(kind, 6, 512)
    places = HALVES.get(name, (0,))
    for place in places:
        blocks[2, place : place + 2] = 0x00, 0x7C  # an infinite scale, times codes and factors of which some are 0
    if not places:
        blocks[2] = 0xFF
    store = stored(tmp_path, blocks, kind)
    native = store.read_native("w.weight")
    scale = native.arrays["scale"] if isinstance(native, QuantizedTensor) else native
    for array in (store.read("w.weight"), scale):
        place = first_not_finite(array)
        assert place is not None and place[0] == 2


def test_types_as_llama_cpp_quantizes_and_dequantizes_them():
    """Blocks made by ggml's own quantizers, against ggml's own float32 of them, bit for bit."""
    types = np.load(FIXTURES / "gguf" / "types.npz")
    for name, digest in json.loads(str(types["sha256"])).items():
        kind = gguf.GGMLQuantizationType[name]
        kept = unpack_blocks(types[name], kind, 512).dequantize() if kind in KEPT else None
        for values in (gguf.quants.dequantize(types[name], kind), kept):
            assert values is None or hashlib.sha256(values.tobytes()).hexdigest() == digest, name


def repack(tensor, name):
    """The GGUF bytes of a tensor in one of our formats: the way back from reading."""
    codes = tensor.codes().reshape(tensor.shape[0], -1, 32).astype(np.uint8)
    if tensor.format.bits == 4:
        if tensor.format.signed:
            codes = (codes + 8) & 15
        codes = codes[..., :16] | (codes[..., 16:] << 4)
    parts = [tensor.arrays[field][..., None].view(np.uint8) for field in tensor.format.fields[1:]]
    return np.concatenate([*parts, codes], axis=-1).reshape(tensor.shape[0], -1)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_native_blocks_keep_every_bit(tmp_path, name):
    """Blocks -> our arrays -> blocks gives the same bytes, so nothing was rounded on the way."""
    kind = gguf.GGMLQuantizationType[name]
    blocks = random_blocks(kind, 10, 96)
    native = stored(tmp_path, blocks, kind).read_native("w.weight")
    assert isinstance(native, QuantizedTensor)
    np.testing.assert_array_equal(repack(native, name), blocks)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_model_written_as_gguf_gives_the_same_logits(shared, tmp_path, name):
    """With q and k rows permuted as llama.cpp does for the `llama` architecture, and not for others."""
    hf = HFCheckpoint(shared / "fixtures" / name)
    extra: dict[str, Any] = {"llama__attention__sliding_window": 16} if name == "mistral" else {}
    tensors = fixture_tensors(shared / "fixtures" / name)
    write_gguf(tmp_path / "m.gguf", hf.config, tensors, **extra)
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    assert checkpoint.unused == ()
    assert not checkpoint.native
    assert (checkpoint.generation.eos_ids, checkpoint.generation.bos_id) == ((2,), 1)
    for path in hf.specs():
        np.testing.assert_array_equal(checkpoint.read(path), hf.read(path))
    expected = np.load(shared / "fixtures" / name / "expected.npz")
    (logits,) = Runner(checkpoint).logits(expected["input_ids_1"])
    np.testing.assert_allclose(logits, expected["logits_1"], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("type", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_rows_of_native_tensors_are_put_back_too(shared, tmp_path, type):
    hf = HFCheckpoint(shared / "fixtures" / "llama")
    write_gguf(tmp_path / "m.gguf", hf.config, fixture_tensors(shared / "fixtures" / "llama"), type=type)
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    assert checkpoint.native
    kind = gguf.GGMLQuantizationType[type]
    for path in ("layers_1/self_attn/q_proj/kernel", "layers_0/self_attn/k_proj/kernel", "embed_tokens/embedding"):
        expected = gguf.quants.dequantize(gguf.quants.quantize(hf.read(path), kind), kind)
        native = checkpoint.read_native(path)
        assert isinstance(native, QuantizedTensor)
        np.testing.assert_array_equal(native.dequantize(), expected)
        np.testing.assert_array_equal(checkpoint.read(path), expected)
    assert checkpoint.specs()["norm/scale"].format is None


def test_llama3_rotary_divisors_become_the_scaling(shared, tmp_path):
    hf = HFCheckpoint(shared / "fixtures" / "llama_rope3")
    assert isinstance(hf.config.rope.scaling, Llama3Scaling)
    plain = hf.config.rope.__class__(hf.config.rope.dim, hf.config.rope.theta)
    divisors = plain.inv_freq() / hf.config.rope.inv_freq()
    tensors = fixture_tensors(shared / "fixtures" / "llama_rope3")
    write_gguf(tmp_path / "m.gguf", hf.config, tensors | {"rope_freqs.weight": divisors})
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    assert checkpoint.config.rope == hf.config.rope
    assert checkpoint.unused == ()
    for wrong in (divisors * 1.5, divisors * np.nan, divisors[:-1], -divisors):
        write_gguf(tmp_path / "w.gguf", hf.config, tensors | {"rope_freqs.weight": wrong.astype(np.float32)})
        with pytest.raises(CheckpointError, match=r"'rope_freqs\.weight' is no Llama 3 rotary scaling"):
            GGUFCheckpoint(tmp_path / "w.gguf")


def test_the_id_that_ends_a_turn_ends_an_answer(shared, tmp_path):
    hf = HFCheckpoint(shared / "fixtures" / "llama")
    tensors = fixture_tensors(shared / "fixtures" / "llama")
    write_gguf(tmp_path / "m.gguf", hf.config, tensors, tokenizer__ggml__eot_token_id=9)
    assert GGUFCheckpoint(tmp_path / "m.gguf").generation.eos_ids == (2, 9)


def test_models_that_cannot_be_opened(shared, tmp_path):
    hf = HFCheckpoint(shared / "fixtures" / "llama")
    tensors = fixture_tensors(shared / "fixtures" / "llama")
    path, q = tmp_path / "m.gguf", "model.layers.1.self_attn.q_proj.weight"
    write_gguf(path, hf.config, {name: array for name, array in tensors.items() if name != q})
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor 'blk\.1\.attn_q\.weight' is missing"):
        GGUFCheckpoint(path)
    write_gguf(path, hf.config, tensors | {q: tensors[q][:, :32]})
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor 'blk\.1\.attn_q\.weight' has shape \[64, 32\]"):
        GGUFCheckpoint(path)
    write_gguf(path, hf.config, tensors, split__count=3)
    with pytest.raises(CheckpointError, match="one part of a split GGUF"):
        GGUFCheckpoint(path)


def test_a_type_that_cannot_be_read_is_an_error_only_where_it_is_needed(tmp_path):
    kind = gguf.GGMLQuantizationType.Q8_K
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("w.weight", np.zeros((2, 292), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert GGUFStore(tmp_path / "t.gguf").tensors["w.weight"].dtype is None


def string(text):
    """A GGUF string."""
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def header(*, version=3, tensors=0, fields=0):
    """The fixed start of a GGUF file."""
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields)


def field(name, kind, value):
    """A metadata entry."""
    return string(name) + struct.pack("<I", kind) + value


def tensor(name="w", dims=(32,), kind=0, offset=0):
    """A tensor's description."""
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def one(blob, data=b""):
    """A file of one tensor description, aligned, and data."""
    blob = header(tensors=1) + blob
    return blob + bytes(-len(blob) % 32) + data


HUGE = 2**60


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"", "is empty"),
        (b"GGU", "not a GGUF file"),
        (b"\x93NUMPY" * 9, "not a GGUF file"),
        (b"GGUF\x03", "the version takes 4 bytes"),
        (header(version=1), "is a version 1 GGUF file"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is a big-endian GGUF file"),
        (header(tensors=HUGE), f"the tensor count is {HUGE}, more than"),
        (header(tensors=2**64 - 1), "the tensor count is 18446744073709551615, more than"),
        (header(fields=HUGE), f"the metadata count is {HUGE}, more than"),
        (header(fields=1) + struct.pack("<Q", HUGE) + bytes(9), f"the name of metadata field 0 is {HUGE} bytes long"),
        (header(fields=1) + field("a", 99, bytes(8)), "field 'a' has the unknown type 99"),
        (header(fields=1) + field("a", 8, struct.pack("<Q", HUGE)), f"field 'a' takes {HUGE} bytes"),
        (header(fields=1) + field("a", 8, string(b"\xff\xfe")), "field 'a' is not valid UTF-8"),
        (header(fields=1) + field("a", 9, struct.pack("<IQ", 8, HUGE)), f"the length of field 'a' is {HUGE}, more"),
        (header(fields=1) + field("a", 9, struct.pack("<IQ", 4, HUGE)), f"the length of field 'a' is {HUGE}, more"),
        (header(fields=1) + field("a", 9, struct.pack("<IQ", 9, 1) + bytes(30)), "is an array of type 9; only"),
        (header(fields=2) + field("a", 0, b"\1") * 2, "field 'a' stands there twice"),
        (header(fields=1) + field("general.alignment", 4, struct.pack("<I", 48)), "'general.alignment' is 48; it must"),
        (header(fields=1) + field("general.alignment", 4, struct.pack("<I", 0)), "'general.alignment' is 0; it must"),
        (header(fields=1) + field("general.alignment", 8, string("x" * 999)), "'general.alignment' is 'xxx"),
        (one(tensor(dims=(1,) * 5)), "tensor 'w' has 5 axes, at most 4"),
        (one(tensor(dims=())), r"tensor 'w' has shape \[\]"),
        (one(tensor(dims=(0, 4))), r"tensor 'w' has shape \[4, 0\]"),
        (one(tensor(kind=200)), "tensor 'w' has the unknown type 200"),
        (one(tensor(dims=(33,), kind=8)), r"tensor 'w' has shape \[33\]; rows of Q8_0 hold a multiple of 32"),
        (one(tensor(dims=(2**40, 2**40)), bytes(128)), "tensor 'w' lies at bytes 0 to 4835703278458516698824704"),
        (one(tensor(dims=(2**63, 2)), bytes(128)), "tensor 'w' lies at bytes 0 to"),
        (one(tensor(offset=7), bytes(135)), "tensor 'w' starts at byte 7 of the data, not a multiple of the align"),
        (one(tensor(offset=HUGE), bytes(128)), f"tensor 'w' lies at bytes {HUGE} to"),
        (one(tensor(), bytes(127)), "tensor 'w' lies at bytes 0 to 128 of the data, which has 127"),
        (header(tensors=2) + tensor() * 2 + bytes(600), "tensor 'w' stands there twice"),
        (header(tensors=2) + tensor() + tensor("v", offset=32) + bytes(600), "tensors 'w' and 'v' overlap"),
    ],
    ids=str,
)
def test_damaged_headers(tmp_path, blob, message):
    (tmp_path / "bad.gguf").write_bytes(blob)
    with pytest.raises(CheckpointError, match=message) as caught:
        GGUFCheckpoint(tmp_path / "bad.gguf")
    assert str(caught.value).startswith(str(tmp_path / "bad.gguf"))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_every_truncation_is_noticed(shared, tmp_path):
    hf = HFCheckpoint(shared / "fixtures" / "llama")
    write_gguf(tmp_path / "m.gguf", hf.config, fixture_tensors(shared / "fixtures" / "llama"))
    blob = (tmp_path / "m.gguf").read_bytes()
    for keep in [*range(1, 3000, 97), len(blob) // 2, len(blob) - 1000]:
        (tmp_path / "cut.gguf").write_bytes(blob[:keep])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: "):
            GGUFCheckpoint(tmp_path / "cut.gguf")
