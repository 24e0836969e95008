"""A model as a pipeline makes it, in memory: no engine and no artifact. What experiments and accuracy tests run on."""

import dataclasses
import math
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.calibration import (
    CalibrationOptions,
    Weights,
    calibrate,
    is_calibrated,
    open_tokenizer,
    read_calibration,
)
from jaxserve.lowering import graph_forward, specs_of, stored_forms, trace_model
from jaxserve.models.resolve import resolve
from jaxserve.passes.graph import Graph
from jaxserve.passes.insert_paged_kv import InsertPagedKv
from jaxserve.passes.pipeline import Context, KvGeometry, Pass, Stage, for_platform, run_pipeline
from jaxserve.passes.recipes import parse_spec
from jaxserve.passes.verify import Verifier
from jaxserve.reporting import Reporter


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A model of one sequence of T = `tokens` tokens; `params` are the final ones by path, `stages` the passes."""

    tokens: int
    params: Mapping[str, jax.Array]
    stages: tuple[Stage, ...]
    _logits: Callable[[Mapping[str, jax.Array], jax.Array], jax.Array]
    _reference_logits: Callable[[Mapping[str, jax.Array], jax.Array], jax.Array]

    def window_logits(self, ids: Sequence[int] | np.ndarray, *, references: bool = False) -> jax.Array:
        """Logits [T, V] float32 of a sequence of exactly T ids; ValueError for another length. With `references`, XLA's
        reference of every op computes them in place of our kernels."""
        array = jnp.asarray(ids, jnp.int32)
        if array.shape != (self.tokens,):
            raise ValueError(f"the model was built for {self.tokens} tokens, not for {list(array.shape)}")
        return (self._reference_logits if references else self._logits)(self.params, array)


def rewritten_model(
    model: str | pathlib.Path,
    passes: str | Sequence[Pass],
    tokens: int,
    calibration: CalibrationOptions | None = None,
    report: Reporter | None = None,
) -> Rewritten:
    """Runs a pipeline (passes, or their text) on a model and loads what comes out.

    A pipeline that needs no statistics ignores `calibration`; None means its defaults. The whole of T tokens is one
    step, through the paged cache if the pipeline inserts one. Raises UserError as `jaxserve compile` does.
    """
    report = report or Reporter(quiet=True)
    checkpoint = resolve(model)
    steps = for_platform(parse_spec(passes) if isinstance(passes, str) else passes, "cpu")
    page = next((step.page for step in steps if isinstance(step, InsertPagedKv)), 1)
    pages = math.ceil(tokens / page)

    def trace(count: int) -> Graph:
        return trace_model(checkpoint.config, count, count, stored_forms(checkpoint))

    result = run_pipeline(trace(tokens), steps, Context(KvGeometry(pages, pages, 1)), [Verifier()])
    with tempfile.TemporaryDirectory(prefix="jaxserve-") as folder:
        weights = Weights(checkpoint, result.edits)
        if is_calibrated(result.stages):
            tokenizer, asked = open_tokenizer(checkpoint), calibration or CalibrationOptions()
            text = read_calibration(asked, tokenizer, checkpoint.config)
            weights = calibrate(trace, steps, checkpoint, text.ids, pathlib.Path(folder), report)
        arrays = weights.plan.materialize(result.graph, weights.source)
        params = {path: jnp.array(value) for path, value in arrays}
    both = (jax.jit(_whole_sequence(result.graph, tokens, page, references)) for references in (False, True))
    return Rewritten(tokens, params, result.stages, *both)


def _whole_sequence(
    graph: Graph, tokens: int, page: int, references: bool
) -> Callable[[Mapping[str, jax.Array], jax.Array], jax.Array]:
    """(params, ids [T]) -> logits [T, V] of one sequence whose pages lie in order."""
    forward, caches = graph_forward(graph, references=references), specs_of(graph, "cache")
    pages = math.ceil(tokens / page)

    def logits(params: Mapping[str, jax.Array], ids: jax.Array) -> jax.Array:
        index = jnp.arange(tokens, dtype=jnp.int32)
        args = {
            "tokens": ids,
            "positions": index,
            "segments": jnp.zeros_like(index),
            "logit_rows": index,
            "kv_slots": index,
            "block_tables": jnp.arange(pages, dtype=jnp.int32)[None],
            "query_starts": jnp.array([0, tokens], jnp.int32),
            "context_lens": jnp.array([tokens], jnp.int32),
        }
        empty = {path: jnp.zeros(spec.shape, spec.dtype) for path, spec in caches.items()}
        return forward(params, empty, args)[1]["logits"]

    return logits
