"""Small graphs and models for the tests of passes."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.lowering import trace_model
from jaxserve.models.config import ModelConfig
from jaxserve.pallas_kernels import RopeSpec
from jaxserve.passes.graph import Graph, Input, Kind
from jaxserve.passes.pipeline import Context, KvGeometry, Pass, PassResult, PipelineResult, Stage, run_pipeline
from jaxserve.passes.printer import print_graph
from jaxserve.passes.recipes import parse_spec
from jaxserve.passes.trace import trace_graph
from jaxserve.passes.verify import NumberCheck, Verifier
from jaxserve.passes.weights import ValueSource, WeightPlan

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
KV = KvGeometry(num_pages=8, pages_per_seq=4, seqs=2)

DTYPES = {"f32": "float32", "bf16": "bfloat16"}

TINY = ModelConfig(
    family="llama", vocab=32, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp=32, norm_eps=1e-5,
    rope=RopeSpec(8, 1e4), tied=False, max_positions=64, windows=(None,),
)  # fmt: skip


def tiny(**changes: Any) -> ModelConfig:
    """The one-layer Llama, or a variation of it."""
    return dataclasses.replace(TINY, **{"windows": (None,) * changes.get("layers", 1), **changes})


def trace_tiny(activations: str = "f32", tokens: int = 8, rows: int = 2, **changes: Any) -> Graph:
    return trace_model(tiny(**changes), tokens, rows, {}, DTYPES[activations])


def spec(shape: Sequence[int], dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def make_input(path: str, shape: Sequence[int], dtype: Any = "float32", kind: Kind = "arg", axes: str = "") -> Input:
    return Input(path, kind, spec(shape, dtype), axes)


def make_graph(
    function: Callable[..., Any],
    params: Mapping[str, Sequence[int]],
    args: Mapping[str, Any],
    dtype: Any = "float32",
) -> Graph:
    """The graph of `function(values)`; `args` maps a name to a shape of `dtype`, or to a ShapeDtypeStruct."""
    inputs = [make_input(path, shape, dtype, "param") for path, shape in params.items()]
    for path, shape in args.items():
        aval = shape if isinstance(shape, jax.ShapeDtypeStruct) else spec(shape, dtype)
        inputs.append(Input(path, "arg", aval))
    return trace_graph(function, tuple(inputs))


def random_values(graph: Graph, seed: int = 0) -> dict[str, np.ndarray]:
    """Random numbers for every floating input, small ids for the others."""
    rng = np.random.default_rng(seed)
    values = {}
    for entry in graph.inputs:
        if jnp.issubdtype(entry.aval.dtype, jnp.floating):
            values[entry.path] = rng.normal(size=entry.aval.shape).astype(entry.aval.dtype)
        else:
            values[entry.path] = np.arange(int(np.prod(entry.aval.shape)), dtype=entry.aval.dtype).reshape(
                entry.aval.shape
            )
    return values


def run_graph(graph: Graph, values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    results = jax.jit(graph.call)({entry.path: jnp.asarray(values[entry.path]) for entry in graph.inputs})
    return {name: np.asarray(value) for name, value in results.items()}


def edited_values(graph: Graph, result: PipelineResult, values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` of the graph before a pipeline, as values of the graph after it."""
    plan = WeightPlan(result.edits)
    return {**values, **dict(plan.materialize(result.graph, ValueSource(values)))}


def pipeline(graph: Graph, text: str, kv: KvGeometry = KV, numbers: bool = True) -> PipelineResult:
    """Runs a textual pipeline with every check on."""
    return run_pipeline(graph, parse_spec(text), Context(kv), [Verifier(NumberCheck() if numbers else None)])


def assert_same_results(graph: Graph, result: PipelineResult, tolerance: float = 1e-5) -> None:
    """The graph gives the same outputs before and after, on random inputs and edited parameters."""
    values = random_values(graph)
    before = run_graph(graph, values)
    after = run_graph(result.graph, edited_values(graph, result, values))
    for name, want in before.items():
        np.testing.assert_allclose(after[name], want, rtol=tolerance, atol=tolerance * max(1.0, np.abs(want).max()))


def names(graph: Graph) -> list[str]:
    """Primitive of every equation."""
    return [eqn.primitive.name for eqn in graph.eqns]


def paths(graph: Graph, kind: Kind = "param") -> list[str]:
    return [entry.path for entry in graph.of_kind(kind)]


def report_of(result: PipelineResult, name: str) -> list[str]:
    """The lines that `--explain` prints for one pass."""
    return [str(entry) for stage in result.stages if stage.step.name == name for entry in stage.result.report]


def stage_of(step: Pass, result: PassResult) -> Stage:
    return Stage(step, result, 0.0)


def check_golden(name: str, text: str) -> None:
    """Compares with tests/golden/NAME.txt exactly; JAXSERVE_UPDATE_GOLDENS=1 writes it instead."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("JAXSERVE_UPDATE_GOLDENS") == "1":
        path.write_text(text)
    assert path.exists(), f"{path} is missing: JAXSERVE_UPDATE_GOLDENS=1 writes it"
    assert text == path.read_text(), f"{path} differs; look, then update it with JAXSERVE_UPDATE_GOLDENS=1"


def explained(result: PipelineResult, name: str) -> str:
    """Report of a pass and the graph after it, as goldens keep them."""
    stage = next(stage for stage in result.stages if stage.step.name == name)
    lines = [str(entry) for entry in stage.result.report] or ["(nothing to report)"]
    edits = [f"{', '.join(edit.reads)} -> {', '.join(edit.writes)}" for edit in stage.result.edits]
    return "\n".join([f"# {stage.step}", *lines, "", "# weight edits", *(edits or ["(none)"]), "", ""]) + print_graph(
        stage.result.graph
    )
