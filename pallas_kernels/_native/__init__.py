"""The native kernels' library: one shared object with every `cpu.cc`, built by the normal install.

Where it is missing (no C++ compiler when the package was built), nothing is registered and the XLA references run.
"""

from jaxserve.pallas_kernels._native.library import CUSTOM_CALLS, describe, is_available, native_call

__all__ = ["CUSTOM_CALLS", "describe", "is_available", "native_call"]
