"""Log-probabilities in the two schemas of the OpenAI API: chat's list of tokens, and completions' parallel lists."""

from collections.abc import Sequence
from typing import Any

from jaxserve.serving.request import TokenLogprob
from jaxserve.text import StreamDecoder, Tokenizer

FLOOR = -9999.0  # JSON has no infinity


def chat_logprobs(tokens: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer. `bytes` are exact, also where a token is a part of a character."""
    content = []
    for token in tokens:
        top = [_chat_token(token_id, logprob, tokenizer) for token_id, logprob in token.top]
        content.append({**_chat_token(token.id, token.logprob, tokenizer), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(token: int, logprob: float | None, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": token_label(data), "logprob": _finite(logprob), "bytes": list(data)}


class CompletionLogprobs:
    """`choices[].logprobs` of completions, piece by piece for one choice.

    `text_offset` counts the characters of the choice's text that were complete before the token.
    continuation: the tokens follow a prompt; False for the prompt itself.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int = 0, *, continuation: bool = True) -> None:
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer, continuation=continuation)
        self._offset = offset

    def piece(self, tokens: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        """The lists for the next tokens. `top_logprobs` includes the chosen token; a prompt's first token has null."""
        piece: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            label = self._label(token.id)
            piece["tokens"].append(label)
            piece["text_offset"].append(self._offset)
            self._offset += len(self._decoder.push([token.id]))
            if token.logprob is None:
                piece["token_logprobs"].append(None)
                piece["top_logprobs"].append(None)
            else:
                top = {self._label(token_id): _finite(logprob) for token_id, logprob in token.top}
                piece["token_logprobs"].append(_finite(token.logprob))
                piece["top_logprobs"].append({label: _finite(token.logprob)} | top)
        return piece

    def _label(self, token: int) -> str:
        return token_label(self._tokenizer.token_bytes(token))


def token_label(data: bytes) -> str:
    """A token as text; a part of a character as `bytes:\\xf0\\x9f`, so that different tokens stay different."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, FLOOR)
