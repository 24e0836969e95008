"""The Jinja environment that chat templates run in. Imported at the first render, because Jinja takes a while."""

import datetime
import json
import typing

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MAX_REPEAT = 1 << 20
"""Longest string or list that `*` may make in a template."""

MAX_POWER_BITS = 1 << 16
"""Largest integer, in bits, that `**` may make in a template."""


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`, a mark for training: here only its content."""

    tags: typing.ClassVar[set[str]] = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Immutable sandbox with what chat templates expect, and bounds on the operators that can eat all memory."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        del self.globals["lipsum"]  # text of any length from one call

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: typing.Any, right: typing.Any
    ) -> typing.Any:
        if operator == "*":
            _check_repeat(left, right)
            _check_repeat(right, left)
        elif operator == "**":
            _check_power(left, right)
        return super().call_binop(context, operator, left, right)


def _check_repeat(value: typing.Any, times: typing.Any) -> None:
    """Refuses value * times where that makes a longer sequence than MAX_REPEAT."""
    if isinstance(value, (str, list, tuple)) and isinstance(times, int) and len(value) * times > MAX_REPEAT:
        raise jinja2.exceptions.SecurityError(
            f"a sequence of {len(value) * times} elements is too long in a chat template"
        )


def _check_power(base: typing.Any, exponent: typing.Any) -> None:
    """Refuses base ** exponent where that makes a larger integer than MAX_POWER_BITS."""
    if isinstance(base, int) and isinstance(exponent, int) and exponent * base.bit_length() > MAX_POWER_BITS:
        raise jinja2.exceptions.SecurityError("an integer power is too large in a chat template")


def _raise_exception(message: str) -> typing.NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _to_json(
    value: typing.Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`: plain JSON, where Jinja's own would escape for HTML and sort the keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
