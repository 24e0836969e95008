"""Calibration: statistics of a model's activations on a text, for the passes that ask for them.

Passes run on shapes, so a whole pipeline is laid out first. Then each calibrated stage (a pass whose result names
statistics) is run over the text layer by layer (`jaxserve.layerwise`); its edits, and those of the passes before it,
are applied, and the parameters that they make are kept in a temporary folder, from which what follows goes on.
"""

import dataclasses
import hashlib
import importlib.resources
import pathlib
import tempfile
from collections.abc import Callable, Sequence

import numpy as np

from jaxserve.errors import UserError
from jaxserve.layerwise import Programs, StageRun
from jaxserve.manifest import CalibrationRecord
from jaxserve.models.checkpoint import Checkpoint
from jaxserve.models.config import ModelConfig
from jaxserve.passes.graph import Graph
from jaxserve.passes.pipeline import Context, Pass, Stage, run_pipeline
from jaxserve.passes.weights import Source, Watch, WeightEdit, WeightPlan
from jaxserve.reporting import Reporter
from jaxserve.spill import Spill
from jaxserve.text import Tokenizer, encode_text, load_tokenizer

STEP = 512  # tokens that are run at once, if sequences are no longer
BUILT_IN = "built-in sample"


@dataclasses.dataclass(frozen=True)
class CalibrationOptions:
    """The text (None: the built-in sample), and how much of it: `sequences` rows of `length` tokens.

    Raises UserError for sizes that are not positive.
    """

    text: pathlib.Path | None = None
    sequences: int = 64
    length: int = 512

    def __post_init__(self) -> None:
        for name in ("sequences", "length"):
            if getattr(self, name) < 1:
                raise UserError(f"--calibration-{name} {getattr(self, name)} is not at least 1")


@dataclasses.dataclass(frozen=True)
class CalibrationText:
    """Token ids [N, T] int32 to calibrate on, and where they come from; `complete` unless N is less than asked for."""

    ids: np.ndarray
    record: CalibrationRecord
    complete: bool = True


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that comes with a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.write_tokenizer(pathlib.Path(folder))
        return load_tokenizer(folder)


def read_calibration(options: CalibrationOptions, tokenizer: Tokenizer, config: ModelConfig) -> CalibrationText:
    """The text, tokenized whole and without BOS, in rows; what is left over at its end is not used.

    The built-in sample gives as many rows as it holds. Raises UserError for rows that are longer than the model's
    longest sequence, and tokens that it does not know; for a file that cannot be read, is not UTF-8 or is too short,
    with the tokens that it has.
    """
    if options.length > config.max_positions:
        raise UserError(
            f"--calibration-length {options.length} is more than {config.max_positions}, the model's own limit"
        )
    if options.text is None:
        data, name = (importlib.resources.files("jaxserve") / "data" / "calibration.txt").read_bytes(), BUILT_IN
    else:
        data, name = _read(options.text), options.text.name
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"--calibration {options.text} is not UTF-8 at byte {error.start}") from None
    ids = np.asarray(encode_text(tokenizer, text, config.vocab), np.int32)
    rows = min(options.sequences, len(ids) // options.length)
    if rows < (1 if options.text is None else options.sequences):
        raise UserError(
            f"--calibration: {name} has {len(ids)} tokens, less than {options.sequences} sequences of "
            f"{options.length}; ask for fewer or shorter ones, or give a longer text"
        )
    digest = hashlib.sha256(data).hexdigest()
    record = CalibrationRecord(text=name, sha256=digest, sequences=rows, length=options.length)
    ids = ids[: rows * options.length].reshape(rows, options.length)
    return CalibrationText(ids, record, complete=rows == options.sequences)


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"--calibration {path}: {error.strerror}") from None


def is_calibrated(stages: Sequence[Stage]) -> bool:
    """Whether any pass asked for statistics."""
    return any(stage.result.statistics for stage in stages)


@dataclasses.dataclass(frozen=True)
class Weights:
    """Where the final parameters come from: a source, and the edits that are left to apply."""

    source: Source
    edits: tuple[WeightEdit, ...]

    @property
    def plan(self) -> WeightPlan:
        return WeightPlan(self.edits)


def calibrate(
    trace: Callable[[int], Graph],
    passes: Sequence[Pass],
    source: Source,
    ids: np.ndarray,
    folder: pathlib.Path,
    report: Reporter,
    watch: Watch | None = None,
) -> Weights:
    """The final weights of a pipeline, calibrated on `ids` [N, T] int32.

    `trace(tokens)` gives the graph before all passes for a step of so many tokens and as many rows of logits. What is
    made of parameters on the way is kept in `folder`, which must outlive the result; `watch` is told of the edits that
    run. Raises UserError when a calibrated pass comes after the cache is inserted, or wants statistics of a layer after
    the weight was read.
    """
    rows = _rows_at_once(*ids.shape)
    batches = [_arguments(ids[start : start + rows]) for start in range(0, len(ids), rows)]
    graph = trace(rows * ids.shape[1])
    edits: list[WeightEdit] = []
    programs = Programs()
    for number, stage in enumerate(run_pipeline(graph, passes, Context()).stages):
        start = len(edits)
        edits += stage.result.edits
        if stage.result.statistics:
            spill = Spill(folder / f"{number:02d}", source)
            run = StageRun(graph, stage, WeightPlan(edits), start, source, spill, watch)
            what = f"{stage.step.name} on {ids.shape[0]} x {ids.shape[1]} tokens"
            with report.stage("calibrate", what, total=len(run.steps)) as progress:
                run(batches, programs, progress)
                progress.done(f"{what}, {len(stage.result.statistics)} statistics")
            source, edits = spill, []
        graph = stage.result.graph
    return Weights(source, tuple(edits))


def _rows_at_once(sequences: int, length: int) -> int:
    """Sequences a step: as many as make up STEP tokens and divide all of them evenly, so that every step is full."""
    return max(
        rows for rows in range(1, sequences + 1) if sequences % rows == 0 and (rows == 1 or rows * length <= STEP)
    )


def _arguments(ids: np.ndarray) -> dict[str, np.ndarray]:
    """The arguments of a step on whole sequences [S, T]; `segments` tells them apart."""
    length = ids.shape[1]
    index = np.arange(ids.size, dtype=np.int32)
    return {
        "tokens": np.ascontiguousarray(ids.reshape(-1), np.int32),
        "positions": index % length,
        "segments": index // length,
        "logit_rows": index,
    }
