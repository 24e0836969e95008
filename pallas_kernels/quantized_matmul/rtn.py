"""Round-to-nearest quantization, plain numpy."""

import numpy as np

from jaxserve.pallas_kernels.quantized_matmul.format import SCALE_DTYPES, QuantFormat, QuantizedTensor, pack_int4


def quantize_rtn(weight: np.ndarray, format: QuantFormat) -> QuantizedTensor:
    """Rounds a weight [O, I] to the nearest codes.

    Without an offset the scale is absmax / (2^(bits-1) - 1) and codes stay within plus and minus that many; with a
    minimum it is (max - min) / (2^bits - 1); with an integer zero the range is first widened to contain 0. Scales and
    minimums are rounded to the format's dtype before the codes are computed, so codes fit the numbers that are stored.

    Raises ValueError if the weight is not two-dimensional or not finite, or a scale overflows the format's dtype.
    """
    if weight.ndim != 2:
        raise ValueError(f"only a weight [O, I] can be quantized, got shape {list(weight.shape)}")
    outputs, inputs = weight.shape
    specs = format.specs(outputs, inputs)
    size, groups = format.group_size(inputs), specs["scale"][0][1]
    # The last group may be shorter: repeating its last value changes neither its extremes nor what is kept.
    grouped = np.pad(weight.astype(np.float32), ((0, 0), (0, groups * size - inputs)), mode="edge")
    grouped = grouped.reshape(outputs, groups, size)
    low, high = grouped.min(axis=2), grouped.max(axis=2)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ValueError("cannot quantize a weight that holds infinities or NaN")

    smallest, largest = format.code_range
    arrays = {}
    if format.offset == "none":
        smallest = -largest
        arrays["scale"] = _stored(np.maximum(-low, high) / largest, format)
    elif format.offset == "minimum":
        arrays["scale"] = _stored((high - low) / largest, format)
        arrays["minimum"] = _stored(low, format)
    else:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        arrays["scale"] = _stored((high - low) / largest, format)

    scale = arrays["scale"].astype(np.float32)
    inverse = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale != 0)
    if format.offset == "zero":
        arrays["zero"] = np.clip(np.rint(-low * inverse), smallest, largest).astype(np.uint8)
    if format.offset == "minimum":
        grouped -= arrays["minimum"].astype(np.float32)[..., None]
    grouped *= inverse[..., None]
    np.rint(grouped, out=grouped)
    if format.offset == "zero":
        grouped += arrays["zero"][..., None]
    np.clip(grouped, smallest, largest, out=grouped)
    codes = grouped.reshape(outputs, groups * size)[:, :inputs].astype(np.int8 if format.signed else np.uint8)
    codes = pack_int4(codes) if format.bits == 4 else np.ascontiguousarray(codes)
    return QuantizedTensor(format, (outputs, inputs), {"codes": codes, **arrays})


def _stored(numbers: np.ndarray, format: QuantFormat) -> np.ndarray:
    """Numbers rounded to the format's dtype; ValueError if one overflows it."""
    with np.errstate(over="ignore"):
        stored = numbers.astype(SCALE_DTYPES[format.scale_dtype])
    if not np.isfinite(stored.astype(np.float32)).all():
        raise ValueError(f"a scale or minimum of {np.abs(numbers).max():g} overflows {format.scale_dtype}")
    return stored
