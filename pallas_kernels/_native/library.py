"""Finds the shared library, registers its handlers with XLA, and makes calls of them."""

import ctypes
import functools
import importlib.machinery
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxserve.pallas_kernels._op import TRACED

ISAS = ("generic", "avx2", "avx512")

# The targets of our custom calls in StableHLO, each a handler of this name in the library.
CUSTOM_CALLS = (
    *("jaxserve_rms_norm", "jaxserve_add_rms_norm", "jaxserve_gated_activation"),
    "jaxserve_dense_matmul",
    "jaxserve_kv_write",
    "jaxserve_paged_attention",
    "jaxserve_quantized_matmul",
    *("jaxserve_rope", "jaxserve_rope_qkv"),
    "jaxserve_sample_logits",
)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The library with all handlers registered, or None where it was not built.

    JAXSERVE_CPU_LIBRARY names another build; ImportError if it is not there.
    """
    folder = pathlib.Path(__file__).parent
    built = [folder / f"kernels{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    if asked := os.environ.get("JAXSERVE_CPU_LIBRARY"):
        built = [pathlib.Path(asked)]
        if not built[0].is_file():
            raise ImportError(f"JAXSERVE_CPU_LIBRARY names {asked!r}, and there is no such file: unset it, or build it")
    for path in built:
        if path.exists():
            library = ctypes.CDLL(str(path))
            library.jaxserve_profile_read.restype = ctypes.c_int64
            for name in CUSTOM_CALLS:
                jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
            return library
    return None


def is_available() -> bool:
    """Whether the native kernels can run; the first question loads the library and registers its handlers."""
    return _library() is not None


def native_library() -> ctypes.CDLL:
    """The library; ImportError where it was not built."""
    library = _library()
    if library is None:
        raise ImportError("the native kernels were not built")
    return library


def describe() -> str:
    """Which kernels a CPU step uses, for people: the instruction set, or that there are none."""
    library = _library()
    if library is None:
        return "no native kernels (the package was built without a C++ compiler): XLA's reference ops"
    return f"native kernels, {ISAS[library.jaxserve_isa()]}"


def native_call(
    name: str,
    results: jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct],
    *,
    layer: int | str | None,
    aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> Callable[..., Any]:
    """A function of arrays that calls the handler `name`; `aliases` maps operands to the results that take them over.

    The handler's first operand is the layer; the function takes it as its last if it is TRACED. Attributes are Python
    strings, bools, or numpy scalars and arrays of the type that the handler declares.
    """
    assert name in CUSTOM_CALLS and is_available()
    moved = {operand + 1: result for operand, result in (aliases or {}).items()}
    call = jax.ffi.ffi_call(name, results, input_output_aliases=moved)

    def native(*operands: Any) -> Any:
        if layer == TRACED:
            return call(operands[-1], *operands[:-1], **attributes)
        return call(np.int32(layer or 0), *operands, **attributes)

    return native
