"""What glibc does with memory that was freed. For the whole process; other C libraries are left alone."""

import ctypes


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
