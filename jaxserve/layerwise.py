"""Running a calibrated stage: layer by layer, over all of the calibration text.

For each segment in turn (`passes.segments`): its parameters as they were before the pass are loaded, the statistics
that its edits read are collected over all batches, its edits run and their results go to disk; then the segment runs
with the new parameters, and what it gives is what the next one gets. So a layer is calibrated on what the changed
layers before it give, as GPTQ (Frantar et al., arXiv:2210.17323) does it. A pass that `keeps_numbers` needs one run
for both.

In memory are at a time: one segment's parameters and statistics, and the activations between two segments.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve._compat import Var, spec_of
from jaxserve.errors import UserError
from jaxserve.passes import statistics
from jaxserve.passes.graph import Graph
from jaxserve.passes.pipeline import Stage
from jaxserve.passes.segments import Part, Segments
from jaxserve.passes.statistics import Statistic
from jaxserve.passes.weights import Pull, Source, Value, Watch, WeightPlan, as_declared
from jaxserve.reporting import StageProgress
from jaxserve.spill import Spill

Batch = dict[Var, jax.Array | np.ndarray]
Arrays = Sequence[jax.Array]


@dataclasses.dataclass(frozen=True)
class Run:
    """A part of a segment: its first `handed` results go to later segments, `measured` are taken of its results.
    `operands` are what the part's operands are called where they come from."""

    part: Part
    handed: int
    operands: tuple[Var, ...]
    measured: tuple[Statistic, ...] = ()

    @property
    def meters(self) -> tuple[tuple[int, statistics.StatisticKind], ...]:
        """Each distinct (result, kind) once: q, k and v read one activation."""
        return tuple(dict.fromkeys((self.part.results.index(s.var), s.kind) for s in self.measured))


@dataclasses.dataclass(frozen=True)
class Step:
    """What is done with one segment: `before` runs the graph before the pass and collects, then the parameters
    `written` get their values and the statistics `dropped` go; `after` runs the graph after the pass.

    `needed` is what later segments read of all that has been computed until then.
    """

    before: Run | None
    written: tuple[str, ...]
    dropped: tuple[str, ...]
    after: Run | None
    needed: frozenset[Var]


def plan_steps(before: Graph, stage: Stage, plan: WeightPlan) -> list[Step]:
    """The steps of a stage, by segment; `plan` holds the edits that its graph's parameters are made by.

    A parameter gets its value when the first segment that reads it comes up (a tied embedding: at once), and keeps it.
    Of a pass that changes numbers, all values that are handed on come from the graph after it. Raises UserError when
    its edits read statistics of a later segment, ValueError when the pass replaces a value that one segment hands to
    another without saying what by.
    """
    old, new, keeps = Segments(before), Segments(stage.result.graph), stage.step.keeps_numbers
    written = {
        entry.path: new.first_reader(entry.path)
        for entry in new.graph.of_kind("param")
        if plan.writer(entry.path, len(plan.edits)) is not None
    }
    times = _edit_times(stage, old, plan, written)
    renamed = {} if keeps else {var: new for var, new in stage.result.renamed.items() if isinstance(new, Var)}
    steps: list[Step] = []
    needed: frozenset[Var] = frozenset()
    for number in reversed(range(max(old.count, new.count))):
        measured = tuple(s for s in stage.result.statistics if times[s.path][0] == number)
        runs = (
            _run(old, number, needed if keeps else (), measured, renamed),
            None if keeps else _run(new, number, needed, (), {}),
        )
        step = Step(
            before=runs[0],
            written=tuple(path for path, due in written.items() if due == number),
            dropped=tuple(s.path for s in stage.result.statistics if times[s.path][1] == number),
            after=runs[1],
            needed=needed,
        )
        steps.append(step)
        source = old if keeps else new
        read = {var for run in runs if run for var in run.operands if before.input_of(var) is None}
        needed = frozenset({var for var in needed if source.of(var) != number} | read)
        for var in needed:
            at = source.of(var)
            if at is None or at >= number:
                raise ValueError(
                    f"{stage.step.name} replaces the value {var.aval} that {segment_name(number)} is computed from: a "
                    "pass with statistics says what by, or keeps all numbers"
                )
    return steps[::-1]


def _edit_times(
    stage: Stage, old: Segments, plan: WeightPlan, written: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    """The first and the last segment at which an edit reads each statistic; (-1, -1) when none does."""
    ran: dict[int, int] = {}
    for path in sorted(written, key=lambda path: written[path]):
        for index in plan.makers(path, len(plan.edits)):
            ran.setdefault(index, written[path])
    times: dict[str, tuple[int, int]] = {}
    for statistic in stage.result.statistics:
        readers = {index: at for index, at in ran.items() if statistic.path in plan.edits[index].reads}
        first, last = min(readers.values(), default=-1), max(readers.values(), default=-1)
        known = old.of(statistic.var) or 0
        if readers and first < known:
            edit = plan.edits[min(readers, key=lambda index: readers[index])]
            raise UserError(
                f"{stage.step.name}: {', '.join(edit.writes)} is read by {segment_name(first)} already, and cannot "
                f"wait for statistics of {segment_name(known)}: choose a method without statistics for it"
            )
        times[statistic.path] = first, last
    return times


def _run(
    segments: Segments,
    number: int,
    needed: Iterable[Var],
    measured: tuple[Statistic, ...],
    renamed: Mapping[Var, Var],
) -> Run | None:
    wanted = set(needed)
    handed = [var for var in segments.results(number) if var in wanted]
    if not (handed or measured):
        return None
    part = segments.part(number, [*handed, *(s.var for s in measured)])
    return Run(part, len(handed), tuple(renamed.get(var, var) for var in part.operands), measured)


def segment_name(number: int) -> str:
    """A segment, for people."""
    return f"layer {number - 1}" if number else "the embedding"


class Programs:
    """Jitted runs; those that compute the same of different parameters are compiled once."""

    def __init__(self) -> None:
        self.known: dict[Any, Callable[..., tuple[list[jax.Array], list[jax.Array]]]] = {}

    def of(self, run: Run) -> Callable[[Arrays, Arrays, Arrays], tuple[list[jax.Array], list[jax.Array]]]:
        """(parameters, operands, totals) -> (what is handed on, totals with these activations in them)."""
        part, handed, meters = run.part, run.handed, run.meters
        key = part.text, handed, meters

        def function(params: Arrays, operands: Arrays, totals: Arrays) -> tuple[list[jax.Array], list[jax.Array]]:
            results = part(params, operands)
            pairs = zip(meters, totals, strict=True)
            return results[:handed], [statistics.add(kind, total, results[index]) for (index, kind), total in pairs]

        return self.known.setdefault(key, jax.jit(function, donate_argnums=2))


class _WithStatistics:
    """A source that has the statistics at hand beside the parameters."""

    def __init__(self, source: Source):
        self._source, self.values = source, dict[str, np.ndarray]()

    def read_native(self, path: str) -> Value:
        return self.values[path] if statistics.is_statistic(path) else self._source.read_native(path)


class StageRun:
    """One calibrated stage over `batches`, each the arguments of a step by path.

    `plan` holds all edits since the last calibrated stage, the first `start` of which belong to uncalibrated passes.
    What it writes goes to `spill`, which then is the source of all parameters of the stage's graph.
    """

    def __init__(
        self,
        before: Graph,
        stage: Stage,
        plan: WeightPlan,
        start: int,
        source: Source,
        spill: Spill,
        watch: Watch | None = None,
    ):
        if before.of_kind("cache"):
            raise UserError(f"{stage.step.name} reads statistics, so it goes before insert-paged-kv")
        self.steps = plan_steps(before, stage, plan)
        self._before, self._after, self._spill = before, stage.result.graph, spill
        self._start, self._end = start, len(plan.edits)
        self._known = _WithStatistics(source)
        wanted = [(path, start) for step in self.steps if step.before for path in step.before.part.params]
        wanted += [(path, self._end) for step in self.steps for path in step.written]
        self._pull = Pull(plan, self._known, wanted, watch)

    def __call__(
        self, batches: Sequence[Mapping[str, np.ndarray]], programs: Programs, progress: StageProgress
    ) -> None:
        values, tokens = [_arguments(self._before, batch) for batch in batches], sum(map(_tokens, batches))
        for number, step in enumerate(self.steps):
            if step.before is not None:
                self._collect(step.before, values, tokens, programs)
            for path in step.written:
                self._spill.put(path, self._pull.take(path, self._end))
            for path in step.dropped:
                del self._known.values[path]
            if step.after is not None:
                _stream(step.after, _load(self._after, step.after, self._spill.read_native), values, programs)
            for batch in values:
                for var in batch.keys() - step.needed:
                    if self._before.input_of(var) is None:
                        del batch[var]
            progress.advance(segment_name(number))

    def _collect(self, run: Run, values: Sequence[Batch], tokens: int, programs: Programs) -> None:
        params = _load(self._before, run, lambda path: self._pull.take(path, self._start))
        totals = _stream(run, params, values, programs)
        found = {
            meter: statistics.finish(meter[1], total, tokens) for meter, total in zip(run.meters, totals, strict=True)
        }
        for statistic in run.measured:
            self._known.values[statistic.path] = found[run.part.results.index(statistic.var), statistic.kind]


def _tokens(batch: Mapping[str, np.ndarray]) -> int:
    return len(batch["tokens"])


def _arguments(graph: Graph, batch: Mapping[str, np.ndarray]) -> Batch:
    return {graph.var(path): value for path, value in batch.items() if graph.has_input(path)}


def _load(graph: Graph, run: Run, read: Callable[[str], Value]) -> list[jax.Array]:
    """The parameters of a run, on the device."""
    params = []
    for path in run.part.params:
        entry = graph.input_of(graph.var(path))
        assert entry is not None
        params.append(jnp.asarray(as_declared(read(path), entry)))
    return params


def _stream(run: Run, params: Arrays, values: Sequence[Batch], programs: Programs) -> list[jax.Array]:
    """Runs over all batches, adds what is handed on to their values, and gives the totals."""
    program, part = programs.of(run), run.part
    totals = [statistics.start(kind, spec_of(part.results[index]).shape) for index, kind in run.meters]
    for batch in values:
        handed, totals = program(params, [jnp.asarray(batch[var]) for var in run.operands], totals)
        batch.update(zip(part.results, handed, strict=False))
    return totals
