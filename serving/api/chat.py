"""POST /v1/chat/completions."""

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxserve.serving.api.generation import Generation, Service, read_body, unless_disconnected
from jaxserve.serving.api.logprobs import chat_logprobs
from jaxserve.serving.api.prompts import PromptTokens, chat_prompt
from jaxserve.serving.api.protocol import ChatRequest, parse
from jaxserve.serving.api.sampling import chat_params
from jaxserve.serving.api.streaming import EventStream
from jaxserve.serving.request import GenerationRequest, InvalidRequest, Output
from jaxserve.text import Tokenizer

_CHAT_NAMES = {"prompt": "messages", "logprobs": "top_logprobs"}  # what chat calls the engine's fields


async def chat_completions(request: Request) -> Response:
    """Answers a conversation, streaming or not."""
    service: Service = request.app.state.service
    service.check_admission()
    body = parse(ChatRequest, await read_body(request, service.config))
    model = service.resolve_model(body.model)
    prompt = await chat_prompt(body.messages, body, service.tokenizer, service.config)
    identity = f"chatcmpl-{uuid.uuid4().hex}"
    asked = GenerationRequest(
        request_id=identity,
        prompt_ids=prompt.ids,
        params=chat_params(body, len(prompt.ids), service.config),
        n=body.n or 1,
        extras=(body.cache_salt or "").encode(),
    )
    try:
        generation = service.start([asked])
    except InvalidRequest as error:
        raise InvalidRequest(_CHAT_NAMES.get(error.param, error.param), error.message) from None
    head = {"id": identity, "created": int(time.time()), "model": model}
    if body.stream:
        chunks = _chunks({**head, "object": "chat.completion.chunk"}, generation, body, prompt, service.tokenizer)
        return EventStream(generation, chunks)
    try:
        whole = await unless_disconnected(request.receive, generation.collect())
        choices = [_choice(output, body, service.tokenizer) for _, output in whole]
        answer = {**head, "object": "chat.completion", "choices": choices, "usage": generation.usage()}
        if body.return_token_ids:
            answer["prompt_token_ids"] = prompt.ids
        return JSONResponse(answer)
    finally:
        generation.close()


def _choice(output: Output, body: ChatRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    message = {"role": "assistant", "content": output.text, "refusal": None}
    return {"index": output.index, "message": message} | _common(output, body, tokenizer)


def _common(output: Output, body: ChatRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """What a choice and a piece of one share."""
    entry = {
        "logprobs": chat_logprobs(output.logprobs or [], tokenizer) if body.logprobs else None,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    return entry | ({"token_ids": output.token_ids} if body.return_token_ids else {})


async def _chunks(
    head: dict[str, Any], generation: Generation, body: ChatRequest, prompt: PromptTokens, tokenizer: Tokenizer
) -> AsyncIterator[dict[str, Any]]:
    """A chunk that names the role before the first piece of each choice, then the pieces, then usage when asked for."""
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    head = {**head, "usage": None} if include_usage else head
    started: set[int] = set()
    async for _, output in generation.outputs():
        if output.index not in started:
            started.add(output.index)
            opening = {"index": output.index, "delta": {"role": "assistant", "content": ""}}
            ids = {"prompt_token_ids": prompt.ids} if body.return_token_ids else {}
            yield {**head, "choices": [opening | {"logprobs": None, "finish_reason": None}]} | ids
        if output.text or output.logprobs or output.finish_reason or (body.return_token_ids and output.token_ids):
            delta = {"content": output.text} if output.text else {}
            yield {**head, "choices": [{"index": output.index, "delta": delta} | _common(output, body, tokenizer)]}
    if include_usage:
        yield {**head, "choices": [], "usage": generation.usage()}
