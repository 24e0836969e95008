"""Reading tensors out of a file whose header has been checked."""

import math
import mmap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from jaxserve.models.errors import CheckpointError


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    """The file's bytes on demand, to read a header of unknown length; CheckpointError if it is empty or unreadable."""
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:
        raise CheckpointError(f"{path}: is empty") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    with data:
        yield data


def read_array(path: str, start: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """An array stored from byte `start` on.

    It is read and not mapped: an array that maps a file dies with the process when somebody overwrites the file.
    """
    count = math.prod(shape)
    try:
        array = np.fromfile(path, np.uint8, count * dtype.itemsize, offset=start)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    if array.nbytes != count * dtype.itemsize:
        raise CheckpointError(f"{path}: became shorter since it was opened")
    return array.view(dtype).reshape(shape)


def check_places(path: Path, places: Iterable[tuple[str, int, int]], size: int) -> None:
    """Places are (tensor, start, end) within `size` bytes of data; CheckpointError if one is outside or two overlap."""
    last_end, last_name = 0, ""
    for name, start, end in sorted(places, key=lambda place: place[1:]):
        if not 0 <= start <= end <= size:
            raise CheckpointError(
                f"{path}: tensor '{name}' lies at bytes {start} to {end} of the data, which has {size}"
                " (is the file cut off?)"
            )
        if start < last_end and end > start:
            raise CheckpointError(f"{path}: tensors '{last_name}' and '{name}' overlap in the file")
        if end > last_end:
            last_end, last_name = end, name
