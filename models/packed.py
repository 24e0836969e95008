"""Quantized safetensors: linear layers whose weight is spread over several tensors, shown as one weight each.

What the tools write (AutoAWQ, GPTQModel, llm-compressor) differs in the names of the parts, in how codes are packed
into words, and in how zero points are counted. A `Layout` knows one of them; the store asks it what a layer's parts
stand for and for the `QuantizedTensor` they are, bit for bit. Weights are never rounded here: what no format of ours
can hold exactly is refused.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NoReturn, Protocol

import numpy as np

from jaxserve.models.errors import CheckpointError
from jaxserve.models.store import RawStore, StoredTensor
from jaxserve.pallas_kernels import QuantFormat, QuantizedTensor, pack_int4, unpack_int4

INPUT_SCALE = "input_scale"
FLOAT_SCALES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}


class Parts:
    """The tensors of one linear layer, by the last word of their names; every complaint names file and tensor."""

    def __init__(self, store: RawStore, layer: str, names: tuple[str, ...]) -> None:
        self._store, self._layer = store, layer
        self._specs = {name: store.tensors[self.path(name)] for name in names if self.path(name) in store.tensors}

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __contains__(self, part: str) -> bool:
        return part in self._specs

    def path(self, part: str) -> str:
        """The name of a part in the file."""
        return f"{self._layer}.{part}"

    @property
    def file(self) -> str:
        """Where the first part is; others may be in other shards."""
        return next(iter(self._specs.values())).file

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self._specs.values())

    def fail(self, part: str, problem: str) -> NoReturn:
        """Raise a CheckpointError about a part."""
        file = self._specs[part].file if part in self._specs else self.file
        raise CheckpointError(f"{file}: tensor '{self.path(part)}' {problem}")

    def spec(self, part: str, *dtypes: str) -> StoredTensor:
        """A part's description; CheckpointError if it is missing or of none of these types."""
        if part not in self._specs:
            self.fail(part, "is missing, which this quantized layer needs")
        if self._specs[part].stored not in dtypes:
            self.fail(part, f"is stored as {self._specs[part].stored}; it must be {' or '.join(dtypes)}")
        return self._specs[part]

    def matrix(self, part: str, *dtypes: str) -> tuple[int, int]:
        """Rows and columns of a part that must be a matrix."""
        shape = self.spec(part, *dtypes).shape
        if len(shape) != 2 or 0 in shape:
            self.fail(part, f"has shape {list(shape)}; it must have rows and columns")
        return shape[0], shape[1]

    def check(self, part: str, shape: tuple[int, ...], why: str, *dtypes: str) -> StoredTensor:
        """A part that must have this shape; `why` says what asks for it."""
        spec = self.spec(part, *dtypes)
        if spec.shape != shape:
            self.fail(part, f"has shape {list(spec.shape)}; {why} need {list(shape)}")
        return spec

    def read(self, part: str) -> np.ndarray:
        """A part as the file has it."""
        return self._store.read_raw(self.path(part))


@dataclasses.dataclass(frozen=True)
class Described:
    """What the parts of a layer are together: a weight of `shape` [O, I] kept in `format`, and what its activations are
    to be quantized to, in the words of `quantized_matmul`."""

    shape: tuple[int, int]
    format: QuantFormat
    activation: str | None = None


class Layout(Protocol):
    """How a tool stores the quantized weight of a linear layer.

    `name` is what people call it, `mark` the part that only quantized layers have, `parts` all parts there can be.
    """

    @property
    def name(self) -> str: ...

    @property
    def mark(self) -> str: ...

    @property
    def parts(self) -> tuple[str, ...]: ...

    def describe(self, parts: Parts) -> Described:
        """What the parts are, from their shapes and types; CheckpointError if they do not fit together."""
        ...

    def decode(self, parts: Parts, described: Described) -> QuantizedTensor:
        """The weight itself; CheckpointError for values that the layout does not allow."""
        ...


class PackedStore:
    """A store that shows every quantized layer's tensors as the one weight they stand for, called `LAYER.weight`.

    The static scale of its activations, if it has one, remains a tensor of its own, `LAYER.input_scale`, float32 [].
    """

    def __init__(self, store: RawStore, layout: Layout) -> None:
        self._store, self._layout = store, layout
        self._packed: dict[str, tuple[Parts, Described]] = {}
        self._scales: dict[str, Parts] = {}
        tensors = dict(store.tensors)
        for name in store.tensors:
            layer, _, part = name.rpartition(".")
            if part == layout.mark:
                parts = Parts(store, layer, layout.parts)
                for used in parts:
                    del tensors[parts.path(used)]
                described = _describe(layout, parts)
                if f"{layer}.weight" in tensors:
                    parts.fail("weight", f"stands beside {parts.path(layout.mark)}: only one of them can be the weight")
                self._packed[f"{layer}.weight"] = parts, described
                tensors[f"{layer}.weight"] = StoredTensor(
                    described.shape,
                    layout.name,
                    "float32",
                    described.format,
                    parts.file,
                    parts.nbytes,
                    activation=described.activation,
                )
                if described.activation == "int8-static":
                    self._scales[f"{layer}.{INPUT_SCALE}"] = parts
                    tensors[f"{layer}.{INPUT_SCALE}"] = StoredTensor((), "F32", "float32", None, parts.file, 0)
        self.tensors: Mapping[str, StoredTensor] = tensors

    def read(self, name: str) -> np.ndarray:
        """The tensor in its stored dtype, or dequantized to float32."""
        value = self.read_native(name)
        return value.dequantize() if isinstance(value, QuantizedTensor) else value

    def read_native(self, name: str) -> QuantizedTensor | np.ndarray:
        """The quantized weight of a layer, bit for bit; anything else as `read`."""
        if name in self._scales:
            return input_scale(self._scales[name])
        if name not in self._packed:
            return self._store.read(name)
        return self._layout.decode(*self._packed[name])


def _describe(layout: Layout, parts: Parts) -> Described:
    described = layout.describe(parts)
    try:
        described.format.specs(*described.shape)
    except ValueError as error:  # an odd number of 4-bit codes
        parts.fail(layout.mark, f"cannot be kept: {error}")
    return described


def input_scale(parts: Parts) -> np.ndarray:
    """The static scale of a layer's activations, float32 []; CheckpointError if it is none."""
    scale = parts.read(INPUT_SCALE).astype(np.float32).reshape(())
    if not 0 < scale < np.inf:
        parts.fail(INPUT_SCALE, f"is {scale}; a scale must be finite and greater than 0")
    return scale


def unpack_words(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The first `count` unsigned codes [..., count] uint8 of rows of int32 words, the lowest bits first.

    Codes follow one another without gaps, across the borders of words where `bits` does not divide 32.
    """
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        codes = data
    elif bits == 4:
        codes = unpack_int4(data, signed=False)
    else:
        flags = np.unpackbits(data, axis=-1, bitorder="little")[..., : data.shape[-1] * 8 // bits * bits]
        codes = np.packbits(flags.reshape(*data.shape[:-1], -1, bits), axis=-1, bitorder="little")[..., 0]
    return codes[..., :count]


def words_for(count: int, bits: int) -> int:
    """How many words of 32 bits hold so many codes."""
    return -(-count * bits // 32)


def kept_bits(bits: int) -> int:
    """The narrowest width of a format that holds codes of so many bits."""
    return next(width for width in (3, 4, 8) if bits <= width)


def field_of_codes(codes: np.ndarray, bits: int, format: QuantFormat) -> np.ndarray:
    """Unsigned codes [O, I] of so many bits as the field `codes` of a format; a signed format gets q - 2^(bits-1).

    float8_e4m3fn codes are taken as they are.
    """
    if format.element == "e4m3":
        return np.ascontiguousarray(codes)
    if format.signed:
        codes = codes - np.uint8(1 << (bits - 1))  # wraps around to two's complement
    if format.packed:
        return pack_int4(codes)
    return np.ascontiguousarray(codes.view(np.int8) if format.signed else codes)


def check_symmetric(parts: Parts, part: str, zeros: np.ndarray, bits: int) -> None:
    """CheckpointError if zero points of a symmetric layer are not all in the middle of the codes."""
    if (zeros != 1 << (bits - 1)).any():
        parts.fail(part, f"holds other zero points than {1 << (bits - 1)}, though the config says that there are none")


def storage_order(parts: Parts, part: str, group: int, groups: int) -> np.ndarray | None:
    """The order in which inputs lie when those of a group are neighbours, from the group of every input (act-order).

    None if they are neighbours already. CheckpointError if a group does not have `group` inputs, the last one excepted.
    """
    index = parts.read(part)
    inputs = len(index)
    sizes = np.full(groups, group)
    sizes[-1] = inputs - group * (groups - 1)
    if index.min() < 0 or index.max() >= groups or (np.bincount(index, minlength=groups) != sizes).any():
        parts.fail(part, f"must put {group} inputs into each of {groups} groups")
    order = np.argsort(index, kind="stable").astype(np.int32)
    return None if (order == np.arange(inputs)).all() else order
