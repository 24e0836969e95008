"""`jaxserve distill`: a draft for speculative decoding, trained to say what its target says.

texts or answers of the target -> rows of ids -> training (resumable) -> a checkpoint, or a head, that
`jaxserve compile` takes
"""

import abc
import collections
import dataclasses
import json
import pathlib
import shutil
import time
from typing import Any, ClassVar

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

from jaxserve.distill_rows import Rows, Source, make_rows
from jaxserve.errors import UserError
from jaxserve.head_student import HeadStudent, teacher_states
from jaxserve.models.checkpoint import Checkpoint
from jaxserve.models.config import ModelConfig
from jaxserve.models.hf_writer import hf_fields
from jaxserve.models.resolve import resolve
from jaxserve.reporting import Reporter
from jaxserve.serving.speculation import expected_tokens
from jaxserve.student import Fixed, Params, Pupil, State, Student, make_agreement, make_step

TRAINING = "training"  # the folder of what is needed to resume, inside the draft's, until it is done
HEAD_VOCAB = 6144  # tokens of a head, where the model has that many


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training(Source, abc.ABC):
    """On what to train, and how; what, is for those that derive from it to say."""

    batch: int = 4
    steps: int = 500
    minutes: float = 0.0  # 0: no limit
    learning_rate: float = 1e-3
    dtype: str = "float32"
    seed: int = 0
    save_every: int = 50
    first: ClassVar[str]  # what the student is called before it is trained
    proposals: ClassVar[tuple[int, ...]]  # how many a step the report is for

    def identity(self) -> str:
        """What must be the same for training to go on where it was, in JSON: all that decides the numbers."""
        values = dataclasses.asdict(self)
        deciding = {
            name: str(value) for name, value in values.items() if name not in ("output", "minutes", "save_every")
        }
        return json.dumps(deciding, indent=1, sort_keys=True)

    @abc.abstractmethod
    def check(self, config: ModelConfig) -> None:
        """UserError when there is no such student of that model."""

    def rows(self, checkpoint: Checkpoint, report: Reporter) -> Rows:
        return make_rows(self, checkpoint, report)

    @abc.abstractmethod
    def begin(
        self, checkpoint: Checkpoint, rows: Rows, training: pathlib.Path, report: Reporter
    ) -> tuple[Pupil, Fixed, Params]:
        """The student, what is fixed, and what is to learn. `training` may keep what is dear to compute again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillOptions(Training):
    """The first layers of a model."""

    first, proposals = "cut", (1, 2, 4)
    layers: int

    def check(self, config: ModelConfig) -> None:
        if not 1 <= self.layers < config.layers:
            most = config.layers - 1
            raise UserError(f"--layers {self.layers} is not between 1 and {most}; the model has {config.layers} layers")
        hf_fields(config.with_layers(self.layers))

    def begin(
        self, checkpoint: Checkpoint, rows: Rows, training: pathlib.Path, report: Reporter
    ) -> tuple[Pupil, Fixed, Params]:
        return Student.cut(checkpoint, self.layers, self.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadOptions(Training):
    """A head that knows `head_vocab` tokens, with F = `head_width`."""

    first, proposals = "begun", (1,)
    length: int = 256
    batch: int = 1024
    head_vocab: int | None = None
    head_width: int | None = None

    def check(self, config: ModelConfig) -> None:
        if self.head_vocab is not None and not 1 <= self.head_vocab <= config.vocab:
            raise UserError(f"--head-vocab {self.head_vocab} is not between 1 and {config.vocab}, the model's tokens")
        if self.head_width is not None and self.head_width < 1:
            raise UserError(f"--head-width {self.head_width} is less than 1")

    def rows(self, checkpoint: Checkpoint, report: Reporter) -> Rows:
        """The first token of an answer is the target's alone: no state of its own step stands before it."""
        rows = super().rows(checkpoint, report).without_first()
        if not rows.wanted[~rows.held_out()].any():
            raise UserError("there is too little to train on: a head needs answers of two tokens or more")
        return rows

    def begin(
        self, checkpoint: Checkpoint, rows: Rows, training: pathlib.Path, report: Reporter
    ) -> tuple[Pupil, Fixed, Params]:
        config = checkpoint.config
        vocab, width = self.head_vocab or min(HEAD_VOCAB, config.vocab), self.head_width or 2 * config.width
        states = teacher_states(checkpoint, rows, self.dtype, training / "states.npy", report)
        return HeadStudent.of(checkpoint, rows, states, vocab, width, self.seed)


def distill(options: Training, report: Reporter) -> dict[str, Any]:
    """Trains a student and writes its folder; returns a summary: steps, loss, acceptance by kind, seconds.

    A run that was killed goes on where it last saved, if its options are the same. UserError for what the user can put
    right.
    """
    start = time.perf_counter()
    checkpoint = resolve(options.model)
    options.check(checkpoint.config)
    training = options.output / TRAINING
    _check_output(options, training)
    if not training.exists():
        if options.batch < 1:
            raise UserError(f"--batch {options.batch} is less than 1")
        _open_training(options, training, options.rows(checkpoint, report))
    rows = Rows.load(training / "rows.npz")
    student, fixed, params = options.begin(checkpoint, rows, training, report)
    before = acceptance(student, fixed, params, rows)
    state, steps, loss = _train(options, student, fixed, params, rows, training, report)
    after = acceptance(student, fixed, state.params, rows)
    student.write(options.output, checkpoint, fixed, state.params)
    shutil.rmtree(training)
    return {
        "model": options.model,
        "draft": str(options.output),
        "student": str(student),
        "steps": steps,
        "loss": loss,
        "tokens": int(rows.wanted[~rows.held_out()].sum()),
        "acceptance": {
            kind: {
                options.first: before[kind],
                "distilled": after[kind],
                "expected_tokens": {str(k): expected_tokens(after[kind], k) for k in options.proposals},
            }
            for kind in after
        },
        "seconds": round(time.perf_counter() - start, 1),
    }


def _check_output(options: Training, training: pathlib.Path) -> None:
    """UserError when the output is taken, or by a run with other options."""
    if training.exists():
        if (training / "options.json").read_text() != options.identity():
            raise UserError(
                f"-o {options.output} holds an unfinished run with other options; give the same ones, or another folder"
            )
    elif options.output.exists() and {path.name for path in options.output.iterdir()} - {_part(training).name}:
        raise UserError(f"-o {options.output} exists and is not empty; name another folder")


def _open_training(options: Training, training: pathlib.Path, rows: Rows) -> None:
    """Makes the folder of what a run keeps to go on, whole or not at all: the run may be killed meanwhile."""
    part = _part(training)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    rows.save(part / "rows.npz")
    (part / "options.json").write_text(options.identity())
    part.rename(training)


def _part(training: pathlib.Path) -> pathlib.Path:
    return training.with_suffix(".part")


# ---- training


def _train(
    options: Training,
    student: Pupil,
    fixed: Fixed,
    params: Params,
    rows: Rows,
    training: pathlib.Path,
    report: Reporter,
) -> tuple[State, int, float]:
    """Trains up to options.steps steps or options.minutes, from where the last run saved. The last loss is a running
    mean. What a step draws follows from the seed and its number, so a resumed run ends with the same numbers."""
    warmup = max(1, min(options.steps // 10, 50))
    rate = optax.warmup_cosine_decay_schedule(0.0, options.learning_rate, warmup, max(options.steps, warmup + 1))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))
    pool = student.pool(rows)
    step = make_step(student, optimizer)
    state, first, loss = _restore(training / "steps", State(params, optimizer.init(params)))
    deadline = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    done = first
    with report.stage("distill", str(student), options.steps) as stage:
        for _ in range(first):
            stage.advance()
        for number in range(first, options.steps):
            if time.monotonic() > deadline:
                break
            rng = np.random.default_rng((options.seed, number))
            drawn = rng.choice(pool, options.batch, replace=len(pool) < options.batch)
            key = jax.random.fold_in(jax.random.key(options.seed), number)
            state, value = step(fixed, state, student.batch(rows, drawn), key)
            loss = float(value) if not number else 0.95 * loss + 0.05 * float(value)
            done = number + 1
            if done % options.save_every == 0:
                _save(training / "steps", done, state, loss)
            stage.advance(f"KL {loss:.3f}")
        stage.done(f"{done} steps, KL {loss:.3f}")
    return state, done, loss


def _checkpoints(folder: pathlib.Path) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    return ocp.CheckpointManager(folder.absolute(), options=options)


def _save(folder: pathlib.Path, step: int, state: State, loss: float) -> None:
    with _checkpoints(folder) as manager:
        manager.save(step, args=ocp.args.StandardSave({"state": state._asdict(), "loss": np.float64(loss)}))


def _restore(folder: pathlib.Path, fresh: State) -> tuple[State, int, float]:
    """(state, steps done, loss) as last saved, or as they are at the beginning."""
    with _checkpoints(folder) as manager:
        last = manager.latest_step()
        if last is None:
            return fresh, 0, 0.0
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"state": fresh._asdict(), "loss": np.float64(0)})
        found = manager.restore(last, args=ocp.args.StandardRestore(shapes))
    return State(**found["state"]), last, float(found["loss"])


# ---- what came out


def acceptance(student: Pupil, fixed: Fixed, params: Params, rows: Rows) -> dict[str, float]:
    """By kind, over the rows held out and in all: how often the student's likeliest token is the teacher's, where all
    before it are the teacher's. That is the probability at which a greedy proposal is accepted."""
    count = make_agreement(student)
    totals: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for number in np.flatnonzero(rows.held_out()):
        same, of = map(float, count(fixed, params, student.wanted(rows, int(number))))
        for kind in (rows.kinds[number], "all"):
            totals[kind][0] += same
            totals[kind][1] += of
    return {kind: same / max(1.0, of) for kind, (same, of) in sorted(totals.items())}
