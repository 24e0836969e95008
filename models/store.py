"""What a file format offers to a checkpoint: named tensors, described by a validated header and read on demand."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from jaxserve.pallas_kernels import QuantFormat, QuantizedTensor


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file describes it: shape, what the file calls its type, the dtype that reading gives (None if we
    cannot read that type), the quantized form nearest to it (None if it is not quantized), the file's name, and the
    bytes it takes there. `exact` says that this form holds it bit for bit, and that `read_native` gives it;
    `activation` what a quantized weight's activations are to be quantized to, in the words of `quantized_matmul`."""

    shape: tuple[int, ...]
    stored: str
    dtype: str | None
    format: QuantFormat | None
    file: str
    nbytes: int
    exact: bool = True
    activation: str | None = None


class TensorStore(Protocol):
    """Named tensors of one checkpoint, found in a validated header and read on demand."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Every tensor there is."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor; float32 if it is stored quantized, else in the stored dtype."""
        ...

    def read_native(self, name: str) -> "QuantizedTensor | np.ndarray":
        """The quantized form where the tensor has one that is exact, else as `read`."""
        ...


class RawStore(TensorStore, Protocol):
    """A store whose tensors may be parts of quantized weights."""

    def read_raw(self, name: str) -> np.ndarray:
        """The tensor in its stored dtype, whole numbers and 8-bit floats included."""
        ...
