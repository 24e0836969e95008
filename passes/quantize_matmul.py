"""quantize-matmul: weights become codes and scales, matmuls the `quantized_matmul` op."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve._compat import spec_of
from jaxserve.pallas_kernels import QuantFormat, QuantizedTensor, quantize_rtn, quantized_matmul, quantized_take
from jaxserve.passes.graph import Graph, Input
from jaxserve.passes.match import Match, NoMatch
from jaxserve.passes.pipeline import Context, Pass, PassResult
from jaxserve.passes.readers import MATMUL, weight_readers
from jaxserve.passes.rewrite import Rewriter
from jaxserve.passes.rules import RuleBook, Scheme, parse_rules
from jaxserve.passes.weights import Value, WeightEdit, dense

# How codes are chosen: a function of (weight [O, I] float32, format). Calibrated methods join here.
METHODS: dict[str, Callable[[np.ndarray, QuantFormat], QuantizedTensor]] = {"rtn": quantize_rtn}
# Relative error that rounding may bring to a region, by bits; a gaussian weight gives about 0.008 and 0.1.
TOLERANCE = {8: 0.02, 4: 0.2}


@dataclasses.dataclass(frozen=True)
class QuantizeMatmul(Pass):
    """dense_matmul(x, w) becomes quantized_matmul(x, codes, scale[, minimum]) where a rule selects w's path.

    `rules` are REGEX=SCHEME separated by ';', the first match wins (see `passes.rules`). A tied embedding is quantized
    once, its lookup becoming `quantized_take`. A weight that the checkpoint already stores in the format asked for is
    kept bit for bit; scheme `native` keeps whatever form it is stored in.
    """

    name: ClassVar[str] = "quantize-matmul"
    rules: str = ""
    method: Literal["rtn"] = "rtn"

    def __post_init__(self) -> None:
        parse_rules(self.rules)  # a bad rule is refused before anything is traced

    def run(self, graph: Graph, context: Context) -> PassResult:
        del context
        rewriter, book = Rewriter(graph), RuleBook(parse_rules(self.rules))
        report: list[Match | NoMatch] = []
        for entry in graph.of_kind("param"):
            if len(entry.aval.shape) == 2:
                report += self._quantize(rewriter, entry, book.find(entry.path))
        report += [NoMatch(f"rule {rule}", "selects no weight that an earlier rule left") for rule in book.unused]
        return PassResult.of(rewriter, report)

    def _quantize(self, rewriter: Rewriter, entry: Input, scheme: Scheme | None) -> list[Match | NoMatch]:
        target = _format_for(entry, scheme)
        if isinstance(target, NoMatch):
            return [target]
        readers = weight_readers(rewriter.graph, entry)
        if isinstance(readers, NoMatch):
            return [readers]
        outputs, inputs = entry.aval.shape
        fields = [
            rewriter.add_input(Input(f"{entry.path}/{field}", "param", jax.ShapeDtypeStruct(*spec), entry.axes))
            for field, spec in target.specs(outputs, inputs).items()
        ]
        writes = tuple(f"{entry.path}/{field}" for field in target.fields)
        edit = WeightEdit((entry.path,), writes, partial(_encode, target, self.method))
        for found in readers:
            self._substitute(rewriter, found, entry, target, fields, edit)
        return list(readers)

    def _substitute(
        self, rewriter: Rewriter, match: Match, entry: Input, target: QuantFormat, fields: list, edit: WeightEdit
    ) -> None:
        (result,), shape = match.results, entry.aval.shape
        options = {"format": target, "shape": shape}
        if match.eqns[-1].primitive.name == MATMUL:
            op, activation = partial(quantized_matmul, **options, out_dtype=spec_of(result).dtype), match.operands[0]
        else:
            op, activation = partial(quantized_take, **options, dtype=spec_of(result).dtype), match.operands[1]
        rewriter.replace(match, op, [activation, *fields], [edit], tolerance=TOLERANCE[target.bits])


def _format_for(entry: Input, scheme: Scheme | None) -> QuantFormat | NoMatch:
    """The format that a rule gives a weight, or why it stays dense."""
    if scheme is None:
        return NoMatch(entry.path, "no rule selects it: it stays dense")
    if scheme.text == "skip":
        return NoMatch(entry.path, "a rule says skip: it stays dense")
    if scheme.text == "native" and entry.stored is None:
        return NoMatch(entry.path, "the checkpoint stores it in no quantized form that we keep: it stays dense")
    target = entry.stored.format if scheme.format is None and entry.stored else scheme.format
    assert target is not None
    try:
        target.specs(*entry.aval.shape)
    except ValueError as error:
        return NoMatch(entry.path, str(error))
    return target


def _encode(target: QuantFormat, method: str, value: Value) -> tuple[Value, ...]:
    """The arrays of a weight in the target format."""
    if not (isinstance(value, QuantizedTensor) and value.format == target):
        value = METHODS[method](np.asarray(dense(value), jnp.float32), target)
    return tuple(value.arrays[field] for field in target.fields)
