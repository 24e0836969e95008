"""What the native kernels take: time by name of call."""

import contextlib
import ctypes
import dataclasses
from collections.abc import Iterator

from jaxserve.pallas_kernels._native.library import native_library

_MOST_BYTES = 1 << 20  # of the text that the library hands over


@dataclasses.dataclass(frozen=True)
class Calls:
    """The calls of one name: how many, and their seconds from entry to return, other threads included."""

    name: str
    count: int
    seconds: float


class Profile:
    """Counts while `profiled` is entered."""

    def calls(self) -> list[Calls]:
        """What was called since, the longest in all first."""
        text = ctypes.create_string_buffer(_MOST_BYTES)
        size = native_library().jaxserve_profile_read(text, ctypes.c_int64(_MOST_BYTES))
        lines = [line.split(" ", 2) for line in text.raw[:size].decode().splitlines()]
        found = [Calls(name, int(count), int(nanoseconds) / 1e9) for count, nanoseconds, name in lines]
        return sorted(found, key=lambda each: -each.seconds)


@contextlib.contextmanager
def profiled() -> Iterator[Profile]:
    """Times every call of a native kernel in this process, in all threads."""
    native_library().jaxserve_profile(1)
    try:
        yield Profile()
    finally:
        native_library().jaxserve_profile(0)
