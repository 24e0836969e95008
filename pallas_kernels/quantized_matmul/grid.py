"""The numbers that a group of codes can stand for, and rounding to them: what every way to choose codes shares."""

import dataclasses
from functools import cached_property

import numpy as np

from jaxserve.pallas_kernels.quantized_matmul.format import E4M3, SCALE_DTYPES, QuantFormat, QuantizedTensor, pack_int4

PROTECTED = 119
"""Where a weight of two levels is kept within, in units of `channel`: rounding it to the coarser level moves it by at
most half of the largest step, 8, and the result is still an int8 (QServe's protective range)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
    """Scales and offsets for some groups of a weight: the fields of `format` but codes and order, as they are stored.

    Fields have a shape [..., O, G] of the caller's choice; weights and codes broadcast against them.
    """

    format: QuantFormat
    fields: dict[str, np.ndarray]

    @staticmethod
    def spanning(low: np.ndarray, high: np.ndarray, format: QuantFormat, channel: np.ndarray | None = None) -> "Grid":
        """The grid that spans [low, high] in each group; `channel` is `channel_scale` of the rows, for two levels.

        Without an offset the scale is absmax / (2^(bits-1) - 1), for e4m3 absmax / 448; with a minimum it is
        (max - min) / (2^bits - 1); with an integer zero the range is first widened to contain 0. Raises ValueError if a
        number overflows the format's dtype.
        """
        largest = format.code_range[1]
        if format.offset == "none":
            return Grid(format, {"scale": _stored(np.maximum(-low, high) / largest, format)})
        if format.offset == "minimum":
            return Grid(format, {"scale": _stored((high - low) / largest, format), "minimum": _stored(low, format)})
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        if channel is None:
            scale = _stored((high - low) / largest, format)
            return Grid(format, {"scale": scale, "zero": _zero(low, scale, largest)})
        inverse = _inverse(channel)
        low, high = np.maximum(low * inverse, -PROTECTED), np.minimum(high * inverse, PROTECTED)
        scale = np.maximum(np.rint((high - low) / largest), 1).astype(np.uint8)
        return Grid(format, {"scale": scale, "zero": _zero(low, scale, largest), "channel": channel})

    @cached_property
    def _wide(self) -> dict[str, np.ndarray]:
        return {name: field.astype(np.float32) for name, field in self.fields.items()}

    @cached_property
    def _inverse(self) -> dict[str, np.ndarray]:
        return {name: _inverse(field) for name, field in self.fields.items() if name in ("scale", "channel")}

    def nearest(self, weight: np.ndarray) -> np.ndarray:
        """The code nearest to each weight, as float32."""
        format, (smallest, largest) = self.format, self.format.code_range
        if format.offset == "minimum":
            weight = weight - self._wide["minimum"]
        if format.level2:
            weight = np.clip(weight * self._inverse[format.level2], -PROTECTED, PROTECTED)
        codes = weight * self._inverse["scale"]
        if format.element == "e4m3":
            return np.clip(codes, smallest, largest).astype(E4M3).astype(np.float32)
        np.rint(codes, out=codes)
        if format.offset == "zero":
            codes += self._wide["zero"]
        return np.clip(codes, -largest if format.signed else smallest, largest, out=codes)

    def values(self, codes: np.ndarray) -> np.ndarray:
        """What float32 codes stand for, in float32: the same numbers as `QuantizedTensor.dequantize`."""
        if self.format.offset == "zero":
            codes = codes - self._wide["zero"]
        values = codes * self._wide["scale"]
        if self.format.offset == "minimum":
            values += self._wide["minimum"]
        return values * self._wide[self.format.level2] if self.format.level2 else values

    def tensor(self, codes: np.ndarray, order: np.ndarray | None = None) -> QuantizedTensor:
        """The weight with float32 codes [O, I]; the grid's fields must be [O, G]."""
        arrays = {"codes": stored_codes(codes, self.format), **self.fields}
        if order is not None:
            arrays["order"] = order.astype(np.int32)
        return QuantizedTensor(self.format, (codes.shape[0], codes.shape[1]), arrays)


def channel_scale(weight: np.ndarray, format: QuantFormat) -> np.ndarray | None:
    """The outer scale [O, 1] of a weight [O, I] on two levels, absmax / 119; None if the format has but one."""
    return _stored(np.abs(weight).max(axis=1, keepdims=True) / PROTECTED, format) if format.level2 else None


def stored_codes(codes: np.ndarray, format: QuantFormat) -> np.ndarray:
    """Whole or e4m3 numbers [O, I] as the field `codes` of a format."""
    if format.packed:
        return pack_int4(codes.astype(np.int8))
    return np.ascontiguousarray(codes.astype(format.specs(*codes.shape)["codes"][1]))


def _inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale in float32, and 0 for a scale of 0: its group is constant."""
    wide = scale.astype(np.float32)
    return np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide >= np.finfo(np.float32).tiny)


def _zero(low: np.ndarray, scale: np.ndarray, largest: int) -> np.ndarray:
    return np.clip(np.rint(-low * _inverse(scale)), 0, largest).astype(np.uint8)


def _stored(numbers: np.ndarray, format: QuantFormat) -> np.ndarray:
    """Numbers rounded to the format's dtype; ValueError if one overflows it."""
    with np.errstate(over="ignore"):
        stored = numbers.astype(SCALE_DTYPES[format.scale_dtype])
    if not np.isfinite(stored.astype(np.float32)).all():
        raise ValueError(f"a scale or minimum of {np.abs(numbers).max():g} overflows {format.scale_dtype}")
    return stored
