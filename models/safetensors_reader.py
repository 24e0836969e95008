"""Hugging Face directories: config.json, and weights in one safetensors file or in shards with an index."""

import dataclasses
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from jaxserve.models.checkpoint import Checkpoint, GenerationDefaults
from jaxserve.models.config import Fields, ModelConfig
from jaxserve.models.errors import CheckpointError
from jaxserve.models.json_file import parse_object, read_json
from jaxserve.models.packed import PackedStore
from jaxserve.models.quantization_config import quantized_layout
from jaxserve.models.registry import FAMILIES
from jaxserve.models.store import StoredTensor
from jaxserve.models.tensor_file import check_places, mapped, read_array
from jaxserve.text import copy_tokenizer_files

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # the format's own limit
MAX_AXES = 8

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_PARTS = {
    "I8": np.dtype(np.int8), "U8": np.dtype(np.uint8), "I32": np.dtype(np.int32), "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}  # fmt: skip
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Place:
    start: int
    tensor: StoredTensor


class SafetensorsStore:
    """The tensors of some safetensors files; headers are validated at once, data is read on demand."""

    def __init__(self, places: Mapping[str, _Place]) -> None:
        self._places = places
        self.tensors: Mapping[str, StoredTensor] = {name: place.tensor for name, place in places.items()}

    def read(self, name: str) -> np.ndarray:
        """The tensor in its stored dtype, which is one of floats."""
        place = self._places[name]
        tensor = place.tensor
        return read_array(tensor.file, place.start, _DTYPES[tensor.stored], tensor.shape)

    def read_native(self, name: str) -> np.ndarray:
        """The same: a tensor alone is never quantized."""
        return self.read(name)

    def read_raw(self, name: str) -> np.ndarray:
        """The tensor in its stored dtype, if that is one that parts of quantized weights have."""
        place = self._places[name]
        tensor = place.tensor
        return read_array(tensor.file, place.start, (_DTYPES | _PARTS)[tensor.stored], tensor.shape)


def open_store(folder: Path) -> SafetensorsStore:
    """The weights of a directory: `model.safetensors`, else the shards of `model.safetensors.index.json`."""
    if (folder / SINGLE).exists():
        return SafetensorsStore(read_header(folder / SINGLE))
    if not (folder / INDEX).exists():
        raise CheckpointError(f"{folder}: has neither {SINGLE} nor {INDEX}; other kinds of weights are not read")
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: field 'weight_map' must say which file holds each tensor")
    shards: dict[str, dict[str, _Place]] = {}
    places = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or file != Path(file).name:
            raise CheckpointError(f"{index}: tensor '{name}' must be in a file of this directory, got {file!r:.80}")
        if file not in shards:
            shards[file] = read_header(folder / file)
        if name not in shards[file]:
            raise CheckpointError(f"{index}: tensor '{name}' is not in {file}, where the index puts it")
        places[name] = shards[file][name]
    return SafetensorsStore(places)


def read_header(path: Path) -> dict[str, _Place]:
    """The tensors of one safetensors file by name, every place checked; CheckpointError if anything does not fit."""
    with mapped(path) as data:
        size = len(data)
        if size < 8:
            raise CheckpointError(f"{path}: is {size} bytes, too short for a safetensors file")
        (length,) = struct.unpack_from("<Q", data)
        if length > min(size - 8, MAX_HEADER):
            raise CheckpointError(
                f"{path}: the header claims {length} bytes; {size - 8} follow, and at most {MAX_HEADER} are allowed"
            )
        text = data[8 : 8 + length]
    header = parse_object(text, f"{path}: header")
    header.pop("__metadata__", None)
    base, places, found = 8 + length, [], {}
    for name, entry in header.items():
        tensor, start, end = _read_entry(path, name, entry)
        places.append((name, start, end))
        found[name] = _Place(base + start, tensor)
    check_places(path, places, size - base)
    return found


def _read_entry(path: Path, name: str, entry: Any) -> tuple[StoredTensor, int, int]:
    label = f"{path}: tensor '{name:.200}'"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{label}: must be described by an object, got {entry!r:.80}")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise CheckpointError(f"{label}: unknown dtype {dtype!r:.80}")
    if not _is_sizes(shape) or len(shape) > MAX_AXES:
        raise CheckpointError(f"{label}: shape must be up to {MAX_AXES} whole numbers, got {shape!r:.80}")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{label}: data_offsets must be two whole numbers, got {offsets!r:.80}")
    size = -(-math.prod(shape) * _BITS[dtype] // 8)
    if offsets[1] - offsets[0] != size:
        raise CheckpointError(
            f"{label}: data_offsets span {offsets[1] - offsets[0]} bytes, shape {shape} of {dtype} takes {size}"
        )
    readable = _DTYPES.get(dtype)
    tensor = StoredTensor(tuple(shape), dtype, None if readable is None else readable.name, None, str(path), size)
    return tensor, offsets[0], offsets[1]


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


class HFCheckpoint(Checkpoint):
    """A Hugging Face directory."""

    def __init__(self, folder: Path, origin: str | None = None) -> None:
        """Open and check a directory; `origin` replaces its path where people read where the model came from."""
        path = folder / "config.json"
        values = read_json(path)
        config = ModelConfig.from_hf(values, str(path))
        family = FAMILIES[config.family]
        generation = GenerationDefaults.from_fields(Fields(_ids(values), str(path)), config.vocab)
        if (folder / "generation_config.json").exists():
            extra = folder / "generation_config.json"
            generation = GenerationDefaults.from_fields(Fields(read_json(extra), str(extra)), config.vocab, generation)
        store, layout = open_store(folder), quantized_layout(folder, values)
        super().__init__(
            config,
            store if layout is None else PackedStore(store, layout),
            family.hf_sources(config),
            origin=origin or str(folder),
            generation=generation,
            ignored=family.ignored,
        )
        self._folder = folder

    def write_tokenizer(self, folder: Path) -> None:
        """Copy the directory's tokenizer files."""
        copy_tokenizer_files(self._folder, folder)


def _ids(config: dict[str, Any]) -> dict[str, Any]:
    """Of a config.json only the ids: what it says about sampling is left over from training libraries."""
    return {name: config.get(name) for name in ("eos_token_id", "bos_token_id")}
