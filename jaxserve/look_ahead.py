"""A look-ahead head in an artifact: loaded, traced and rewritten like a model of its own, run after each step's choice.

The step's graph then gives the last layer's state beside the logits. What a step samples does not change.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jaxtyping import Array

from jaxserve.errors import UserError
from jaxserve.models.layers import rows
from jaxserve.models.look_ahead import LOOK_AHEAD, Head, param_specs
from jaxserve.passes.graph import Graph, Input
from jaxserve.passes.pipeline import Context, PipelineResult, for_platform, run_pipeline
from jaxserve.passes.recipes import parse_spec
from jaxserve.passes.trace import trace_graph
from jaxserve.passes.weights import WeightPlan
from jaxserve.serving import step as steps
from jaxserve.serving.session import check_same_tokens
from jaxserve.text import Tokenizer, load_tokenizer

PREFIX = "look_ahead/"  # of the head's parameters among the artifact's
# A head is read once for each token that it names, so its bytes are its cost: 4 bits, or 8 where no groups fit.
_GROUP = 64
_PASSES = (
    "canonicalize,lower-dense-matmul,fuse-gate-up,"
    "quantize-matmul{{rules='.*={scheme}'}},{narrow}choose-layout,fuse-epilogue"
)


def load_head(folder: pathlib.Path, width: int, vocab: int, tokenizer: Tokenizer) -> Head:
    """The head that `jaxserve distill --head` made; UserError when it is none, or not of this model."""
    if not (folder / LOOK_AHEAD).exists():
        raise UserError(f"--look-ahead {folder}: it holds no {LOOK_AHEAD}; `jaxserve distill MODEL --head` makes one")
    check_same_tokens(f"--look-ahead {folder}", load_tokenizer(folder), tokenizer)
    return Head.load(folder / LOOK_AHEAD, width, vocab)


def rewrite_head(head: Head, count: int, vocab: int, activations: str, platform: str) -> PipelineResult:
    """The head's graph for R = `count` rows after its passes: hidden [R, D] and tokens [R] to `token` [R] int32, the
    likeliest after each, and `rate` [R] float32, how likely it is."""
    module = head.module
    specs = {f"{PREFIX}{path}": spec for path, spec in param_specs(module).items()}
    lists = {f"{PREFIX}places": vocab, f"{PREFIX}tokens": module.vocab}
    inputs = (
        *(Input(path, "param", spec) for path, spec in specs.items()),
        *(Input(path, "param", jax.ShapeDtypeStruct((size,), jnp.int32)) for path, size in lists.items()),
        Input("hidden", "arg", jax.ShapeDtypeStruct((count, module.width), jnp.float32), "R D"),
        Input("tokens", "arg", jax.ShapeDtypeStruct((count,), jnp.int32), "R"),
    )

    def foresee(values: Mapping[str, Array]) -> dict[str, Array]:
        params = unflatten_dict({path.removeprefix(PREFIX): values[path] for path in specs}, sep="/")
        logits = module.apply({"params": params}, values["hidden"], rows(values[f"{PREFIX}places"], values["tokens"]))
        assert isinstance(logits, jax.Array)
        most = jnp.max(logits, axis=1, keepdims=True)
        # The first of the likeliest; argmax itself takes XLA several times as long on a CPU.
        place = jnp.min(jnp.where(logits == most, jnp.arange(module.vocab), module.vocab), axis=1)
        rate = 1 / jnp.sum(jnp.exp(logits - most), axis=1)
        return {"token": rows(values[f"{PREFIX}tokens"], place), "rate": rate}

    narrow = "narrow-matmul," if activations == "bf16" else ""
    scheme = "w8a16" if module.width % _GROUP or module.mlp % _GROUP else f"w4a16:g{_GROUP}"
    passes = for_platform(parse_spec(_PASSES.format(scheme=scheme, narrow=narrow)), platform)
    return run_pipeline(trace_graph(foresee, inputs), passes, Context())


def head_arrays(head: Head, vocab: int, result: PipelineResult) -> Iterator[tuple[str, np.ndarray]]:
    """The parameters that the head's programs read, by path, as its passes (`rewrite_head`) make them."""
    values = {**head.params, "places": head.places(vocab), "tokens": head.tokens}
    source = _Values({f"{PREFIX}{path}": value for path, value in values.items()})
    return WeightPlan(result.edits).materialize(result.graph, source)


@dataclasses.dataclass(frozen=True)
class _Values:
    """Parameters by path, as a source for edits."""

    values: Mapping[str, np.ndarray]

    def read_native(self, path: str) -> np.ndarray:
        return self.values[path]


def head_function(graph: Graph) -> steps.LookAhead:
    """(params, hidden [R, D], tokens [R]) -> (token, rate) of each row, from a rewritten graph."""

    def foresee(params: Mapping[str, Array], hidden: Array, tokens: Array) -> tuple[Array, Array]:
        found = graph.call({**params, "hidden": hidden, "tokens": tokens})
        return found["token"], found["rate"]

    return foresee
