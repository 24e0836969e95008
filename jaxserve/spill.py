"""Parameters that are done with for now, kept on disk."""

import dataclasses
import itertools
import pathlib

import numpy as np

from jaxserve.pallas_kernels import QuantFormat, QuantizedTensor
from jaxserve.passes.weights import Source, Value

SMALL = 1 << 16  # bytes below which an array stays in memory


@dataclasses.dataclass(frozen=True)
class _File:
    """An array in a file, mapped into memory by each reader anew, so that no page of it stays there."""

    path: pathlib.Path
    shape: tuple[int, ...]
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A value: arrays by field with the format they are in, or the one array "" of a dense one."""

    arrays: dict[str, np.ndarray | _File]
    format: QuantFormat | None = None
    shape: tuple[int, int] = (0, 0)


class Spill:
    """A `Source` of what was put into it, in files of a folder, and of another source's parameters beside that."""

    def __init__(self, folder: pathlib.Path, source: Source):
        folder.mkdir(parents=True)
        self._folder, self._source = folder, source
        self._stored: dict[str, _Stored] = {}
        self._numbers = itertools.count()

    def put(self, path: str, value: Value) -> None:
        """Keeps `value` as the parameter at `path`, once."""
        if isinstance(value, QuantizedTensor):
            arrays = {name: self._keep(array) for name, array in value.arrays.items()}
            self._stored[path] = _Stored(arrays, value.format, value.shape)
        else:
            self._stored[path] = _Stored({"": self._keep(value)})

    def read_native(self, path: str) -> Value:
        """The value at `path` as it was put, or what the other source has there."""
        stored = self._stored.get(path)
        if stored is None:
            return self._source.read_native(path)
        arrays = {name: _read(array) for name, array in stored.arrays.items()}
        return arrays[""] if stored.format is None else QuantizedTensor(stored.format, stored.shape, arrays)

    def _keep(self, array: np.ndarray) -> np.ndarray | _File:
        array = np.asarray(array, order="C")
        if array.nbytes < SMALL:
            return array
        file = _File(self._folder / f"{next(self._numbers):06d}", array.shape, array.dtype)
        file.path.write_bytes(array.view(np.uint8).data)  # unlike tofile, it says why it cannot
        return file


def _read(array: np.ndarray | _File) -> np.ndarray:
    return np.memmap(array.path, array.dtype, mode="r", shape=array.shape) if isinstance(array, _File) else array
