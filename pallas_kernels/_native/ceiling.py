"""What bounds a step of one token: how fast the kernels' threads read memory, and a bare int4 product out of it."""

import ctypes
import time
from collections.abc import Callable

import numpy as np

from jaxserve.pallas_kernels._native.library import native_library

GROUP = np.dtype([("codes", np.uint8, (16, 64, 4)), ("scale", np.float32, (64,))])
"""128 inputs of 64 outputs: codes[k, o] holds inputs 8k to 8k + 7 of output o, the first four in the low halves of its
bytes and the others in the high ones; w = scale * (code - 8)."""
GROUP_INPUTS, GROUP_OUTPUTS = 128, 64
_GROUPS = 8  # of a row of the product that is timed: 1024 inputs


def memory_seconds(size: int, repeats: int = 5) -> float:
    """Seconds in which the kernels' threads read `size` bytes while they do nothing else: the median."""
    words = np.ones(size // 8, np.uint64)
    return _median(repeats, lambda: native_library().jaxserve_read_memory(_pointer(words), ctypes.c_int64(len(words))))


def int4_product(weight: np.ndarray, x: np.ndarray) -> np.ndarray | None:
    """y [O] = w x, float32, of w [O/64, I/128] in elements of GROUP and x int8 [I]; None without AVX512-VNNI.

    A bare loop over the weights, shared by the kernels' threads: products are summed as whole numbers in a group and as
    floats across groups.
    """
    y = np.empty(GROUP_OUTPUTS * len(weight), np.float32)
    sizes = map(ctypes.c_int64, weight.shape)
    done = native_library().jaxserve_int4_product(_pointer(weight), _pointer(x), _pointer(y), *sizes)
    return y if done else None


def int4_seconds(weights: int, repeats: int = 5) -> float | None:
    """Seconds of `int4_product` with about so many weights, out of memory: the median; None without AVX512-VNNI."""
    blocks = max(1, round(weights / (_GROUPS * GROUP_INPUTS * GROUP_OUTPUTS)))
    memory = np.ones(blocks * _GROUPS * GROUP.itemsize + 64, np.uint8)
    aligned = memory[-memory.ctypes.data % 64 :][
        : blocks * _GROUPS * GROUP.itemsize
    ]  # to lines of memory, as jax aligns
    weight, x = aligned.view(GROUP).reshape(blocks, _GROUPS), np.ones(_GROUPS * GROUP_INPUTS, np.int8)
    if int4_product(weight, x) is None:
        return None
    return _median(repeats, lambda: int4_product(weight, x))


def _median(repeats: int, call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
