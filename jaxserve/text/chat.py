"""Chat templates: a list of messages rendered to the text that a model was trained on.

Templates come with checkpoints, so they are other people's code: they run in Jinja's immutable sandbox, and whatever
goes wrong in one becomes a ChatTemplateError.
"""

import functools
import typing

from jaxserve.errors import UserError

if typing.TYPE_CHECKING:
    import jinja2

MAX_RENDERED_CHARS = 64 << 20
"""Bound on the text one chat may render to; a longer one means a runaway template."""

# What Python code written as a template can raise beside Jinja's own errors.
_TEMPLATE_FAILURES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplateError(UserError):
    """A chat template refused the messages or failed on them; `message` says why."""

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message


class ChatTemplate:
    """A model's chat template, with the features that checkpoints on the Hub rely on.

    source: Jinja text. tool_source: another one, used when tools are given (checkpoints with a "tool_use" template).
    bos_token, eos_token and the other special_tokens are variables of the template. Compiled at the first render.
    """

    def __init__(
        self,
        source: str,
        bos_token: str | None = None,
        eos_token: str | None = None,
        *,
        tool_source: str | None = None,
        special_tokens: dict[str, str] | None = None,
    ):
        self.source = source
        self.tool_source = tool_source
        self.special_tokens = dict(special_tokens or {})
        if bos_token is not None:
            self.special_tokens["bos_token"] = bos_token
        if eos_token is not None:
            self.special_tokens["eos_token"] = eos_token

    def render(
        self,
        messages: typing.Sequence[typing.Mapping[str, typing.Any]],
        add_generation_prompt: bool = True,
        tools: typing.Sequence[typing.Any] | None = None,
        **variables: typing.Any,
    ) -> str:
        """Text of the chat, ready for `Tokenizer.encode(text, special=True)`.

        variables are further names for the template (documents, enable_thinking, ...). Raises ChatTemplateError when
        the template does not compile, calls raise_exception, or fails on these messages.
        """
        import jinja2

        names = {
            **self.special_tokens,
            "documents": None,
            **variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            template = self._tool_template if tools is not None and self.tool_source else self._template
            return _bounded(template.generate(names))
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"chat template line {error.lineno} does not compile: {error.message}") from error
        except jinja2.TemplateError as error:
            raise ChatTemplateError(error.message or f"chat template failed: {type(error).__name__}") from error
        except _TEMPLATE_FAILURES as error:
            raise ChatTemplateError(f"chat template failed: {type(error).__name__}: {error}") from error

    @functools.cached_property
    def _template(self) -> "jinja2.Template":
        return _environment().from_string(self.source)

    @functools.cached_property
    def _tool_template(self) -> "jinja2.Template":
        return _environment().from_string(self.tool_source or "")


def _bounded(parts: typing.Iterator[str]) -> str:
    """The parts joined, as long as they stay below MAX_RENDERED_CHARS."""
    kept, size = [], 0
    for part in parts:
        size += len(part)
        if size > MAX_RENDERED_CHARS:
            raise ChatTemplateError(f"chat template renders more than {MAX_RENDERED_CHARS} characters")
        kept.append(part)
    return "".join(kept)


@functools.cache
def _environment() -> "jinja2.Environment":
    """The Jinja environment of all templates; made once, immutable by use."""
    from jaxserve.text._sandbox import TemplateSandbox

    return TemplateSandbox()
