"""Weights are numbers: no recipe makes sense of a NaN or an infinity, and a model that holds one answers nonsense."""

import numpy as np

BLOCK = 1 << 19
"""Elements that are looked at together: what a look needs beside the array stays in the cache."""

# The bits that are all set in a NaN or an infinity, and in no finite number.
_EXPONENT = {
    "float32": np.uint32(0x7F80_0000),
    "float16": np.uint16(0x7C00),
    "bfloat16": np.uint16(0x7F80),
    "float8_e4m3fn": np.uint8(0x7F),  # it has no infinities, and only one NaN of each sign
}


def first_not_finite(array: np.ndarray) -> tuple[int, ...] | None:
    """Where the first NaN or infinity of an array lies, or None; an array of whole numbers has none.

    One pass over the bits, block by block: numpy's own isfinite would make an array as long, and takes bfloat16 and
    float8 one number at a time.
    """
    mask = _EXPONENT.get(array.dtype.name)
    if mask is None:
        return None
    bits = np.ascontiguousarray(array).reshape(-1).view(mask.dtype)
    for start in range(0, len(bits), BLOCK):
        block = bits[start : start + BLOCK] & mask
        if block.max() == mask:
            return tuple(int(i) for i in np.unravel_index(start + int(np.argmax(block)), array.shape))
    return None
