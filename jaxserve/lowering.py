"""From a model and a bucket to a traced graph, and from a rewritten graph to the function that a step runs."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxserve.models.axes import param_axes
from jaxserve.models.checkpoint import Checkpoint
from jaxserve.models.config import ModelConfig
from jaxserve.models.family import logits_and_hidden, param_specs
from jaxserve.models.registry import make_module
from jaxserve.pallas_kernels import QuantFormat
from jaxserve.passes.graph import Graph, Input, Stored
from jaxserve.passes.loops import call_with_loops
from jaxserve.passes.trace import trace_graph

Arrays = Mapping[str, Array]


def stored_forms(checkpoint: Checkpoint) -> dict[str, Stored]:
    """The quantized forms in which a checkpoint keeps parameters, by path."""
    return {
        path: Stored(spec.format, spec.stored, spec.exact, spec.activation)
        for path, spec in checkpoint.specs().items()
        if spec.format is not None
    }


def trace_model(
    config: ModelConfig,
    tokens: int,
    rows: int,
    stored: Mapping[str, Stored | QuantFormat | None],
    dtype: str = "float32",
    *,
    hidden: bool = False,
) -> Graph:
    """The model's graph for a step of T = `tokens` that gives logits of R = `rows` rows, and with `hidden` also what
    they are made of, which a look-ahead head reads.

    `stored` names the quantized forms in which the checkpoint keeps parameters, in full or by their formats alone. The
    compiler traces in float32: narrower numbers are the passes' business.
    """
    module = make_module(config, jnp.dtype(dtype))
    forms = {path: Stored(form) if isinstance(form, QuantFormat) else form for path, form in stored.items()}
    params = tuple(
        Input(path, "param", spec, param_axes(path), forms.get(path)) for path, spec in param_specs(module).items()
    )
    lengths = {"tokens": tokens, "positions": tokens, "segments": tokens, "logit_rows": rows}
    arguments = tuple(
        Input(name, "arg", jax.ShapeDtypeStruct((length,), jnp.int32), "R" if name == "logit_rows" else "T")
        for name, length in lengths.items()
    )

    def model(values: Arrays) -> dict[str, Array]:
        weights = {entry.path: values[entry.path] for entry in params}
        logits, last = logits_and_hidden(module, weights, *(values[name] for name in lengths))
        return {"logits": logits} | ({"hidden": last} if hidden else {})

    return trace_graph(model, (*params, *arguments))


def graph_forward(
    graph: Graph, *, loops: bool = False, references: bool = False
) -> Callable[[Arrays, Arrays, Arrays], tuple[dict[str, Array], dict[str, Array]]]:
    """forward(params, caches, args) -> (caches, outputs), both by name: what a step function is built on. Of the
    outputs `logits` [R, V] are float32. With `loops`, layers that compute alike run in a loop; with `references`, no
    kernel stands in for an op's reference.

    Raises KeyError at trace time when the graph reads an argument that the step does not offer.
    """

    def forward(params: Arrays, caches: Arrays, args: Arrays) -> tuple[dict[str, Array], dict[str, Array]]:
        values = {**params, **caches, **args}
        if references:
            results = graph.call_references(values)
        else:
            results = call_with_loops(graph, values) if loops else graph.call(values)
        updated = {output.replaces: results[output.name] for output in graph.outputs if output.replaces}
        return {str(name): value for name, value in updated.items()}, results

    return forward


def specs_of(graph: Graph, kind: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a graph's inputs of one kind, by path."""
    return {entry.path: entry.aval for entry in graph.inputs if entry.kind == kind}
