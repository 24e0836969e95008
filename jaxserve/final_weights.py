"""The weights of an artifact: calibrated where passes ask for it, pulled through all edits, written one at a time."""

import dataclasses
import itertools
import math
import shutil
import time
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from jaxserve import artifact as artifacts
from jaxserve.artifact import ArtifactWriter
from jaxserve.calibration import (
    CalibrationOptions,
    CalibrationText,
    Weights,
    calibrate,
    is_calibrated,
    read_calibration,
)
from jaxserve.error_meter import ErrorMeter, OutputError
from jaxserve.errors import UserError
from jaxserve.look_ahead import head_arrays
from jaxserve.manifest import ArraySpec, CalibrationRecord
from jaxserve.models.config import ModelConfig
from jaxserve.passes.pipeline import PipelineResult
from jaxserve.plan import Plan
from jaxserve.reporting import Reporter
from jaxserve.text import Tokenizer
from jaxserve.weights_io import save_weights


@dataclasses.dataclass(frozen=True)
class FinalWeights:
    """What was written, on what it was calibrated and in how many seconds, and the output errors that were measured."""

    params: tuple[ArraySpec, ...]
    calibration: CalibrationRecord | None
    calibration_seconds: float
    errors: Mapping[str, OutputError]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(math.prod(spec.shape) * np.dtype(jnp.dtype(spec.dtype)).itemsize for spec in self.params)


def check_calibration(asked: CalibrationOptions | None, result: PipelineResult) -> None:
    """UserError when a calibration is asked for that no pass would read."""
    if asked is not None and not is_calibrated(result.stages):
        names = ", ".join(stage.step.name for stage in result.stages)
        raise UserError(f"--calibration: no pass of this pipeline looks at activations ({names}); leave it out")


def calibration_text(
    asked: CalibrationOptions | None, result: PipelineResult, tokenizer: Tokenizer, config: ModelConfig
) -> CalibrationText | None:
    """The text that the pipeline is calibrated on, None for one that needs none; UserError when it will not do."""
    check_calibration(asked, result)
    return read_calibration(asked or CalibrationOptions(), tokenizer, config) if is_calibrated(result.stages) else None


def write_weights(
    plan: Plan,
    result: PipelineResult,
    text: CalibrationText | None,
    writer: ArtifactWriter,
    report: Reporter,
) -> FinalWeights:
    """Writes the parameters of `result`'s graph into the artifact, calibrated on `text` if it is given."""
    start, meter = time.perf_counter(), ErrorMeter(result)
    weights, scratch = Weights(plan.checkpoint, result.edits), writer.path("calibration")
    if text is not None:
        report.note(f"calibrating on {text.record}{'' if text.complete else ', which holds no more'}")
        weights = calibrate(
            lambda tokens: plan.trace(tokens, tokens), plan.passes, plan.checkpoint, text.ids, scratch, report, meter
        )
    seconds, count = time.perf_counter() - start, len(result.graph.of_kind("param"))
    head = plan.head_passes(1)
    count += len(head.graph.of_kind("param")) if head else 0
    with report.stage("weights", f"{count} arrays", total=count) as stage:
        made = [weights.plan.materialize(result.graph, weights.source, meter)]
        if head is not None and plan.head is not None:
            made.append(head_arrays(plan.head, plan.limits.vocab_size, head))
        params = save_weights(writer.path(artifacts.WEIGHTS), stage.each(itertools.chain(*made)))
        final = FinalWeights(params, text.record if text else None, seconds if text else 0.0, meter.errors())
        stage.done(f"{final.nbytes / 1e6:.1f} MB in {count} arrays")
    shutil.rmtree(scratch, ignore_errors=True)
    return final
