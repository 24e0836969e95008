"""quantize-matmul: weights become codes and scales, matmuls the `quantized_matmul` op."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import numpy as np

from jaxserve._compat import Var, spec_of
from jaxserve.errors import UserError
from jaxserve.pallas_kernels import QuantFormat, QuantizedTensor, quantize_rtn, quantized_matmul, quantized_take
from jaxserve.pallas_kernels.quantized_matmul.op import LARGEST
from jaxserve.passes.clip import quantize_clip
from jaxserve.passes.gptq import ActOrder, Ranges, quantize_gptq
from jaxserve.passes.graph import Graph, Input, input_scale_path
from jaxserve.passes.match import Match, NoMatch
from jaxserve.passes.pipeline import Context, Pass, PassResult, option_name
from jaxserve.passes.readers import MATMUL, weight_readers
from jaxserve.passes.rewrite import Rewriter
from jaxserve.passes.rules import RuleBook, Scheme, parse_rules
from jaxserve.passes.statistics import Statistic, StatisticKind, statistic_path
from jaxserve.passes.weights import Value, WeightEdit, dense

Statistics = Mapping[StatisticKind, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Method:
    """How codes are chosen: `function(weight [O, I] float32, format, statistics by kind, **options)`.

    `statistics` are of what the weight's matmul multiplies; `options` are fields of the pass.
    """

    function: Callable[..., QuantizedTensor]
    statistics: tuple[StatisticKind, ...] = ()
    options: tuple[str, ...] = ()


def _rtn(weight: np.ndarray, format: QuantFormat, statistics: Statistics) -> QuantizedTensor:
    del statistics
    return quantize_rtn(weight, format)


METHODS = {
    "rtn": Method(_rtn),
    "clip": Method(quantize_clip, ("gram",)),
    "gptq": Method(quantize_gptq, ("gram",), ("act_order", "ranges", "damp")),
}


@dataclasses.dataclass(frozen=True)
class QuantizeMatmul(Pass):
    """dense_matmul(x, w) becomes quantized_matmul(x, codes, scale[, minimum]) where a rule selects w's path.

    `rules` are REGEX=SCHEME separated by ';', the first match wins:

    | scheme | weights | activations | options (the default first) |
    | --- | --- | --- | --- |
    | `skip` | stay dense | | |
    | `native` | as the checkpoint stores them | as it says | |
    | `w8a16` | int8 | as they are | channel, gN; sym, asym, zero |
    | `w4a16` | 4 bits | as they are | g64, gN, channel; asym, sym, zero |
    | `w3a16` | 3 bits, stored as 4 | as they are | g64, gN, channel; asym, sym, zero |
    | `w8a8` | int8 a channel, symmetric | int8, a scale a token | static: one scale, calibrated |
    | `w4a8` | QServe: 4 bits a group within int8 a channel | int8, a scale a token | g64, gN; static |
    | `fp8` | e4m3 a channel | e4m3, a scale a token | |

    `gN` is a group of N inputs, 32, 64 or 128, `channel` one for all inputs of an output. A width that N does not
    divide ends with a shorter group, which `--explain` says. `asym` has a float minimum a group, as in GGUF's Q4_1,
    `zero` an integer zero point, `sym` neither. Scales are float16 a group and float32 a channel.

    A tied embedding is quantized once, its lookup becoming `quantized_take`. A weight that the checkpoint already
    stores in the format asked for is kept bit for bit.

    `method` chooses the codes: `rtn` rounds to nearest, `clip` searches each group's range as AWQ does, `gptq` makes up
    for rounding as it goes (`passes.clip`, `passes.gptq`). The last two look at what one matmul multiplies: a weight
    with other readers is rounded to nearest. For gptq, `act_order` says which inputs go first: those of an output as
    they come (off), the loudest (static), or the loudest with groups formed in that order (permuted); `ranges` whether
    a group's range is searched; `damp` what part of the mean energy is added to every input's.

    Raises UserError for a rule that cannot be read and for options that do not go together.
    """

    name: ClassVar[str] = "quantize-matmul"
    rules: str = ""
    method: Literal["rtn", "clip", "gptq"] = "rtn"
    act_order: ActOrder = "off"
    ranges: Ranges = "search"
    damp: float = 0.01

    def __post_init__(self) -> None:
        parse_rules(self.rules)  # a bad rule is refused before anything is traced
        for field in dataclasses.fields(self)[2:]:
            if field.name not in METHODS[self.method].options and getattr(self, field.name) != field.default:
                name = option_name(field.name)
                raise UserError(f"pass quantize-matmul: option {name} does not belong to method={self.method}")
        if not 0 < self.damp <= 1:
            raise UserError(f"pass quantize-matmul: damp={self.damp:g} is not above 0 and up to 1")

    def run(self, graph: Graph, context: Context) -> PassResult:
        del context
        rewriter, book = Rewriter(graph), RuleBook(parse_rules(self.rules))
        report: list[Match | NoMatch] = []
        statistics: list[Statistic] = []
        for entry in graph.of_kind("param"):
            if len(entry.aval.shape) == 2:
                report += self._quantize(rewriter, entry, book.find(entry.path), statistics)
        report += [
            NoMatch(f"rule {rule}", "selects no weight that an earlier rule left", asked=True) for rule in book.unused
        ]
        return dataclasses.replace(PassResult.of(rewriter, report), statistics=tuple(statistics))

    def _quantize(
        self, rewriter: Rewriter, entry: Input, scheme: Scheme | None, statistics: list[Statistic]
    ) -> list[Match | NoMatch]:
        target = _target_for(entry, scheme)
        if isinstance(target, NoMatch):
            return [target]
        readers = weight_readers(rewriter.graph, entry)
        if isinstance(readers, NoMatch):
            return [readers]
        matmuls = [found for found in readers if found.eqns[-1].primitive.name == MATMUL]
        if target.static and len(matmuls) != 1:
            return [NoMatch(entry.path, f"{len(matmuls)} matmuls read it; a static scale of activations is for one")]
        target = self._with_method(target, entry, len(readers), len(matmuls))
        asked = [_statistic(kind, entry, matmuls[0]) for kind in target.kinds]
        statistics += asked
        reads = (entry.path, *(each.path for each in asked), *target.given(entry.path))
        edit = WeightEdit(reads, target.writes(entry.path), partial(target.encode, entry.path))
        notes = [dataclasses.replace(found, note=f"{found.note}: {target.note}") for found in readers]
        for found in notes:
            _substitute(rewriter, found, entry, target, edit)
        return list(notes)

    def _with_method(self, target: "_Target", entry: Input, readers: int, matmuls: int) -> "_Target":
        """The target with this pass's method, or rounded to nearest where the method has nothing to go by."""
        inputs, format = entry.aval.shape[1], target.format
        notes = []
        if entry.stored is not None and entry.stored.format == format:
            if entry.stored.exact:
                return dataclasses.replace(target, kept=True, notes=(entry.stored.note,))
            notes.append(entry.stored.note)
        name = self.method
        if METHODS[name].statistics and (readers, matmuls) != (1, 1):
            notes.append(f"{readers - matmuls} lookups and {matmuls} matmuls read it, and {name} is for one matmul")
            name = "rtn"
        if name == "gptq" and self.act_order == "permuted" and format.group_size(inputs) < inputs:
            format = dataclasses.replace(format, ordered=True)
        if inputs % format.group_size(inputs):
            notes.append(f"the last group has {inputs % format.group_size(inputs)} inputs")
        activation = f", activations {target.activation}" if target.activation else ""
        method = METHODS[name]
        options = {option: getattr(self, option) for option in method.options}
        return dataclasses.replace(
            target, format=format, method=method, options=options, notes=(f"{format} by {name}{activation}", *notes)
        )


@dataclasses.dataclass(frozen=True)
class _Target:
    """What one weight becomes: codes by `method`, or as they are stored if they are `kept`.

    `scale_given` says that a static scale of its activations is the checkpoint's.
    """

    format: QuantFormat
    activation: str | None
    scale_given: bool = False
    kept: bool = False
    method: Method = METHODS["rtn"]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        return "; ".join(self.notes)

    @property
    def static(self) -> bool:
        """Whether activations have one scale, which is a parameter."""
        return self.activation == "int8-static"

    @property
    def kinds(self) -> tuple[StatisticKind, ...]:
        """The statistics that `encode` takes after the weight."""
        own = () if self.kept else self.method.statistics
        return (*own, "range") if self.static and not self.scale_given else own

    def given(self, path: str) -> tuple[str, ...]:
        """What `encode` takes after the statistics: the static scale, if the checkpoint has it."""
        return (input_scale_path(path),) if self.static and self.scale_given else ()

    def writes(self, path: str) -> tuple[str, ...]:
        """The parameters that `encode` gives for the weight at `path`."""
        fields = tuple(f"{path}/{field}" for field in self.format.fields)
        return (*fields, input_scale_path(path)) if self.static else fields

    def encode(self, path: str, value: Value, *rest: Value) -> tuple[Value, ...]:
        """The arrays of a weight in the target format, and the scale of its activations if that is static.

        Raises UserError, which names the path, for numbers that cannot be quantized.
        """
        known = {kind: dense(found) for kind, found in zip(self.kinds, rest, strict=False)}
        if not (self.kept and isinstance(value, QuantizedTensor) and value.format == self.format):
            weight = np.asarray(dense(value), np.float32)
            method = METHODS["rtn"] if self.kept else self.method
            try:
                value = method.function(weight, self.format, known, **self.options)
            except ValueError as error:
                raise UserError(f"{path}: {error}") from None
        arrays = tuple(value.arrays[field] for field in self.format.fields)
        if not self.static:
            return arrays
        scale = dense(rest[-1]) if self.scale_given else np.abs(known["range"]).max() / LARGEST["int8-static"]
        return (*arrays, np.asarray(scale, np.float32))


def _statistic(kind: StatisticKind, entry: Input, matmul: Match) -> Statistic:
    activation = matmul.operands[0]
    assert isinstance(activation, Var)
    return Statistic(statistic_path(kind, entry.path), activation, kind)


def _target_for(entry: Input, scheme: Scheme | None) -> _Target | NoMatch:
    """What a rule makes of a weight, or why it stays dense."""
    if scheme is None:
        return NoMatch(entry.path, "no rule selects it: it stays dense")
    if scheme.text == "skip":
        return NoMatch(entry.path, "a rule says skip: it stays dense")
    if scheme.format is not None:
        target = _Target(scheme.format, scheme.activation)
    elif entry.stored is not None:
        target = _Target(entry.stored.format, entry.stored.activation, scale_given=True)
    else:
        return NoMatch(entry.path, "the checkpoint stores it in no quantized form that we keep: it stays dense")
    try:
        target.format.specs(*entry.aval.shape)
    except ValueError as error:
        return NoMatch(entry.path, str(error))
    return target


def _substitute(rewriter: Rewriter, match: Match, entry: Input, target: _Target, edit: WeightEdit) -> None:
    """Gives a reader of the weight its quantized form."""
    (result,), shape = match.results, entry.aval.shape
    fields = [_field(rewriter, entry, name, spec) for name, spec in target.format.specs(*shape).items()]
    options: dict[str, Any] = {"format": target.format, "shape": shape}
    if match.eqns[-1].primitive.name == MATMUL:
        options |= {"out_dtype": spec_of(result).dtype, "activation": target.activation}
        op, operand = partial(quantized_matmul, **options), match.operands[0]
        if target.static:
            scale = rewriter.add_input(
                Input(input_scale_path(entry.path), "param", jax.ShapeDtypeStruct((), "float32"))
            )
            fields.append(scale)
    else:
        op, operand = partial(quantized_take, **options, dtype=spec_of(result).dtype), match.operands[1]
    rewriter.replace(match, op, [operand, *fields], [edit], tolerance=tolerance_of(target.format, target.activation))


def _field(rewriter: Rewriter, entry: Input, name: str, spec: tuple[tuple[int, ...], np.dtype]) -> Var:
    axes = " ".join(entry.axes.split()[-len(spec[0]) :])
    return rewriter.add_input(Input(f"{entry.path}/{name}", "param", jax.ShapeDtypeStruct(*spec), axes))


def tolerance_of(format: QuantFormat, activation: str | None) -> float:
    """Relative error that rounding may bring to a region; a gaussian weight gives about 0.008, 0.1 and 0.2 with 8, 4
    and 3 bits and 0.03 with e4m3, gaussian activations 0.008 with int8."""
    weights = {8: 0.02, 4: 0.2, 3: 0.4}[format.bits] if format.element == "int" else 0.05
    return weights + {None: 0.0, "int8": 0.03, "int8-static": 0.03, "e4m3": 0.05}[activation]
