"""POST /v1/completions."""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxserve.serving.api.generation import Generation, Service, read_body, unless_disconnected
from jaxserve.serving.api.logprobs import CompletionLogprobs
from jaxserve.serving.api.prompts import PromptTokens, completion_prompts
from jaxserve.serving.api.protocol import CompletionRequest, parse
from jaxserve.serving.api.sampling import completion_params
from jaxserve.serving.api.streaming import EventStream
from jaxserve.serving.request import GenerationRequest, Output, TokenLogprob
from jaxserve.text import Tokenizer


async def completions(request: Request) -> Response:
    """Completes one or many prompts, streaming or not."""
    service: Service = request.app.state.service
    service.check_admission()
    body = parse(CompletionRequest, await read_body(request, service.config))
    model = service.resolve_model(body.model)
    special = body.add_special_tokens is not False
    prompts = await completion_prompts(body.prompt, service.tokenizer, service.config, special=special)
    identity = f"cmpl-{uuid.uuid4().hex}"
    generation = service.start(
        [
            GenerationRequest(
                request_id=f"{identity}-{index}",
                prompt_ids=prompt.ids,
                params=completion_params(body, len(prompt.ids), service.config),
                n=body.n or 1,
                extras=(body.cache_salt or "").encode(),
            )
            for index, prompt in enumerate(prompts)
        ]
    )
    head = {"id": identity, "object": "text_completion", "created": int(time.time()), "model": model}
    writer = CompletionWriter(body, prompts, service.tokenizer)
    if body.stream:
        return EventStream(generation, _chunks(head, generation, writer, body))
    try:
        whole = await unless_disconnected(request.receive, generation.collect())
        choices = [choice for prompt, output in whole for choice in writer.choices(prompt, output)]
        return JSONResponse({**head, "choices": choices, "usage": generation.usage()})
    finally:
        generation.close()


async def _chunks(
    head: dict[str, Any], generation: Generation, writer: "CompletionWriter", body: CompletionRequest
) -> AsyncIterator[dict[str, Any]]:
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    head = {**head, "usage": None} if include_usage else head
    async for prompt, output in generation.outputs():
        choices = writer.choices(prompt, output)
        if choices:
            yield {**head, "choices": choices}
    if include_usage:
        yield {**head, "choices": [], "usage": generation.usage()}


class CompletionWriter:
    """Turns outputs into `choices` entries; the same for a stream's pieces and for whole outputs.

    With `echo` the first piece of a choice begins with its prompt. The prompt's log-probabilities come with choice 0
    only: pieces of other choices that are faster wait for them.
    """

    def __init__(self, body: CompletionRequest, prompts: Sequence[PromptTokens], tokenizer: Tokenizer) -> None:
        self._body = body
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._choices: dict[tuple[int, int], CompletionLogprobs] = {}  # of the choices that were begun
        self._scores: dict[int, list[TokenLogprob]] = {}
        self._held: dict[int, list[Output]] = {}

    def choices(self, prompt: int, output: Output) -> list[dict[str, Any]]:
        """The entries that can be written now: none, this one, or this one and those that waited for it."""
        outputs = [output]
        if self._body.echo and self._body.logprobs is not None and prompt not in self._scores:
            if output.prompt_logprobs is None:
                self._held.setdefault(prompt, []).append(output)
                return []
            self._scores[prompt] = output.prompt_logprobs
            outputs += self._held.pop(prompt, [])
        return [entry for output in outputs if (entry := self._entry(prompt, output))]

    def _entry(self, prompt: int, output: Output) -> dict[str, Any] | None:
        logprobs = self._choices.get((prompt, output.index))
        first = logprobs is None
        text = self._echo_text(prompt) if first else ""
        if logprobs is None:
            logprobs = self._choices[prompt, output.index] = CompletionLogprobs(self._tokenizer, len(text))
        elif not (output.text or output.logprobs or output.finish_reason or self._body.return_token_ids):
            return None
        return {
            "index": prompt * (self._body.n or 1) + output.index,
            "text": text + output.text,
            "logprobs": self._logprobs(prompt, output, logprobs, first),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        } | (self._ids(prompt, output, first) if self._body.return_token_ids else {})

    def _logprobs(
        self, prompt: int, output: Output, logprobs: CompletionLogprobs, first: bool
    ) -> dict[str, list[Any]] | None:
        if self._body.logprobs is None:
            return None
        piece = logprobs.piece(output.logprobs or [])
        if first and self._body.echo:
            echoed = CompletionLogprobs(self._tokenizer, continuation=False).piece(self._scores[prompt])
            piece = {name: echoed[name] + values for name, values in piece.items()}
        return piece

    def _ids(self, prompt: int, output: Output, first: bool) -> dict[str, Any]:
        return {"token_ids": output.token_ids} | ({"prompt_token_ids": self._prompts[prompt].ids} if first else {})

    def _echo_text(self, prompt: int) -> str:
        if not self._body.echo:
            return ""
        tokens = self._prompts[prompt]
        return self._tokenizer.decode(list(tokens.ids)) if tokens.text is None else tokens.text
