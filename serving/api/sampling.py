"""The one place where request fields become SamplingParams."""

from typing import Any

from jaxserve.serving.api.config import ServerConfig
from jaxserve.serving.api.errors import context_length_exceeded, invalid
from jaxserve.serving.api.protocol import ChatRequest, CompletionRequest, GenerationBody
from jaxserve.serving.request import SamplingParams

COMPLETION_MAX_TOKENS = 16  # the OpenAI API's default for completions; chat's is all the room there is


def completion_params(request: CompletionRequest, prompt_len: int, config: ServerConfig) -> SamplingParams:
    """Of one prompt of a completions request. With `echo`, `logprobs` covers the prompt too."""
    max_tokens = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if request.max_tokens is None:
        max_tokens = min(max_tokens, _room(prompt_len, config))
    return _params(
        request,
        config,
        max_tokens=_checked_length(prompt_len, max_tokens, "prompt", "max_tokens", config),
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
    )


def chat_params(request: ChatRequest, prompt_len: int, config: ServerConfig) -> SamplingParams:
    """Of a chat request."""
    max_tokens, field = request.max_completion_tokens, "max_completion_tokens"
    if max_tokens is None:
        max_tokens, field = request.max_tokens, "max_tokens"
    elif request.max_tokens not in (None, max_tokens):
        raise invalid("max_tokens and max_completion_tokens are two names of one option and differ", "max_tokens")
    if max_tokens is None:
        max_tokens = _room(prompt_len, config)
    if max_tokens < 1:
        raise invalid(f"'{field}' is {max_tokens}, must be at least 1", field)
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("'top_logprobs' needs 'logprobs' to be true", "top_logprobs")
    return _params(
        request,
        config,
        max_tokens=_checked_length(prompt_len, max_tokens, "messages", field, config),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=None,
    )


def check_prompt_length(prompt_len: int, room: int, field: str, config: ServerConfig) -> None:
    """Refuses a prompt that leaves fewer than `room` tokens of the model's length."""
    if prompt_len + room > config.limits.max_model_len:
        raise context_length_exceeded(
            f"the model's length is {config.limits.max_model_len} tokens; the prompt has {prompt_len}"
            + (f" and at least {room} must be generated" if room else ""),
            field,
        )


def _room(prompt_len: int, config: ServerConfig) -> int:
    """The most tokens that can follow a prompt, by the model's length and the KV cache (the last token needs none)."""
    limits = config.limits
    return max(min(limits.max_model_len, limits.num_pages * limits.page_size + 1) - prompt_len, 1)


def _checked_length(prompt_len: int, max_tokens: int, prompt_field: str, field: str, config: ServerConfig) -> int:
    check_prompt_length(prompt_len, 1 if max_tokens else 0, prompt_field, config)
    if prompt_len + max_tokens > config.limits.max_model_len:
        raise context_length_exceeded(
            f"the model's length is {config.limits.max_model_len} tokens; the prompt has {prompt_len} and "
            f"'{field}' asks for {max_tokens} more",
            field,
        )
    return max_tokens


def _params(
    request: GenerationBody, config: ServerConfig, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    if request.stream_options is not None and not request.stream:
        raise invalid("'stream_options' needs 'stream' to be true", "stream_options")
    top_k = _chosen(request.top_k, config, "top_k", 0)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_chosen(request.temperature, config, "temperature", 1.0),
        top_k=0 if top_k == -1 else int(top_k),  # both are in use for "off"
        top_p=_chosen(request.top_p, config, "top_p", 1.0),
        min_p=_chosen(request.min_p, config, "min_p", 0.0),
        seed=request.seed,
        presence_penalty=_chosen(request.presence_penalty, config, "presence_penalty", 0.0),
        frequency_penalty=_chosen(request.frequency_penalty, config, "frequency_penalty", 0.0),
        repetition_penalty=_chosen(request.repetition_penalty, config, "repetition_penalty", 1.0),
        logit_bias=_logit_bias(request.logit_bias or {}),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        min_tokens=request.min_tokens or 0,
        stop=_stop_strings(request.stop),
        stop_token_ids=request.stop_token_ids or (),
        ignore_eos=bool(request.ignore_eos),
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
    )


def _chosen(asked: Any, config: ServerConfig, name: str, otherwise: float) -> float:
    return config.defaults.get(name, otherwise) if asked is None else asked


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _logit_bias(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """Keys are token ids as JSON writes them in an object: decimal strings."""
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise invalid("'logit_bias': keys must be token ids", "logit_bias")
    return tuple((int(key), value) for key, value in bias.items())
