"""A check of a whole pipeline on a two-layer cut of the model, with random weights, through the paged cache."""

import dataclasses
import math
import pathlib
import tempfile
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.calibration import calibrate
from jaxserve.lowering import trace_model
from jaxserve.models.config import ModelConfig
from jaxserve.passes.graph import Graph
from jaxserve.passes.insert_paged_kv import InsertPagedKv
from jaxserve.passes.narrow_matmul import NarrowMatmul
from jaxserve.passes.pipeline import Context, KvGeometry, Pass, run_pipeline
from jaxserve.passes.prune import Prune
from jaxserve.passes.quantize_matmul import QuantizeMatmul
from jaxserve.passes.verify import VerifyError, relative_error
from jaxserve.passes.weights import ValueSource
from jaxserve.reporting import Reporter

TOKENS, VOCAB = 24, 512
TOLERANCE, NARROW_TOLERANCE = 1e-4, 3e-2  # logits, relative norm; the second when a pass rounds to bf16
KV_TOLERANCE = 3.0  # beyond that, in units of the error of a quantized cache's format: two layers make twice of it


def check_shrunk(config: ModelConfig, passes: Sequence[Pass]) -> float:
    """||after - before|| / ||before|| of the logits of a small model; `VerifyError` when it is more than rounding.

    The model is the config's first two layers with a small vocabulary. Before: the traced graph on one sequence. After:
    the graph that the passes give, fed in two chunks through the caches on shuffled pages; passes that read statistics
    get those of random tokens. Passes that quantize or prune weights are left out: they change numbers on purpose, and
    their regions are checked one by one.
    """
    small = _shrink(config)

    def trace(count: int) -> Graph:
        return trace_model(small, count, count, {})

    exact = [step for step in passes if not isinstance(step, QuantizeMatmul | Prune)]
    page = next((step.page for step in passes if isinstance(step, InsertPagedKv)), 1)
    pages = math.ceil(TOKENS / page)
    kv = KvGeometry(num_pages=2 * pages, pages_per_seq=pages, seqs=1)
    rng = np.random.default_rng(0)
    before = trace(TOKENS)
    weights = {entry.path: _random(rng, entry.path, entry.aval) for entry in before.of_kind("param")}
    tokens = rng.integers(0, small.vocab, TOKENS).astype(np.int32)
    want = _whole(before, weights, tokens)

    result = run_pipeline(trace(TOKENS // 2), exact, Context(kv))
    with tempfile.TemporaryDirectory(prefix="jaxserve-") as folder:
        rows, quiet = tokens.reshape(2, -1), Reporter(quiet=True)
        source = calibrate(trace, exact, ValueSource(weights), rows, pathlib.Path(folder), quiet)
        final = dict(source.plan.materialize(result.graph, source.source))
    have = _chunked(result.graph, final, tokens, rng.permutation(2 * pages)[:pages], page)
    moved = relative_error(have, want)
    allowed = NARROW_TOLERANCE if any(_narrows(step) for step in exact) else TOLERANCE
    allowed += KV_TOLERANCE * max(
        (step.format.error for step in exact if isinstance(step, InsertPagedKv) and step.format), default=0.0
    )
    if not moved <= allowed:
        raise VerifyError(
            f"the pipeline moves the logits of a two-layer {config.family} model by {moved:.3g} (relative norm); "
            f"{allowed:g} is allowed"
        )
    return moved


def _narrows(step: Pass) -> bool:
    return isinstance(step, NarrowMatmul) or (isinstance(step, InsertPagedKv) and step.kv == "bf16")


def _shrink(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config.with_layers(min(2, config.layers)), vocab=min(VOCAB, config.vocab))


def _random(rng: np.random.Generator, path: str, spec: jax.ShapeDtypeStruct) -> np.ndarray:
    """Weights of the size a trained model has: 1 / sqrt(inputs), and norms near 1."""
    if path.endswith("scale"):
        return rng.uniform(0.5, 1.5, spec.shape).astype(np.float32)
    return (rng.normal(size=spec.shape) / math.sqrt(spec.shape[-1])).astype(np.float32)


def _whole(graph: Graph, weights: dict[str, np.ndarray], tokens: np.ndarray) -> jax.Array:
    params = {entry.path: jnp.asarray(weights[entry.path], entry.aval.dtype) for entry in graph.of_kind("param")}
    index = np.arange(len(tokens), dtype=np.int32)
    args = {"tokens": tokens, "positions": index, "segments": np.zeros_like(index), "logit_rows": index}
    return jax.jit(graph.call)({**params, **args})["logits"]


def _chunked(
    graph: Graph, params: dict[str, np.ndarray], tokens: np.ndarray, table: np.ndarray, page: int
) -> jax.Array:
    """Logits of all tokens, the graph run on one half after the other."""
    values: dict[str, jax.Array | np.ndarray] = dict(params)
    values |= {entry.path: jnp.zeros(entry.aval.shape, entry.aval.dtype) for entry in graph.of_kind("cache")}
    run, logits = jax.jit(graph.call), []
    for start in (0, len(tokens) // 2):
        positions = np.arange(start, start + len(tokens) // 2, dtype=np.int32)
        args = {
            "tokens": tokens[positions],
            "positions": positions,
            "segments": np.zeros_like(positions),
            "logit_rows": np.arange(len(positions), dtype=np.int32),
            "kv_slots": (table[positions // page] * page + positions % page).astype(np.int32),
            "block_tables": table[None].astype(np.int32),
            "query_starts": np.array([0, len(positions)], np.int32),
            "context_lens": np.array([start + len(positions)], np.int32),
        }
        results = run({**values, **args})
        values |= {str(output.replaces): results[output.name] for output in graph.outputs if output.replaces}
        logits.append(results["logits"])
    return jnp.concatenate(logits)
