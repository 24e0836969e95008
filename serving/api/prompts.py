"""Prompts as token ids: texts through the tokenizer, conversations through the chat template, ids checked.

Tokenizing a long text takes many milliseconds; it happens in a worker thread, so that the streams of others go on.
"""

import asyncio
import dataclasses
import re
from collections.abc import Callable
from typing import Any, cast

from jaxserve.serving.api.config import ServerConfig
from jaxserve.serving.api.errors import invalid
from jaxserve.serving.api.protocol import Message, TemplateFields
from jaxserve.text import ChatTemplateError, Tokenizer

INLINE_CHARACTERS = 2048  # shorter texts tokenize faster than a thread is woken
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of Python objects, as their reprs tell it
_RESERVED_KWARGS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"})


@dataclasses.dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt's ids, and its text when it came as one."""

    ids: tuple[int, ...]
    text: str | None = None


async def completion_prompts(
    prompt: str | list[str] | list[int] | list[list[int]],
    tokenizer: Tokenizer,
    config: ServerConfig,
    *,
    special: bool = True,
) -> list[PromptTokens]:
    """The prompts of a completions request, in order; `special` puts the BOS before texts if the tokenizer does."""
    if isinstance(prompt, str):
        prompts: list[str] | list[list[int]] = [prompt]
    elif prompt and isinstance(prompt[0], int):
        prompts = [cast("list[int]", prompt)]
    else:
        prompts = cast("list[str] | list[list[int]]", prompt)
    if not prompts:
        raise invalid("'prompt' is an empty list", "prompt")
    if len(prompts) > config.max_prompts:
        raise invalid(f"'prompt' holds {len(prompts)} prompts, at most {config.max_prompts} are allowed", "prompt")
    encode = tokenizer.encode_prompt if special else tokenizer.encode

    def as_tokens(item: str | list[int]) -> PromptTokens:
        if isinstance(item, str):
            return PromptTokens(tuple(encode(item)), item)
        return PromptTokens(checked_ids(item, "prompt", config))

    tokens = await off_loop(sum(map(len, prompts)), lambda: [as_tokens(item) for item in prompts])
    if not all(prompt.ids for prompt in tokens):
        raise invalid("'prompt' is empty: it must hold at least one token", "prompt")
    return tokens


async def chat_prompt(
    messages: list[Message], options: TemplateFields, tokenizer: Tokenizer, config: ServerConfig
) -> PromptTokens:
    """A conversation as the model's own chat template writes it (a request cannot bring a template)."""
    template = tokenizer.chat_template
    if template is None:
        raise invalid("this model has no chat template; use /v1/completions", "messages")
    if len(messages) > config.max_messages:
        reason = f"'messages' holds {len(messages)} messages, at most {config.max_messages} are allowed"
        raise invalid(reason, "messages")
    kwargs: dict[str, Any] = dict(options.chat_template_kwargs or {})
    if reserved := sorted(_RESERVED_KWARGS & kwargs.keys()):
        raise invalid(f"'chat_template_kwargs' may not set {', '.join(reserved)}", "chat_template_kwargs")
    generate = options.add_generation_prompt is not False

    def tokens() -> PromptTokens:
        turns = [message.rendered for message in messages]
        text = template.render(turns, add_generation_prompt=generate, **kwargs)
        return PromptTokens(tuple(tokenizer.encode(text, special=True)), text)

    try:
        prompt = await off_loop(sum(len(message.text) for message in messages), tokens)
    except ChatTemplateError as error:
        reason = _ADDRESS.sub("", error.message)
        raise invalid(f"the model's chat template refuses these messages: {reason}", "messages") from None
    if not prompt.ids:
        raise invalid("'messages' render to an empty prompt", "messages")
    return prompt


def checked_ids(ids: list[int], field: str, config: ServerConfig) -> tuple[int, ...]:
    """The ids, all inside the vocabulary."""
    vocab_size = config.limits.vocab_size
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise invalid(f"'{field}': token id {wrong} is outside the vocabulary of {vocab_size}", field)
    return tuple(ids)


async def off_loop[T](size: int, work: Callable[[], T]) -> T:
    """work(), in a thread when it handles so many characters that the event loop would stall."""
    return work() if size <= INLINE_CHARACTERS else await asyncio.to_thread(work)
