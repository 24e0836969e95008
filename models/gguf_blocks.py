"""The block types of GGUF files as quantized weights, bit for bit.

Most types are affine: w = scale * q + minimum, with numbers for every 16 or 32 inputs. Where a file packs 6-bit factors
for a whole block of 256 (the K types and IQ4_XS), scale and minimum are products of a float16 and a factor: float32
holds them exactly, float16 would not. Codes of up to 4 bits take 4 bits, wider ones 8. What `dequantize` of the
gguf package computes, in float32, is what a kept block means here, to the last bit.

Memory by weight, in bits, against the file: Q4_0 4.5 (4.5), Q4_1 5 (5), Q8_0 8.5 (8.5), Q4_K 6 (4.5), Q2_K 8 (2.6),
Q3_K 6 (3.4), Q5_0 8.5 (5.5), Q5_1 9 (6), Q5_K 10 (5.5), Q6_K 10 (6.6), IQ4_NL 8.5 (4.5), IQ4_XS 9 (4.25).

Types whose codes are points of a lattice (IQ1 to IQ3), ternary or FP4 have no such form: they are requantized.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import IQ4_NL

from jaxserve.pallas_kernels import QuantFormat, QuantizedTensor, pack_int4

Type = GGMLQuantizationType


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a type is kept: its format, and a function of blocks [n, bytes] that gives codes [n, block] and the other
    fields of the format [n, groups]."""

    format: QuantFormat
    decode: Callable[[np.ndarray], tuple[np.ndarray, ...]]


def unpack_blocks(data: np.ndarray, kind: Type, inputs: int) -> QuantizedTensor:
    """The rows of a matrix [O, I], given as bytes [O, n], in the form of KEPT."""
    form, outputs = KEPT[kind], data.shape[0]
    block, size = GGML_QUANT_SIZES[kind]
    codes, *numbers = form.decode(data.reshape(outputs * inputs // block, size))
    codes = codes.reshape(outputs, inputs)
    arrays = {"codes": pack_int4(codes) if form.format.packed else np.ascontiguousarray(codes)}
    for name, values in zip(form.format.fields[1:], numbers, strict=True):
        arrays[name] = np.ascontiguousarray(values.reshape(outputs, -1))
    return QuantizedTensor(form.format, (outputs, inputs), arrays)


def _spread(data: np.ndarray, chunk: int, bits: int) -> np.ndarray:
    """Fields of `bits` bits [n, 8/bits * bytes] of bytes [n, bytes]: in every chunk of so many bytes first the lowest
    bits of all bytes, then the next."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = data.reshape(len(data), -1, 1, chunk) >> shifts & np.uint8((1 << bits) - 1)
    return fields.reshape(len(data), -1)


def _cut(blocks: np.ndarray, *sizes: int) -> list[np.ndarray]:
    """Blocks [n, bytes] cut into parts of so many bytes; two bytes that stand alone are a float16 [n, 1]."""
    parts = np.split(blocks, np.cumsum(sizes)[:-1], axis=1)
    return [np.ascontiguousarray(part) for part in parts]


def _half(data: np.ndarray) -> np.ndarray:
    return data.view(np.float16)


def _product(half: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """A float16 a block times a small integer a group: exact in float32, which has more bits than both together."""
    return _half(half).astype(np.float32) * factors.astype(np.float32)


def _signed(codes: np.ndarray, offset: int) -> np.ndarray:
    return (codes - np.uint8(offset)).view(np.int8)


def _q4_0(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    scale, codes = _cut(blocks, 2, 16)
    return _signed(_spread(codes, 16, 4), 8), _half(scale)


def _q4_1(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    scale, minimum, codes = _cut(blocks, 2, 2, 16)
    return _spread(codes, 16, 4), _half(scale), _half(minimum)


def _q5_0(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    scale, high, low = _cut(blocks, 2, 4, 16)
    return _signed(_spread(low, 16, 4) | _spread(high, 1, 1) << 4, 16), _half(scale)


def _q5_1(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    scale, minimum, high, low = _cut(blocks, 2, 2, 4, 16)
    return _spread(low, 16, 4) | _spread(high, 1, 1) << 4, _half(scale), _half(minimum)


def _q8_0(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    scale, codes = _cut(blocks, 2, 32)
    return codes.view(np.int8), _half(scale)


def _q2_k(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    factors, codes, scale, minimum = _cut(blocks, 16, 64, 2, 2)
    return _spread(codes, 32, 2), _product(scale, factors & 15), -_product(minimum, factors >> 4)


def _q3_k(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    high, low, factors, scale = _cut(blocks, 32, 64, 12, 2)
    factors = _spread(factors[:, :8], 8, 4) | _spread(factors[:, 8:], 4, 2) << 4
    codes = _spread(low, 32, 2) | _spread(high, 32, 1) << 2
    return _signed(codes, 4), _product(scale, _signed(factors, 32))


def _factors(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight 6-bit factors of scales and eight of minimums in 12 bytes: the first four of each in the low bits of bytes
    0 to 7, the others split between the nibbles of bytes 8 to 11 and the high bits of bytes 0 to 7."""
    scales, minimums, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    late = (rest & 15) | (scales >> 6 << 4), (rest >> 4) | (minimums >> 6 << 4)
    return np.concatenate([scales & 63, late[0]], axis=1), np.concatenate([minimums & 63, late[1]], axis=1)


def _q4_k(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    scale, minimum, packed, codes = _cut(blocks, 2, 2, 12, 128)
    scales, minimums = _factors(packed)
    return _spread(codes, 32, 4), _product(scale, scales), -_product(minimum, minimums)


def _q5_k(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    scale, minimum, packed, high, low = _cut(blocks, 2, 2, 12, 32, 128)
    scales, minimums = _factors(packed)
    codes = _spread(low, 32, 4) | _spread(high, 32, 1) << 4
    return codes, _product(scale, scales), -_product(minimum, minimums)


def _q6_k(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    low, high, factors, scale = _cut(blocks, 128, 64, 16, 2)
    codes = _spread(low, 64, 4) | _spread(high, 32, 2) << 4
    return _signed(codes, 32), _product(scale, factors.view(np.int8))


def _points(codes: np.ndarray) -> np.ndarray:
    """The sixteen uneven steps of IQ4, which are whole numbers."""
    return np.array(IQ4_NL.kvalues, np.int8)[codes]


def _iq4_nl(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    scale, codes = _cut(blocks, 2, 16)
    return _points(_spread(codes, 16, 4)), _half(scale)


def _iq4_xs(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    scale, high, low, codes = _cut(blocks, 2, 2, 4, 128)
    factors = _spread(low, 1, 4) | _spread(high, 1, 2) << 4
    return _points(_spread(codes, 16, 4)), _product(scale, _signed(factors, 32))


def _kept(bits: int, group: int, offset: str, scale: str, decode: Callable[..., tuple[np.ndarray, ...]]) -> Blocks:
    return Blocks(QuantFormat(bits=bits, group=group, offset=offset, scale_dtype=scale), decode)


KEPT: dict[Type, Blocks] = {
    Type.Q4_0: _kept(4, 32, "none", "float16", _q4_0),
    Type.Q4_1: _kept(4, 32, "minimum", "float16", _q4_1),
    Type.Q5_0: _kept(8, 32, "none", "float16", _q5_0),
    Type.Q5_1: _kept(8, 32, "minimum", "float16", _q5_1),
    Type.Q8_0: _kept(8, 32, "none", "float16", _q8_0),
    Type.Q2_K: _kept(3, 16, "minimum", "float32", _q2_k),
    Type.Q3_K: _kept(3, 16, "none", "float32", _q3_k),
    Type.Q4_K: _kept(4, 32, "minimum", "float32", _q4_k),
    Type.Q5_K: _kept(8, 32, "minimum", "float32", _q5_k),
    Type.Q6_K: _kept(8, 16, "none", "float32", _q6_k),
    Type.IQ4_NL: _kept(8, 32, "none", "float16", _iq4_nl),
    Type.IQ4_XS: _kept(8, 32, "none", "float32", _iq4_xs),
}
"""Types that a format holds exactly."""

REQUANTIZED = QuantFormat(bits=8, group=32, offset="none", scale_dtype="float32")
"""What scheme `native` rounds the other types to."""

ROUNDED = frozenset({
    Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S, Type.TQ1_0, Type.TQ2_0,
    Type.MXFP4,
})  # fmt: skip
"""The other types that can be read."""
