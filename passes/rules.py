"""Which matmul gets which quantization: path regexes, the first match wins.

    lm_head=skip;layers_\\d+/mlp/.*=w4a16:g64:asym;.*=w8a16

Schemes: `skip`, `native` (the blocks that the checkpoint came with), `w8a16` (int8, one scale a channel, symmetric),
and `w4a16` with `:g32`, `:g64`, `:g128` or `:channel` (default g64) and `:sym` or `:asym` (default asym: a float
minimum a group, as in GGUF's Q4_1).
"""

import dataclasses
import re

from jaxserve.errors import UserError
from jaxserve.pallas_kernels import QuantFormat

GROUPS = (32, 64, 128)


@dataclasses.dataclass(frozen=True)
class Scheme:
    """What to do with one weight: `format` is None for `skip` and for `native`."""

    text: str
    format: QuantFormat | None = None


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
    if name in ("skip", "native") and not options:
        return Scheme(name)
    if name == "w8a16" and not options:
        return Scheme(name, QuantFormat(bits=8, group=None, offset="none", scale_dtype="float32"))
    if name != "w4a16":
        raise UserError(f"unknown quantization scheme {text!r}; allowed: skip, native, w8a16, w4a16[:gN][:sym|:asym]")
    group: int | None = 64
    offset = "minimum"
    for option in options:
        if option in ("sym", "asym"):
            offset = "none" if option == "sym" else "minimum"
        elif option == "channel":
            group = None
        elif option in [f"g{size}" for size in GROUPS]:
            group = int(option[1:])
        else:
            allowed = ", ".join(f"g{size}" for size in GROUPS)
            raise UserError(f"scheme {text!r}: unknown option {option!r}; allowed: {allowed}, channel, sym, asym")
    return Scheme(text.strip(), QuantFormat(bits=4, group=group, offset=offset, scale_dtype="float16"))


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
