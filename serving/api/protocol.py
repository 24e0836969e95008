"""Request bodies. A field that is not here, or is known and not implemented, is a 400 that names it.

Values are checked strictly (no "1" for 1, no true for 1, no NaN). Ranges of sampling options belong to the engine
(`SamplingParams.validate`); here stand types and the sizes that bound the work done before the engine sees a request.
`null` means the same as leaving a field out.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError

from jaxserve.serving.api.errors import from_validation, invalid


def _described(expected: str) -> WrapValidator:
    """One message for a union, instead of one for each of its members."""

    def check(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("expected", "must be {expected}", {"expected": expected}) from None

    return WrapValidator(check)


Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    _described("a string, a list of strings, a list of token ids, or a list of lists of token ids"),
]
Stop = Annotated[str | list[str], _described("a string or a list of strings")]


class Body(BaseModel):
    """Base of nested objects: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class RequestBody(Body):
    """Base of whole bodies: unknown fields are kept, for `parse` to tell unsupported from unknown."""

    model_config = ConfigDict(extra="allow")

    model: str | None = Field(default=None, max_length=256)


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationBody(RequestBody):
    """What chat and completions share.

    `user` and `safety_identifier` are identifiers for the client's own books; they never change an answer. `cache_salt`
    keeps a prompt's prefix-cache entries apart from those of requests with another salt. `return_token_ids` adds
    `token_ids` to choices, and `prompt_token_ids`: to an answer of chat, to each choice of completions, to the first
    chunk of each choice of a stream.
    """

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: Stop | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    return_token_ids: bool | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None


class CompletionRequest(GenerationBody):
    """POST /v1/completions. `add_special_tokens` false leaves out the BOS that the tokenizer puts before a text."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    add_special_tokens: bool | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    """One turn. The fields below `content` are what the official client sends back of an answer it was given."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[TextPart], _described("a string or a list of parts {type: 'text', text: ...}")]
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def text(self) -> str:
        """The content as one string; parts are joined by line ends."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)

    @property
    def rendered(self) -> dict[str, str]:
        """As chat templates read it; `developer` is the newer name of `system`."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.text}


Messages = Annotated[list[Message], Field(min_length=1)]


class TemplateFields(RequestBody):
    """Options of the chat template, shared by chat and /tokenize."""

    add_generation_prompt: bool | None = None
    chat_template_kwargs: Annotated[dict[str, str | bool | int | float], Field(max_length=16)] | None = None


class ChatRequest(GenerationBody, TemplateFields):
    """POST /v1/chat/completions. `max_completion_tokens` is the newer name of `max_tokens`."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None


class TokenizeRequest(TemplateFields):
    """POST /tokenize of a text (`prompt`) or of a conversation (`messages`)."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestBody):
    """POST /detokenize."""

    tokens: list[int]


# Fields of the OpenAI API and of its common extensions that are not implemented, with the values that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (None,),
    "audio": (None,),
    "bad_words": (None, []),
    "best_of": (None,),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "logits_processors": (None, []),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "parallel_tool_calls": (None,),
    "prediction": (None,),
    "prompt_cache_key": (None,),
    "prompt_cache_options": (None,),
    "prompt_cache_retention": (None,),
    "prompt_logprobs": (None,),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "skip_special_tokens": (None, True),
    "store": (None, False),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
}


def parse[T: RequestBody](kind: type[T], body: bytes) -> T:
    """A body as a checked request; raises APIError that names the first wrong field."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None
    for name, value in (request.model_extra or {}).items():
        _check_extra(name[:64], value, request)
    return request


def _check_extra(name: str, value: Any, request: RequestBody) -> None:
    if name == "best_of" and value == (getattr(request, "n", None) or 1):  # best of n out of n is all of them
        return
    if name not in _NEUTRAL:
        raise invalid(f"unknown field '{name}'", name, "unknown_parameter")
    if not any(type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL[name]):
        raise invalid(f"'{name}' is not supported by this server; leave it out", name, "unsupported_parameter")
