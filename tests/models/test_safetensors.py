"""Hugging Face directories: single file, shards, and every way in which one can be damaged."""

import json
import math

import ml_dtypes
import numpy as np
import pytest

from jaxserve.models.errors import CheckpointError
from jaxserve.models.finite import BLOCK, first_not_finite
from jaxserve.models.safetensors_reader import HFCheckpoint
from tests.models.helpers import copy_fixture, edit_json, read_safetensors, write_safetensors

Q = "model.layers.0.self_attn.q_proj.weight"
Q_PATH = "layers_0/self_attn/q_proj/kernel"


@pytest.fixture
def folder(shared, tmp_path):
    return copy_fixture(shared / "fixtures" / "llama", tmp_path / "model")


def test_specs_and_reading(folder):
    checkpoint = HFCheckpoint(folder)
    spec = checkpoint.specs()[Q_PATH]
    assert (spec.shape, spec.dtype, spec.format, spec.stored) == ((64, 64), "float32", None, "F32")
    array = checkpoint.read(Q_PATH)
    assert (array.shape, array.dtype) == ((64, 64), np.float32)
    assert checkpoint.read_native(Q_PATH) is not None
    np.testing.assert_array_equal(checkpoint.read_native(Q_PATH), array)
    assert checkpoint.origin == str(folder)
    with pytest.raises(KeyError):
        checkpoint.read("layers_9/self_attn/q_proj/kernel")


@pytest.mark.parametrize(("dtype", "label"), [(ml_dtypes.bfloat16, "BF16"), (np.float16, "F16")])
def test_narrow_dtypes_are_kept(folder, dtype, label):
    header, data = read_safetensors(folder / "model.safetensors")
    header.pop("__metadata__")
    narrow, place = [], 0
    for entry in header.values():
        array = np.frombuffer(data[slice(*entry["data_offsets"])], np.float32).astype(dtype)
        narrow.append(array.tobytes())
        entry |= {"dtype": label, "data_offsets": [place, place + array.nbytes]}
        place += array.nbytes
    original = HFCheckpoint(folder).read(Q_PATH)
    write_safetensors(folder / "model.safetensors", header, b"".join(narrow))
    checkpoint = HFCheckpoint(folder)
    assert checkpoint.specs()[Q_PATH].dtype == np.dtype(dtype).name
    np.testing.assert_array_equal(checkpoint.read(Q_PATH), original.astype(dtype))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(folder, value):
    header, data = read_safetensors(folder / "model.safetensors")
    start = header[Q]["data_offsets"][0] + 4 * (64 * 63 + 5)
    write_safetensors(
        folder / "model.safetensors", header, data[:start] + np.float32(value).tobytes() + data[start + 4 :]
    )
    checkpoint = HFCheckpoint(folder)
    for read in (checkpoint.read, checkpoint.read_native):
        with pytest.raises(CheckpointError, match=rf"'{Q}' holds {value} at \[63, 5\]; weights must be finite numbers"):
            read(Q_PATH)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8])
def test_the_first_number_that_is_not_finite(dtype):
    """In whatever block it lies; the largest numbers of a type are finite, and whole numbers always are."""
    largest = np.iinfo(dtype).max if dtype is np.int8 else ml_dtypes.finfo(dtype).max
    array = np.full((3, BLOCK // 2 + 1), largest, dtype)
    array[1] *= -1
    assert first_not_finite(array) is None
    assert first_not_finite(array[:0]) is None
    if dtype is not np.int8:
        array[2, -1] = -np.nan
        assert first_not_finite(array) == (2, BLOCK // 2)
        array[2, 3] = np.nan
        assert first_not_finite(array) == (2, 3)
        assert first_not_finite(array[2, 3]) == ()


def test_arrays_survive_their_file(folder):
    checkpoint = HFCheckpoint(folder)
    array = checkpoint.read(Q_PATH)
    before = array.copy()
    (folder / "model.safetensors").write_bytes(b"")
    np.testing.assert_array_equal(array, before)
    with pytest.raises(CheckpointError, match="became shorter since it was opened"):
        checkpoint.read(Q_PATH)


def test_a_header_of_odd_length_still_reads(folder):
    original = HFCheckpoint(folder).read(Q_PATH)
    header, data = read_safetensors(folder / "model.safetensors")
    text = json.dumps(header).encode()
    write_safetensors(folder / "model.safetensors", text + b" " * (1 + -len(text) % 2), data)
    array = HFCheckpoint(folder).read(Q_PATH)
    assert array.flags.aligned
    np.testing.assert_array_equal(array, original)


def shard(folder):
    """Split the fixture's weights over two files with an index."""
    header, data = read_safetensors(folder / "model.safetensors")
    header.pop("__metadata__")
    weight_map = {}
    for number in (0, 1):
        name, part, blob = f"model-0000{number + 1}-of-00002.safetensors", {}, b""
        for key in sorted(header)[number::2]:
            piece = data[slice(*header[key]["data_offsets"])]
            part[key] = header[key] | {"data_offsets": [len(blob), len(blob) + len(piece)]}
            blob += piece
            weight_map[key] = name
        write_safetensors(folder / name, part, blob)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_shards_read_like_one_file(folder, shared):
    shard(folder)
    whole, sharded = HFCheckpoint(shared / "fixtures" / "llama"), HFCheckpoint(folder)
    assert whole.specs() == sharded.specs()
    for path in whole.specs():
        np.testing.assert_array_equal(whole.read(path), sharded.read(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: {}, "'weight_map' must say"),
        (lambda index: {"weight_map": [1]}, "'weight_map' must say"),
        (lambda index: {"weight_map": index | {Q: "../x.safetensors"}}, f"tensor '{Q}' must be in a file of this dir"),
        (lambda index: {"weight_map": index | {Q: 3}}, f"tensor '{Q}' must be in a file of this directory, got 3"),
        (lambda index: {"weight_map": index | {Q: "gone.safetensors"}}, "gone.safetensors: cannot be read: No such"),
        (
            lambda index: {"weight_map": index | {"extra": next(iter(index.values()))}},
            "tensor 'extra' is not in model-",
        ),
        (lambda index: {"weight_map": {k: v for k, v in index.items() if k != Q}}, f"tensor '{Q}' is missing"),
    ],
)
def test_bad_index(folder, change, message):
    index = shard(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps(change(index)))
    with pytest.raises(CheckpointError, match=message):
        HFCheckpoint(folder)


def test_tensors_that_no_parameter_needs_are_reported(folder):
    header, data = read_safetensors(folder / "model.safetensors")
    end = len(data)
    for index, name in enumerate(("model.layers.0.self_attn.rotary_emb.inv_freq", "vision.weight", "extra.fp8")):
        dtype = "F8_E4M3" if name == "extra.fp8" else "F32"
        width = 1 if name == "extra.fp8" else 4
        header[name] = {"dtype": dtype, "shape": [1], "data_offsets": [end + 4 * index, end + 4 * index + width]}
    write_safetensors(folder / "model.safetensors", header, data + bytes(12))
    assert HFCheckpoint(folder).unused == ("vision.weight", "extra.fp8")


def test_generation_config_overrides_config(folder):
    assert HFCheckpoint(folder).generation.eos_ids == (2,)
    edit_json(folder / "generation_config.json", eos_token_id=[3, 2], temperature=0.6)
    checkpoint = HFCheckpoint(folder)
    assert (checkpoint.generation.eos_ids, checkpoint.generation.temperature) == ((3, 2), 0.6)
    edit_json(folder / "generation_config.json", eos_token_id=...)
    assert HFCheckpoint(folder).generation.eos_ids == (2,)
    (folder / "generation_config.json").unlink()
    assert HFCheckpoint(folder).generation == type(checkpoint.generation)(eos_ids=(2,), bos_id=1)


def test_config_and_weights_must_agree(folder):
    edit_json(folder / "config.json", intermediate_size=100)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: tensor '.*down_proj.*' has shape \[64, 96\].*\[64, 100\]"
    ):
        HFCheckpoint(folder)
    edit_json(folder / "config.json", intermediate_size=96, num_hidden_layers=1000)
    with pytest.raises(CheckpointError, match=r"tensor 'model\.layers\.2\..*' \(and \d+ more\) is missing"):
        HFCheckpoint(folder)
    edit_json(folder / "config.json", num_hidden_layers=2, rms_norm_eps=math.nan)
    with pytest.raises(CheckpointError, match=r"config\.json: field 'rms_norm_eps' is nan"):
        HFCheckpoint(folder)


def entry(**changes):
    """A change of the q projection's header entry."""
    return lambda header: {**header, Q: header[Q] | changes}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: {name: value for name, value in header.items() if name != Q}, f"tensor '{Q}' is missing"),
        (entry(dtype="F99"), f"tensor '{Q}': unknown dtype 'F99'"),
        (entry(dtype=["F32"]), f"tensor '{Q}': unknown dtype"),
        (entry(dtype="I32"), f"tensor '{Q}' is stored as I32, which is not supported"),
        (entry(shape=[64, 32]), "span 16384 bytes, shape .64, 32. of F32 takes 8192"),
        (entry(shape=[32, 128]), r"has shape \[32, 128\], config needs \[64, 64\]"),
        (entry(shape=[2**62, 2**62]), f"tensor '{Q}': data_offsets span 16384 bytes"),
        (entry(shape=[2**70, 1]), f"tensor '{Q}': shape must be"),
        (entry(shape=[-1, 64]), f"tensor '{Q}': shape must be"),
        (entry(shape=[64.0, 64]), f"tensor '{Q}': shape must be"),
        (entry(shape=[1] * 2000), f"tensor '{Q}': shape must be"),
        (entry(shape=None), f"tensor '{Q}': shape must be"),
        (entry(data_offsets=[0]), f"tensor '{Q}': data_offsets must be two"),
        (entry(data_offsets=[16384, 0]), f"tensor '{Q}': data_offsets span -16384"),
        (entry(data_offsets=[0, 16384]), "overlap in the file"),
        (entry(data_offsets=[10**12, 10**12 + 16384]), f"tensor '{Q}' lies at bytes 1000000000000 to"),
        (lambda header: {**header, Q: 7}, f"tensor '{Q}': must be described by an object"),
    ],
)
def test_bad_headers(folder, change, message):
    header, data = read_safetensors(folder / "model.safetensors")
    write_safetensors(folder / "model.safetensors", change(header), data)
    with pytest.raises(CheckpointError, match=message) as caught:
        HFCheckpoint(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"", "is empty"),
        (b"abc", "too short"),
        ((2**60).to_bytes(8, "little") + b"{}", "header claims 1152921504606846976 bytes"),
        ((4).to_bytes(8, "little") + b"{{{{", "header: is not valid JSON"),
        ((4).to_bytes(8, "little") + b"\xff\xff\xff\xff", "header: is not valid JSON"),
        ((4).to_bytes(8, "little") + b"[[]]", "header: must hold an object"),
        ((100000).to_bytes(8, "little") + b"[" * 100000, "header: is nested too deeply"),
        ((17).to_bytes(8, "little") + b'{"a": 1, "a": 2} ', "the name 'a' stands there twice"),
    ],
)
def test_files_that_are_no_safetensors(folder, blob, message):
    (folder / "model.safetensors").write_bytes(blob)
    with pytest.raises(CheckpointError, match=message):
        HFCheckpoint(folder)


@pytest.mark.parametrize("keep", [4, 100, 3000, 200_000, -1])
def test_truncated_weights(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: "):
        HFCheckpoint(folder)


def test_missing_files(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        HFCheckpoint(folder)
    (folder / "config.json").write_text("{'single': 1}")
    with pytest.raises(CheckpointError, match=r"config\.json: is not valid JSON"):
        HFCheckpoint(folder)
    (folder / "config.json").write_text('{"vocab_size": ' + "9" * 5000 + "}")
    with pytest.raises(CheckpointError, match=r"config\.json: is not valid JSON"):
        HFCheckpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read: No such file"):
        HFCheckpoint(folder)


def test_tokenizer_files_are_copied(shared, tmp_path):
    HFCheckpoint(shared / "fixtures" / "stories260K").write_tokenizer(tmp_path)
    copied = {path.name for path in tmp_path.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json"} <= copied
