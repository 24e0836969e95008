"""The header of a GGUF file: metadata and tensor descriptions, every number checked before it is believed.

The `gguf` package parses headers too, but trusts them: a count of 2^60 would keep it busy until memory runs out. So the
header is read here, and the package supplies what it knows about the types: block sizes and dequantization.
"""

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxserve.models.errors import CheckpointError
from jaxserve.models.tensor_file import check_places, mapped

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_AXES = 4
MAX_NAME = 1024
_ALIGNMENT = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# The fewest bytes of a metadata entry (name length, type, value) and of a tensor (name length, axes, type, offset).
_MIN_ENTRY, _MIN_TENSOR = 13, 24


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies: `shape` in row-major order (the file has it reversed), `start` a position in the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class GGUFHeader:
    """A validated header: metadata as plain values, tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


class _Cursor:
    """Reads little-endian values one after another, never past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.place = path, data, 0

    def fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {problem}")

    def take(self, size: int, what: str) -> int:
        start, left = self.place, len(self.data) - self.place
        if size > left:
            self.fail(f"{what} takes {size} bytes, the file has {left} left (is it cut off?)")
        self.place += size
        return start

    def scalar(self, code: str, what: str) -> Any:
        start = self.take(struct.calcsize("<" + code), what)
        return struct.unpack_from("<" + code, self.data, start)[0]

    def text(self, what: str, limit: int | None = None) -> str:
        size = self.scalar("Q", what)
        if limit is not None and size > limit:
            self.fail(f"{what} is {size} bytes long, at most {limit} are allowed")
        start = self.take(size, what)
        try:
            return self.data[start : start + size].decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not valid UTF-8")

    def count(self, least: int, what: str) -> int:
        number = self.scalar("Q", what)
        left = len(self.data) - self.place
        if number * least > left:
            self.fail(f"{what} is {number}, more than the {left} bytes that follow can hold")
        return number

    def value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY:
            return self.array(what)
        self.fail(f"{what} has the unknown type {kind}")

    def array(self, what: str) -> list[Any]:
        kind = self.scalar("I", what)
        if kind == _STRING:
            return [self.text(what) for _ in range(self.count(8, f"the length of {what}"))]
        if kind not in _SCALARS:
            self.fail(f"{what} is an array of type {kind}; only arrays of numbers and strings are read")
        dtype = np.dtype("<" + _SCALARS[kind]) if kind != 7 else np.dtype(bool)
        size = self.count(dtype.itemsize, f"the length of {what}")
        start = self.take(size * dtype.itemsize, what)
        return np.frombuffer(self.data, dtype, size, start).tolist()


def read_header(path: Path) -> GGUFHeader:
    """Read and check the header of a GGUF file (little-endian, version 2 or 3); CheckpointError if anything is off."""
    with mapped(path) as data:
        return _read(_Cursor(path, data))


def _read(cursor: _Cursor) -> GGUFHeader:
    magic, size = cursor.data[:4], len(cursor.data)
    if magic != MAGIC:
        cursor.fail(f"is not a GGUF file: it starts with {magic!r}")
    cursor.take(4, "the magic")
    version = cursor.scalar("I", "the version")
    if version not in VERSIONS:
        kind = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
        cursor.fail(f"is a {kind} GGUF file; little-endian versions {' and '.join(map(str, VERSIONS))} are read")
    tensor_count = cursor.count(_MIN_TENSOR, "the tensor count")
    metadata_count = cursor.count(_MIN_ENTRY, "the metadata count")
    metadata: dict[str, Any] = {}
    for index in range(metadata_count):
        name = cursor.text(f"the name of metadata field {index}", MAX_NAME)
        if name in metadata:
            cursor.fail(f"field '{name}' stands there twice")
        metadata[name] = cursor.value(cursor.scalar("I", f"field '{name}'"), f"field '{name}'")
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        cursor.fail(f"field 'general.alignment' is {alignment!r:.80}; it must be a power of two")
    tensors: dict[str, GGUFTensor] = {}
    for index in range(tensor_count):
        tensor = _read_tensor(cursor, index, alignment)
        if tensor.name in tensors:
            cursor.fail(f"tensor '{tensor.name}' stands there twice")
        tensors[tensor.name] = tensor
    base = -(-cursor.place // alignment) * alignment
    places = [(tensor.name, tensor.start, tensor.start + tensor.nbytes) for tensor in tensors.values()]
    check_places(cursor.path, places, max(size - base, 0))
    return GGUFHeader(
        metadata, {name: dataclasses.replace(tensor, start=base + tensor.start) for name, tensor in tensors.items()}
    )


def _read_tensor(cursor: _Cursor, index: int, alignment: int) -> GGUFTensor:
    """One tensor's description; its start is relative to the data."""
    name = cursor.text(f"the name of tensor {index}", MAX_NAME)
    what = f"tensor '{name}'"
    axes = cursor.scalar("I", what)
    if axes > MAX_AXES:
        cursor.fail(f"{what} has {axes} axes, at most {MAX_AXES} are allowed")
    shape = tuple(cursor.scalar("Q", what) for _ in range(axes))[::-1]
    code = cursor.scalar("I", what)
    if code not in set(GGMLQuantizationType):
        cursor.fail(f"{what} has the unknown type {code}")
    kind = GGMLQuantizationType(code)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if not shape or 0 in shape or shape[-1] % block:
        cursor.fail(
            f"{what} has shape {list(shape)}; rows of {kind.name} hold a multiple of {block} elements, at least 1"
        )
    start = cursor.scalar("Q", what)
    if start % alignment:
        cursor.fail(f"{what} starts at byte {start} of the data, not a multiple of the alignment {alignment}")
    return GGUFTensor(name, shape, kind, start, math.prod(shape) // block * block_bytes)
