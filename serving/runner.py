"""The host's side of the device: turns plans into calls of the compiled programs, and their outputs into results.

Knows nothing of models or passes, and traces nothing: the programs are executables that were compiled ahead of time.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import jax
import numpy as np

from jaxserve.serving.plan import Row, StepPlan, StepResult
from jaxserve.serving.request import Limits, Sequence
from jaxserve.serving.state import ADMIT_ROWS, State, neutral_rows, pack_row, penalty_rows
from jaxserve.serving.step import (
    COPY_PAGES,
    FORESEEN,
    LAST_TOKEN,
    Arrays,
    Bucket,
    InputLayout,
    unpack_rows,
    unpack_top,
)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts compilations by XLA in this process, whoever asks for them, from its creation until close()."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILE_EVENT:
            self.count += 1


class PendingStep:
    """A dispatched step. Holds of its plan only what reading the results needs."""

    def __init__(self, outputs: Arrays, num_entries: int, top_counts: list[int] | None):
        self._outputs = outputs
        self._num_entries = num_entries
        self._top_counts = top_counts

    def wait(self) -> None:
        """Returns when the device has finished the step (without holding the interpreter's lock)."""
        jax.block_until_ready(self._outputs["rows"])

    def result(self) -> StepResult:
        """Waits for the step (without holding the interpreter's lock) and reads its results back."""
        n = self._num_entries
        found = (each[:n].tolist() for each in unpack_rows(np.asarray(self._outputs["rows"])))
        tokens, logprob, finite, accepted, *foreseen = found
        top = None
        if self._top_counts is not None:
            ids, logprobs = (each[:n].tolist() for each in unpack_top(np.asarray(self._outputs["top"])))
            rows = zip(self._top_counts, ids, logprobs, strict=True)
            top = [list(zip(ids[:count], logprobs[:count], strict=True)) for count, ids, logprobs in rows]
        after = list(zip(*foreseen, strict=True)) if foreseen else None
        return StepResult(tokens, logprob, top, finite, accepted, after)


class Runner:
    """Runs plans. Calls come from one thread and take effect in their order; each step starts when the one before it
    ends.

    programs: bucket -> step(params, caches, state, packed) -> (caches, state, outputs), as step_function makes them.
    Only the
        buckets in use are looked up, so that a mapping may load its programs when they are first wanted.
    is_loaded: whether a bucket's program is there at once. While it is not, a larger one that is there does its work.
    admit, load_penalties, copy_pages: as state.admit, state.load_penalties and step.copy_pages.
    params: handed to the programs as it is. caches and state: donated, and replaced by what each program returns.

    The programs run behind the host's back and may read the host's arrays where they lie, so an array that was handed
    to one is never written again.
    """

    def __init__(
        self,
        programs: Mapping[Bucket, Callable[..., Any]],
        admit: Callable[..., State],
        load_penalties: Callable[..., State],
        copy_pages: Callable[..., Arrays],
        params: Any,
        caches: Arrays,
        state: State,
        limits: Limits,
        is_loaded: Callable[[Bucket], bool] = lambda bucket: True,
    ):
        self.params, self.caches, self.state, self.limits = params, caches, state, limits
        self.h2d_arrays = 0  # host arrays handed to programs
        self._programs, self._is_loaded = programs, is_loaded
        self._admit_program, self._load_penalties, self._copy_pages = admit, load_penalties, copy_pages
        self._buckets = sorted(programs)
        self._layouts = {bucket: InputLayout.of(bucket, limits) for bucket in self._buckets}
        self._tables = np.zeros((limits.max_num_seqs + 1, limits.pages_per_seq), np.int32)
        self._admits: dict[int, np.ndarray] = {}
        self._compilations = CompileCounter()

    @property
    def compilations(self) -> int:
        """Compilations by XLA in this process since the runner was made, or since its last warm-up. Must stay 0."""
        return self._compilations.count

    @property
    def ready(self) -> bool:
        """Whether all step programs are loaded."""
        return all(map(self._is_loaded, self._buckets))

    def close(self) -> None:
        """Stops counting compilations."""
        self._compilations.close()

    def warmup(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Runs all programs (or those of `buckets`) once without effect, then counts compilations from 0."""
        for bucket in self._buckets if buckets is None else buckets:
            self._run(bucket, self._empty_inputs(bucket)[0])
        scratch = self.limits.max_num_seqs
        self._admits[scratch] = neutral_rows(1, self.limits).view(np.int32)
        self._flush_admits()
        vocab = self.limits.vocab_size
        self._load(scratch, np.zeros(vocab, np.int32), np.zeros(vocab, np.bool_))
        self.copy_pages([(0, -1)])
        jax.block_until_ready((self.caches, self.state))
        self._compilations.count = 0

    def admit(self, seq: Sequence) -> None:
        """Loads the state of seq.slot, at the latest before the next step: up to ADMIT_ROWS sequences share a call."""
        self._admits[seq.slot] = pack_row(seq, self.limits)
        if len(self._admits) == ADMIT_ROWS:
            self._flush_admits()
        if seq.params.uses_penalties:
            self._load(seq.slot, *penalty_rows(seq, self.limits))

    def copy_pages(self, copies: Seq[tuple[int, int]]) -> None:
        """Copies (source, destination) pages in every cache."""
        for first in range(0, len(copies), COPY_PAGES):
            sources, destinations = np.zeros(COPY_PAGES, np.int32), np.full(COPY_PAGES, -1, np.int32)
            for i, (source, destination) in enumerate(copies[first : first + COPY_PAGES]):
                sources[i], destinations[i] = source, destination
            self.caches = self._copy_pages(self.caches, sources, destinations)
            self.h2d_arrays += 2

    def dispatch(self, plan: StepPlan) -> PendingStep:
        """Starts the step and returns while it runs. Raises ValueError when no bucket fits the plan."""
        self._flush_admits()
        bucket = self.bucket_of(plan)
        packed, inputs = self._empty_inputs(bucket)
        tokens: list[int] = []  # lists first: setting numbers of an array one by one is slow
        for row in plan.rows:
            tokens += row.tokens or (LAST_TOKEN, FORESEEN)[: row.count]
            if row.pages_from < len(row.seq.blocks):
                self._tables[row.slot, row.pages_from : len(row.seq.blocks)] = row.seq.blocks[row.pages_from :]
        inputs["tokens"][: len(tokens)] = tokens
        inputs["slots"][: len(plan.rows)] = [row.slot for row in plan.rows]
        inputs["query_counts"][: len(plan.rows)] = [row.count for row in plan.rows]
        np.take(self._tables, inputs["slots"], axis=0, out=inputs["block_tables"])
        if plan.kind == "score":
            return self._dispatch_score(plan.rows[0], bucket, packed, inputs["targets"])
        inputs["samples"][: len(plan.rows)] = [row.samples for row in plan.rows]
        if self.limits.look_ahead:
            inputs["look_ahead"][0] = len(plan.rows) if plan.look_ahead else 0
        wanted = [row.seq.params.logprobs or 0 for row in plan.rows for _ in range(row.samples)]
        return PendingStep(self._run(bucket, packed), len(wanted), wanted if any(wanted) else None)

    def bucket_of(self, plan: StepPlan) -> Bucket:
        """The smallest bucket that fits and is loaded; the smallest that fits while none is."""
        tokens, seqs, samples = plan.num_tokens, len(plan.rows), plan.num_samples
        fitting = [bucket for bucket in self._buckets if bucket.fits(plan.kind, tokens, seqs, samples)]
        if fitting:
            return next(filter(self._is_loaded, fitting), fitting[0])
        raise ValueError(
            f"no bucket fits a {plan.kind} plan of {tokens} tokens in {seqs} rows that chooses {samples}; "
            f"there are {', '.join(f'{b.kind} {b.tokens}x{b.seqs}' for b in self._buckets)}"
        )

    def _dispatch_score(self, row: Row, bucket: Bucket, packed: np.ndarray, targets: np.ndarray) -> PendingStep:
        first = row.start + 1
        targets[: row.count] = row.seq.tokens[first : first + row.count]
        top = row.seq.params.prompt_logprobs
        return PendingStep(self._run(bucket, packed), row.count, [top] * row.count if top else None)

    def _empty_inputs(self, bucket: Bucket) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The inputs without a row, and views of them by name. A new array each time: the step before may not have
        read its own yet."""
        layout = self._layouts[bucket]
        packed = np.zeros(layout.size, np.int32)
        inputs = layout.unpack(packed)
        inputs["slots"][:] = self.limits.max_num_seqs
        return packed, inputs

    def _run(self, bucket: Bucket, packed: np.ndarray) -> Arrays:
        self.caches, self.state, outputs = self._programs[bucket](self.params, self.caches, self.state, packed)
        self.h2d_arrays += 1
        return outputs

    def _flush_admits(self) -> None:
        if not self._admits:
            return
        slots = np.full(ADMIT_ROWS, self.limits.max_num_seqs, np.int32)
        rows = neutral_rows(ADMIT_ROWS, self.limits).view(np.int32).reshape(ADMIT_ROWS, -1)
        for i, (slot, row) in enumerate(self._admits.items()):
            slots[i], rows[i] = slot, row
        self._admits.clear()
        self.state = self._admit_program(self.state, slots, rows)
        self.h2d_arrays += 2

    def _load(self, slot: int, counts: np.ndarray, prompt_mask: np.ndarray) -> None:
        self.state = self._load_penalties(self.state, np.int32(slot), counts, prompt_mask)
        self.h2d_arrays += 3
