"""Weight edits: how a pass changes parameters, written down now and applied later, one weight at a time.

An edit is a function of a few parameters that gives a few parameters. A pipeline can therefore run on shapes alone, and
`WeightPlan` pulls each final parameter through the edits that make it, so that no more than one layer's worth of
intermediate values is alive at a time.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import jax
import numpy as np

from jaxserve.pallas_kernels import QuantizedTensor
from jaxserve.passes.graph import Graph, Input
from jaxserve.passes.statistics import is_statistic

Value = np.ndarray | QuantizedTensor


@dataclasses.dataclass(frozen=True)
class WeightEdit:
    """`writes = function(*reads)`: parameters by path.

    The function receives each read as the checkpoint stores it (a float array, or the quantized blocks) and returns one
    value for each path in `writes`, in their order. Reads and writes may share paths: the edit then replaces them. A
    path that `statistic_path` makes reads a `Statistic` that the pass declares.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    function: Callable[..., tuple[Value, ...]]


# Is told of every edit that runs: what it read and what it wrote.
Watch = Callable[[WeightEdit, Sequence[Value], Sequence[Value]], None]


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

    def materialize(self, graph: Graph, source: Source, watch: Watch | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (path, array) for every parameter of `graph`, in its order, in the dtype the graph asks for.

        Raises ValueError when a value does not have the shape that the graph declares.
        """
        params, count = graph.of_kind("param"), len(self.edits)
        pull = Pull(self, source, [(entry.path, count) for entry in params], watch)
        for entry in params:
            yield entry.path, as_declared(pull.take(entry.path, count), entry)

    def originals(self, path: str) -> tuple[str, ...]:
        """The checkpoint's parameters that the final parameter at `path` is made of."""
        found: dict[str, None] = {}
        stack = [(path, len(self.edits))]
        while stack:
            path, before = stack.pop()
            index = self.writer(path, before)
            if index is not None:
                stack += [(read, index) for read in reversed(self.edits[index].reads)]
            elif not is_statistic(path):
                found[path] = None
        return tuple(found)

    def writer(self, path: str, before: int) -> int | None:
        """The last of the first `before` edits that writes `path`, or None: it is as the source has it."""
        return max((index for index in self._writers.get(path, ()) if index < before), default=None)

    def makers(self, path: str, before: int) -> set[int]:
        """Every one of the first `before` edits that has a part in the parameter at `path`."""
        found: set[int] = set()
        stack = [self.writer(path, before)]
        while stack:
            index = stack.pop()
            if index is not None and index not in found:
                found.add(index)
                stack += [self.writer(read, index) for read in self.edits[index].reads]
        return found


class Pull:
    """Pulls parameters through a plan's edits, each of which runs once, when the first of its results is asked for.

    `wanted` is everything that will be taken: (path, n) for the parameter at `path` after the first n edits, as often
    as it will be taken. A result is held until the last who wants it, another edit maybe, has it.
    """

    def __init__(self, plan: WeightPlan, source: Source, wanted: Iterable[tuple[str, int]], watch: Watch | None = None):
        self._plan, self._source, self._watch = plan, source, watch
        self._uses: dict[tuple[int, str], int] = {}
        self._held: dict[tuple[int, str], Value] = {}
        stack, known = list(wanted), set[int]()
        while stack:
            path, before = stack.pop()
            index = plan.writer(path, before)
            if index is not None:
                self._uses[index, path] = self._uses.get((index, path), 0) + 1
                if index not in known:
                    known.add(index)
                    stack += [(read, index) for read in plan.edits[index].reads]

    def take(self, path: str, before: int) -> Value:
        """The parameter at `path` after the first `before` edits."""
        index = self._plan.writer(path, before)
        if index is None:
            return self._source.read_native(path)
        key = index, path
        if key not in self._held:
            self._run(index)
        self._uses[key] -= 1
        return self._held[key] if self._uses[key] else self._held.pop(key)

    def _run(self, index: int) -> None:
        edit = self._plan.edits[index]
        reads = [self.take(path, index) for path in edit.reads]
        results = edit.function(*reads)
        if self._watch is not None:
            self._watch(edit, reads, results)
        for path, value in zip(edit.writes, results, strict=True):
            if self._uses.get((index, path)):
                self._held[index, path] = value


def dense(value: Value) -> np.ndarray:
    """The float array that a value stands for."""
    return value.dequantize() if isinstance(value, QuantizedTensor) else value


def as_declared(value: Value, entry: Input) -> np.ndarray:
    """The value as an input of a graph: dense, in its dtype. ValueError when it has another shape."""
    array = dense(value)
    if array.shape != entry.aval.shape:
        raise ValueError(f"{entry.path}: the edits give shape {array.shape}, the graph declares {entry.aval.shape}")
    return np.asarray(array.astype(entry.aval.dtype, copy=False), order="C")


class ValueSource:
    """A `Source` over values that are already in memory (tests, checks, experiments)."""

    def __init__(self, values: Mapping[str, Value | jax.Array]):
        self._values = values

    def read_native(self, path: str) -> Value:
        value = self._values[path]
        return value if isinstance(value, QuantizedTensor) else np.asarray(value)
