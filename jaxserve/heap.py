"""What glibc does with memory that was freed. For the whole process; other C libraries are left alone."""

import ctypes
import mmap

_LARGE_PAGE = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1, which Python does not name


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory for the next step instead of giving it back to the kernel. For the whole process.

    XLA:CPU allocates a program's temporaries anew in each call. Large ones would come as fresh pages every time, and
    touching those for the first time takes longer than much of a step: 20 ms for 50 MB on two cores, nothing with this.
    Call it before jax starts its threads. Returns False where there is no glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Numbers of malloc.h. One arena: those of other threads unmap a block of this size whenever it is freed.
    trim_threshold, mmap_threshold, arena_max, most = -1, -3, -8, 2**31 - 1
    options = ((mmap_threshold, most), (trim_threshold, most), (arena_max, 1))
    return all([mallopt(option, value) == 1 for option, value in options])


def give_back_free_memory() -> None:
    """Returns what is free now to the kernel, `keep_freed_memory` or not: loading an artifact leaves some 100 MB."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def use_large_pages(address: int, size: int) -> bool:
    """Moves memory that is in use already into pages of 2 MiB, as far as it fills such pages; its contents stay.

    A step reads all weights and a part of the KV cache, far more than the processor knows the 4 KiB pages of. For
    small arrays, and where the system has no such pages to give or is older than Linux 6.1, False, and nothing is lost.
    """
    first, end = -(-address // _LARGE_PAGE) * _LARGE_PAGE, (address + size) // _LARGE_PAGE * _LARGE_PAGE
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if end <= first or madvise is None or not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return all([madvise(first, end - first, advice) == 0 for advice in (mmap.MADV_HUGEPAGE, _COLLAPSE)])
