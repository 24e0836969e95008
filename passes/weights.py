"""Weight edits: how a pass changes parameters, written down now and applied later, one weight at a time.

An edit is a function of a few parameters that gives a few parameters. A pipeline can therefore run on shapes alone, and
`WeightPlan` pulls each final parameter through the edits that make it, so that no more than one layer's worth of
intermediate values is alive at a time.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import jax
import numpy as np

from jaxserve.pallas_kernels import QuantizedTensor
from jaxserve.passes.graph import Graph, Input

Value = np.ndarray | QuantizedTensor


@dataclasses.dataclass(frozen=True)
class WeightEdit:
    """`writes = function(*reads)`: parameters by path.

    The function receives each read as the checkpoint stores it (a float array, or the quantized blocks) and returns one
    value for each path in `writes`, in their order. Reads and writes may share paths: the edit then replaces them.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    function: Callable[..., tuple[Value, ...]]


class Source(Protocol):
    """Where original parameters come from: `models.checkpoint.Checkpoint`, or a dict in a test."""

    def read_native(self, path: str) -> Value: ...


class WeightPlan:
    """The final parameters of a graph, as a function of the original ones and an ordered list of edits."""

    def __init__(self, edits: Sequence[WeightEdit]):
        self.edits = tuple(edits)
        self._writers: dict[str, list[int]] = {}
        for index, edit in enumerate(self.edits):
            for path in edit.writes:
                self._writers.setdefault(path, []).append(index)

    def materialize(self, graph: Graph, source: Source) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (path, array) for every parameter of `graph`, in its order, in the dtype the graph asks for.

        Results of one edit that several parameters share are kept until the last of them is taken. Raises ValueError
        when a value does not have the shape that the graph declares.
        """
        pending: dict[int, dict[str, Value]] = {}
        wanted = {entry.path for entry in graph.of_kind("param")}
        for entry in graph.of_kind("param"):
            index = self._last_writer(entry.path, len(self.edits))
            if index is None:
                value = source.read_native(entry.path)
            else:
                if index not in pending:
                    pending[index] = self._run(index, source, {})
                value = pending[index].pop(entry.path)
                if not wanted & pending[index].keys():
                    del pending[index]
            yield entry.path, _as_declared(value, entry)

    def originals(self, path: str) -> tuple[str, ...]:
        """The checkpoint's parameters that the final parameter at `path` is made of."""
        return tuple(dict.fromkeys(self._originals(path, len(self.edits))))

    def _originals(self, path: str, before: int) -> Iterator[str]:
        index = self._last_writer(path, before)
        if index is None:
            yield path
        else:
            for read in self.edits[index].reads:
                yield from self._originals(read, index)

    def _last_writer(self, path: str, before: int) -> int | None:
        return max((index for index in self._writers.get(path, ()) if index < before), default=None)

    def _run(self, index: int, source: Source, done: dict[int, dict[str, Value]]) -> dict[str, Value]:
        """What one edit writes; `done` holds the edits before it that this pull has already run."""
        if index not in done:
            edit = self.edits[index]
            reads = [self._value(path, index, source, done) for path in edit.reads]
            done[index] = dict(zip(edit.writes, edit.function(*reads), strict=True))
        return done[index]

    def _value(self, path: str, before: int, source: Source, done: dict[int, dict[str, Value]]) -> Value:
        index = self._last_writer(path, before)
        return source.read_native(path) if index is None else self._run(index, source, done)[path]


def dense(value: Value) -> np.ndarray:
    """The float array that a value stands for."""
    return value.dequantize() if isinstance(value, QuantizedTensor) else value


def _as_declared(value: Value, entry: Input) -> np.ndarray:
    array = dense(value)
    if array.shape != entry.aval.shape:
        raise ValueError(f"{entry.path}: the edits give shape {array.shape}, the graph declares {entry.aval.shape}")
    return np.ascontiguousarray(array.astype(entry.aval.dtype, copy=False))


class ValueSource:
    """A `Source` over values that are already in memory (tests, checks, experiments)."""

    def __init__(self, values: Mapping[str, Value | jax.Array]):
        self._values = values

    def read_native(self, path: str) -> Value:
        value = self._values[path]
        return value if isinstance(value, QuantizedTensor) else np.asarray(value)
