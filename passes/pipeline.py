"""A pipeline: one flat, visible list of passes, with a text form that parses back.

canonicalize,lower-dense-matmul,quantize-matmul{rules='layers_.*=w4a16:g64'},insert-paged-kv{page=16}
"""

import dataclasses
import re
import time
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from jaxserve._compat import Atom, Var
from jaxserve.errors import UserError
from jaxserve.passes.graph import Graph
from jaxserve.passes.match import Match, NoMatch
from jaxserve.passes.rewrite import Replaced, Rewriter
from jaxserve.passes.statistics import Statistic
from jaxserve.passes.weights import WeightEdit


@dataclasses.dataclass(frozen=True)
class KvGeometry:
    """Sizes of the paged cache: pages in the pool, pages a sequence may hold (P), sequences in the step (S)."""

    num_pages: int
    pages_per_seq: int
    seqs: int


@dataclasses.dataclass(frozen=True)
class Context:
    """What a pass may know of where the graph will run: the cache, and whether kernels there take a layer that is known
    only at run time, so that layers may run in a loop."""

    kv: KvGeometry = KvGeometry(num_pages=8, pages_per_seq=4, seqs=2)
    loops: bool = True


@dataclasses.dataclass(frozen=True)
class PassResult:
    """One transaction: the new graph, the weight edits that go with it, and what matched and what did not.

    `statistics` are what the edits read beside parameters. `renamed` says what the values of the old graph that have
    been replaced are called in the new one.
    """

    graph: Graph
    edits: tuple[WeightEdit, ...] = ()
    report: tuple[Match | NoMatch, ...] = ()
    replaced: tuple[Replaced, ...] = ()
    statistics: tuple[Statistic, ...] = ()
    renamed: Mapping[Var, Atom] = dataclasses.field(default_factory=dict)

    @property
    def matches(self) -> int:
        return sum(bool(entry) for entry in self.report)

    @staticmethod
    def of(rewriter: Rewriter, report: Iterable[Match | NoMatch]) -> "PassResult":
        return PassResult(
            rewriter.finish(),
            tuple(rewriter.edits),
            tuple(report),
            tuple(rewriter.replaced),
            renamed=rewriter.renamed,
        )


@dataclasses.dataclass(frozen=True)
class Pass:
    """A named rewrite. Subclasses are frozen dataclasses; their fields are the options of the text form.

    `adds_outputs` declares that the pass appends outputs (caches). `keeps_numbers` declares that its weights give the
    same activations as before up to float rounding, so that calibration need not compute them again. `platform` is
    that of the kernels that it serves, if it serves those of one alone: for others it is left out.
    """

    name: ClassVar[str]
    adds_outputs: ClassVar[bool] = False
    keeps_numbers: ClassVar[bool] = False
    platform: ClassVar[str | None] = None

    def run(self, graph: Graph, context: Context) -> PassResult:
        raise NotImplementedError

    def __str__(self) -> str:
        options = [
            f"{option_name(field.name)}={option_text(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{self.name}{{{','.join(options)}}}" if options else self.name


@dataclasses.dataclass(frozen=True)
class Stage:
    """One pass that ran: its result and its cost in seconds."""

    step: Pass
    result: PassResult
    seconds: float


@dataclasses.dataclass(frozen=True)
class PipelineResult:
    graph: Graph
    stages: tuple[Stage, ...]

    @property
    def edits(self) -> tuple[WeightEdit, ...]:
        return tuple(edit for stage in self.stages for edit in stage.result.edits)


def run_pipeline(
    graph: Graph,
    passes: Sequence[Pass],
    context: Context,
    after: Sequence[Callable[[Graph, Stage], None]] = (),
) -> PipelineResult:
    """Runs the passes in order; each hook of `after` sees (graph before the pass, stage): verify, print, progress."""
    stages: list[Stage] = []
    for step in passes:
        start = time.perf_counter()
        result = step.run(graph, context)
        stage = Stage(step, result, time.perf_counter() - start)
        for hook in after:
            hook(graph, stage)
        stages.append(stage)
        graph = result.graph
    return PipelineResult(graph, tuple(stages))


def select(passes: Sequence[Pass], disabled: Sequence[str] = (), stop_after: str | None = None) -> tuple[Pass, ...]:
    """The passes without those in `disabled`, up to and with `stop_after`; UserError for names not in the list."""
    names = [step.name for step in passes]
    for name in [*disabled, *([stop_after] if stop_after else [])]:
        if name not in names:
            raise UserError(f"no pass {name!r} in this pipeline; it has: {', '.join(names) or 'none'}")
    if stop_after:
        passes = passes[: names.index(stop_after) + 1]
    return tuple(step for step in passes if step.name not in disabled)


def for_platform(passes: Sequence[Pass], platform: str) -> tuple[Pass, ...]:
    """The passes without those that serve another platform's kernels alone."""
    return tuple(step for step in passes if step.platform in (None, platform))


_TOKEN = re.compile(r"(?P<name>[A-Za-z][\w.-]*)|(?P<punct>[{},=])|'(?P<quoted>(?:[^']|'')*)'|(?P<value>[^\s{},=']+)")
# kind (a group of _TOKEN, or "end"), text, position
_Token = tuple[str, str, int]


def parse_pipeline(text: str, registry: dict[str, type[Pass]]) -> tuple[Pass, ...]:
    """The passes that a textual spec names, NAME{option=value,...} separated by commas.

    A value that holds other characters than letters, digits, `_`, `.` and `-` stands in single quotes, a quote in it
    twice. Raises UserError with the position for anything that is not a spec.
    """
    tokens = _tokens(text)
    passes: list[Pass] = []
    while tokens[0][0] != "end":
        if passes:
            _expect(tokens, "','", "punct", ",")
        name = _expect(tokens, "a pass name", "name")
        if name not in registry:
            raise UserError(f"pipeline spec: unknown pass {name!r}; known: {', '.join(sorted(registry))}")
        passes.append(_build(registry[name], _options(tokens)))
    return tuple(passes)


def _tokens(text: str) -> list[_Token]:
    tokens, position = [], 0
    while rest := text[position:].lstrip():
        position = len(text) - len(rest)
        found = _TOKEN.match(text, position)
        if found is None or found.lastgroup is None:
            raise UserError(f"pipeline spec: cannot read {rest[:20]!r} at position {position}")
        token = found.group(found.lastgroup)
        tokens.append((found.lastgroup, token.replace("''", "'") if found.lastgroup == "quoted" else token, position))
        position = found.end()
    return [*tokens, ("end", "the end", len(text))]


def _expect(tokens: list[_Token], what: str, kinds: str, text: str | None = None) -> str:
    """Takes the next token, which must be of one of the kinds; UserError that says `what` was expected otherwise."""
    kind, found, at = tokens[0]
    if kind not in kinds.split() or (text is not None and found != text):
        shown = found if kind == "end" else repr(found)
        raise UserError(f"pipeline spec: expected {what} at position {at}, found {shown}")
    return tokens.pop(0)[1]


def _options(tokens: list[_Token]) -> dict[str, str]:
    options: dict[str, str] = {}
    if tokens[0][:2] != ("punct", "{"):
        return options
    tokens.pop(0)
    while tokens[0][:2] != ("punct", "}"):
        if options:
            _expect(tokens, "',' or '}' (quote values that hold ,{}= or spaces)", "punct", ",")
        at = tokens[0][2]
        key = _expect(tokens, "an option's name", "name").replace("-", "_")
        if key in options:
            raise UserError(f"pipeline spec: option {option_name(key)!r} is given twice, again at position {at}")
        _expect(tokens, "'='", "punct", "=")
        options[key] = _expect(tokens, "a value", "name quoted value")
    tokens.pop(0)
    return options


def _build(cls: type[Pass], options: dict[str, str]) -> Pass:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for key, text in options.items():
        if key not in fields:
            allowed = ", ".join(map(option_name, fields)) or "none"
            raise UserError(f"pass {cls.name}: unknown option {option_name(key)!r}; options: {allowed}")
        values[key] = _parse(cls, fields[key], text)
    return cls(**values)


_KINDS = {bool: "true or false", int: "a whole number", float: "a number"}


def _parse(cls: type[Pass], field: dataclasses.Field, text: str) -> Any:
    kind = field.type
    choices, given = typing.get_args(kind), f"{option_name(field.name)}={text!r}"
    try:
        if kind is bool:
            return {"true": True, "false": False}[text]
        if kind in (int, float):
            return kind(text)  # pyright: ignore[reportCallIssue]
    except (KeyError, ValueError):
        raise UserError(f"pass {cls.name}: option {given} is not {_KINDS[kind]}") from None
    if choices and text not in choices:
        raise UserError(f"pass {cls.name}: option {given}; allowed: {', '.join(map(str, choices))}")
    return text


def option_name(field: str) -> str:
    """What the text form calls a field of a pass."""
    return field.replace("_", "-")


def option_text(value: Any) -> str:
    """A value of an option, as the text form has it."""
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return text if re.fullmatch(r"[\w.-]+", text, re.ASCII) else "'" + text.replace("'", "''") + "'"
