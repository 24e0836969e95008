"""Which matmul gets which quantization: path regexes, the first match wins.

    lm_head=skip;layers_\\d+/mlp/.*=w4a16:g64:asym;.*=w8a16

SCHEMES names them, with the options that each takes; what they mean stands in `passes.quantize_matmul`.
"""

import dataclasses
import re

from jaxserve.errors import UserError
from jaxserve.pallas_kernels import QuantFormat

OFFSETS = {"sym": "none", "asym": "minimum", "zero": "zero"}
GROUPS = {"g32": 32, "g64": 64, "g128": 128}
SHAPES = (*GROUPS, "channel", *OFFSETS)


@dataclasses.dataclass(frozen=True)
class Scheme:
    """What to do with one weight, and with what it multiplies: `format` is None for `skip` and for `native`,
    `activation` one of `quantized_matmul`'s."""

    text: str
    format: QuantFormat | None = None
    activation: str | None = None


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A scheme without options, and the options that it takes."""

    format: QuantFormat | None = None
    activation: str | None = None
    options: tuple[str, ...] = ()


_INT8 = QuantFormat(8, None, "none", "float32")
_INT4 = QuantFormat(4, 64, "minimum", "float16")
SCHEMES = {
    "skip": _Kind(),
    "native": _Kind(),
    "w8a16": _Kind(_INT8, options=SHAPES),
    "w4a16": _Kind(_INT4, options=SHAPES),
    "w3a16": _Kind(dataclasses.replace(_INT4, bits=3), options=SHAPES),
    "w8a8": _Kind(_INT8, "int8", ("static",)),
    "w4a8": _Kind(QuantFormat(4, 64, "zero", "float32", level2="channel"), "int8", (*GROUPS, "static")),
    "fp8": _Kind(dataclasses.replace(_INT8, element="e4m3"), "e4m3"),
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """A regex that must match somewhere in the parameter's path, and the scheme for it."""

    pattern: re.Pattern[str]
    scheme: Scheme

    def __str__(self) -> str:
        return f"{self.pattern.pattern}={self.scheme.text}"


def parse_scheme(text: str) -> Scheme:
    """The scheme that `text` names; UserError with what is allowed otherwise."""
    name, *options = text.strip().split(":")
    if name not in SCHEMES:
        raise UserError(f"unknown quantization scheme {text!r}; allowed: {', '.join(SCHEMES)}")
    kind = SCHEMES[name]
    format, activation = kind.format, kind.activation
    for index, option in enumerate(options):
        if option not in kind.options:
            allowed = ", ".join(kind.options) or "none"
            raise UserError(f"scheme {text!r}: unknown option {option!r}; allowed: {allowed}")
        if clash := [other for other in options[:index] if _sets(other) == _sets(option)]:
            raise UserError(f"scheme {text!r}: {clash[0]} and {option} decide the same; leave one out")
        if option == "static":
            activation = f"{kind.activation}-static"
        elif format is not None:
            format = _changed(format, option)
    return Scheme(text.strip(), format, activation)


def _sets(option: str) -> str:
    """What of a scheme an option decides."""
    return "offset" if option in OFFSETS else option if option == "static" else "group"


def _changed(format: QuantFormat, option: str) -> QuantFormat:
    if option in OFFSETS:
        return dataclasses.replace(format, offset=OFFSETS[option])
    group = GROUPS.get(option)
    scale = format.scale_dtype if format.level2 else "float16" if group else "float32"
    return dataclasses.replace(format, group=group, scale_dtype=scale)


def parse_rules(text: str) -> tuple[Rule, ...]:
    """Rules separated by ';', each REGEX=SCHEME. UserError names the rule that cannot be read."""
    rules = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        pattern, equals, scheme = part.rpartition("=")
        if not equals or not pattern:
            raise UserError(f"quantization rule {part!r} is not REGEX=SCHEME")
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise UserError(f"quantization rule {part!r}: {pattern!r} is not a regular expression ({error})") from None
        rules.append(Rule(compiled, parse_scheme(scheme)))
    return tuple(rules)


class RuleBook:
    """Looks rules up and remembers which were used, so that a rule that selects nothing is reported."""

    def __init__(self, rules: tuple[Rule, ...]):
        self.rules = rules
        self._used: set[int] = set()

    def find(self, path: str) -> Scheme | None:
        """The scheme of the first rule that matches `path`, or None."""
        for index, rule in enumerate(self.rules):
            if rule.pattern.search(path):
                self._used.add(index)
                return rule.scheme
        return None

    @property
    def unused(self) -> tuple[Rule, ...]:
        return tuple(rule for index, rule in enumerate(self.rules) if index not in self._used)
