"""How quantized weights are described and stored on the host: `QuantFormat` and `QuantizedTensor`, plain numpy."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

SCALE_DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}
_SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
OFFSETS = ("none", "zero", "minimum")
ELEMENTS = ("int", "e4m3")
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclasses.dataclass(frozen=True)
class QuantFormat:
    """A quantized weight [O, I] as codes q and numbers shared by groups of `group` inputs of one output.

    - `offset="none"`: w = scale * q, q signed.
    - `offset="zero"`: w = scale * (q - zero), q unsigned, zero an integer (uint8).
    - `offset="minimum"`: w = scale * q + minimum, q unsigned.

    `group=None` means one group per output; the last group of a row may be shorter. `bits` is 3, 4 or 8. 8-bit codes
    are int8 or uint8 [O, I]; 4-bit codes uint8 [O, I/2], input 2i in the low nibble and 2i + 1 in the high one, signed
    ones in two's complement; 3-bit codes are stored as 4-bit ones. scale and minimum have dtype `scale_dtype`; scale,
    minimum and zero have shape [O, G].

    - `element="e4m3"`: codes are float8_e4m3fn numbers; 8 bits and no offset.
    - `level2="channel"` (QServe, arXiv:2405.04532): w = channel * (scale * (q - zero)) with scale uint8, too, and the
      field channel [O, 1] of dtype `scale_dtype`. scale * (q - zero) must be within int8.
    - `ordered`: the field order int32 [I] says which input lies at each place of codes, and groups are of neighbouring
      places: w[:, order[k]] is made of q[:, k] (GPTQ's act-order).
    """

    bits: int
    group: int | None
    offset: str
    scale_dtype: str
    element: str = "int"
    ordered: bool = False
    level2: str | None = None

    def __post_init__(self) -> None:
        if self.bits not in (3, 4, 8):
            raise ValueError(f"bits must be 3, 4 or 8, got {self.bits}")
        if self.group is not None and self.group < 1:
            raise ValueError(f"group must be a positive number of inputs or None for the whole row, got {self.group}")
        if self.offset not in OFFSETS:
            raise ValueError(f"offset must be one of {', '.join(OFFSETS)}, got {self.offset!r}")
        if self.scale_dtype not in SCALE_DTYPES:
            raise ValueError(f"scale_dtype must be one of {', '.join(SCALE_DTYPES)}, got {self.scale_dtype!r}")
        if self.element not in ELEMENTS:
            raise ValueError(f"element must be one of {', '.join(ELEMENTS)}, got {self.element!r}")
        if self.element == "e4m3" and (self.bits, self.offset) != (8, "none"):
            raise ValueError(f"e4m3 has 8 bits and no offset, got {self.bits} bits and offset {self.offset!r}")
        if self.level2 not in (None, "channel"):
            raise ValueError(f"level2 must be 'channel' or None, got {self.level2!r}")
        if self.level2 and (self.bits != 4 or self.offset != "zero" or self.group is None):
            raise ValueError("a second level needs groups of 4-bit codes with an integer zero point")

    def __str__(self) -> str:
        name = self.element if self.element != "int" else f"int{self.bits}"
        group = "row" if self.group is None else f"g{self.group}"
        dtype = _SHORT[self.scale_dtype]
        scale = f"u8 in row {dtype}" if self.level2 else dtype
        return f"{name} {group} {self.offset} {scale}{' ordered' if self.ordered else ''}"

    @property
    def signed(self) -> bool:
        """Whether codes are signed."""
        return self.offset == "none"

    @property
    def packed(self) -> bool:
        """Whether a byte holds two codes."""
        return self.bits <= 4

    @property
    def whole(self) -> bool:
        """Whether a weight is int8 integers times one number an output (less a multiple of another, for a zero point),
        so that its products with integers can be summed exactly."""
        return self.level2 == "channel" or (self.group is None and self.element == "int" and self.offset != "minimum")

    @property
    def code_range(self) -> tuple[int, int]:
        """Smallest and largest code."""
        if self.element == "e4m3":
            return -448, 448
        return (-(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1) if self.signed else (0, 2**self.bits - 1)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the arrays of a tensor in this format, in the order the ops take them."""
        offset = () if self.offset == "none" else (self.offset,)
        level2 = (self.level2,) if self.level2 else ()
        return ("codes", "scale", *offset, *level2, *(("order",) if self.ordered else ()))

    def group_size(self, inputs: int) -> int:
        """Inputs that share a scale when a row has `inputs` of them."""
        return inputs if self.group is None else min(self.group, inputs)

    def specs(self, outputs: int, inputs: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of every field of a weight [outputs, inputs]; ValueError if the format cannot hold it."""
        if outputs < 1 or inputs < 1:
            raise ValueError(f"a quantized weight needs at least one output and one input, got [{outputs}, {inputs}]")
        if self.packed and inputs % 2:
            raise ValueError(f"4-bit codes are stored two to a byte: the number of inputs must be even, got {inputs}")
        grouped = outputs, math.ceil(inputs / self.group_size(inputs))
        scale, byte = SCALE_DTYPES[self.scale_dtype], np.dtype(np.uint8)
        specs = {
            "codes": ((outputs, inputs // 2 if self.packed else inputs), self._code_dtype),
            "scale": (grouped, byte if self.level2 else scale),
            "zero": (grouped, byte),
            "minimum": (grouped, scale),
            "channel": ((outputs, 1), scale),
            "order": ((inputs,), np.dtype(np.int32)),
        }
        return {field: specs[field] for field in self.fields}

    @property
    def _code_dtype(self) -> np.dtype:
        if self.element == "e4m3":
            return E4M3
        return np.dtype(np.int8 if self.signed and not self.packed else np.uint8)

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a weight [outputs, inputs]."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.specs(outputs, inputs).values())

    def to_json(self) -> dict[str, Any]:
        """The format as JSON data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "QuantFormat":
        """The format written by `to_json`, by older versions too; ValueError for data that is not one."""
        known = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(cls)}
        needed = {name for name, must in known.items() if must}
        if not needed <= set(data) <= set(known):
            raise ValueError(f"a quantization format has the fields {sorted(known)}, got {sorted(data)}")
        return cls(**data)


def pack_int4(codes: np.ndarray) -> np.ndarray:
    """Codes [..., I] (int8 -8..7 or uint8 0..15, I even) as bytes [..., I/2]: input 2i low, 2i + 1 high."""
    if codes.shape[-1] % 2:
        raise ValueError(f"4-bit codes are packed in pairs: the last axis must be even, got {codes.shape[-1]}")
    nibbles = codes.astype(np.uint8) & 0x0F
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_int4(packed: np.ndarray, *, signed: bool) -> np.ndarray:
    """The codes [..., I] that `pack_int4` packed into [..., I/2]: int8 if signed, else uint8."""
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    codes[..., 0::2] = packed & 0x0F
    codes[..., 1::2] = packed >> 4
    return (codes ^ 8).view(np.int8) - np.int8(8) if signed else codes


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A quantized weight on the host: its format, its shape [O, I] and one array per field of the format."""

    format: QuantFormat
    shape: tuple[int, int]
    arrays: dict[str, np.ndarray]

    def __post_init__(self) -> None:
        specs = self.format.specs(*self.shape)
        if tuple(self.arrays) != self.format.fields:
            raise ValueError(f"{self.format} has the fields {self.format.fields}, got {tuple(self.arrays)}")
        for name, (shape, dtype) in specs.items():
            found = self.arrays[name]
            if found.shape != shape or found.dtype != dtype:
                raise ValueError(
                    f"{name} of a [{self.shape[0]}, {self.shape[1]}] weight in {self.format} must be {dtype.name} "
                    f"{list(shape)}, got {found.dtype.name} {list(found.shape)}"
                )

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def codes(self) -> np.ndarray:
        """The codes, one an element: int8, uint8 or float8_e4m3fn [O, I], in the order in which they are stored."""
        codes = self.arrays["codes"]
        return unpack_int4(codes, signed=self.format.signed) if self.format.packed else codes

    def dequantize(self) -> np.ndarray:
        """The weight as float32 [O, I]."""
        weight = self.codes().astype(np.float32)
        if self.format.offset == "zero":
            weight -= self._spread("zero")
        weight *= self._spread("scale")
        if self.format.offset == "minimum":
            weight += self._spread("minimum")
        if self.format.level2:
            weight *= self.arrays[self.format.level2].astype(np.float32)
        if self.format.ordered:
            weight = weight[:, np.argsort(self.arrays["order"])]
        return weight

    def take_rows(self, rows: Any) -> "QuantizedTensor":
        """The outputs selected by an index array or a slice, in that order."""
        arrays = {
            name: array if name == "order" else np.ascontiguousarray(array[rows]) for name, array in self.arrays.items()
        }
        return QuantizedTensor(self.format, (len(arrays["codes"]), self.shape[1]), arrays)

    @staticmethod
    def concatenate(tensors: Sequence["QuantizedTensor"]) -> "QuantizedTensor":
        """Tensors of one format, input width and order stacked along the outputs; ValueError if they differ."""
        first = tensors[0]
        for other in tensors[1:]:
            if other.format != first.format or other.shape[1] != first.shape[1]:
                raise ValueError(
                    f"cannot stack {other.format} with {other.shape[1]} inputs on {first.format} with {first.shape[1]}"
                )
            if first.format.ordered and (other.arrays["order"] != first.arrays["order"]).any():
                raise ValueError("cannot stack quantized weights whose inputs are ordered differently")
        arrays = {
            name: first.arrays[name] if name == "order" else np.concatenate([tensor.arrays[name] for tensor in tensors])
            for name in first.format.fields
        }
        return QuantizedTensor(first.format, (sum(tensor.shape[0] for tensor in tensors), first.shape[1]), arrays)

    def _spread(self, name: str) -> np.ndarray:
        """A field of one number a group as float32 [O, I]."""
        size = self.format.group_size(self.shape[1])
        return np.repeat(self.arrays[name].astype(np.float32), size, axis=1)[:, : self.shape[1]]
