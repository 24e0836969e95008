"""Which core the native kernels leave to whom."""

import contextlib
import os
from collections.abc import Iterator

from jaxserve.pallas_kernels._native.library import is_available, native_library


@contextlib.contextmanager
def host_threads() -> Iterator[None]:
    """Keeps the calling thread, and those that it starts meanwhile, off the core from which kernels are called.

    A team of all cores has a thread on every other one, whose work others take over while the host has its core. Who
    calls the kernels cannot be helped like that: whatever XLA does between two calls would wait for the host. Nothing
    happens where the team's threads are not kept on cores (team.h).
    """
    core = native_library().jaxserve_callers_core() if is_available() else -1
    if core < 0:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before - {core} or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
