"""POST /tokenize and /detokenize, in the shapes vLLM gave them."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxserve.serving.api.errors import invalid
from jaxserve.serving.api.generation import Service, read_body
from jaxserve.serving.api.logprobs import token_label
from jaxserve.serving.api.prompts import chat_prompt, checked_ids, off_loop
from jaxserve.serving.api.protocol import DetokenizeRequest, TokenizeRequest, parse


async def tokenize(request: Request) -> Response:
    """The ids of a text (`prompt`), or of a conversation (`messages`) as the chat template writes it."""
    service: Service = request.app.state.service
    body = parse(TokenizeRequest, await read_body(request, service.config))
    service.resolve_model(body.model)
    tokenizer = service.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give either 'prompt' or 'messages'", "prompt")
    if body.messages is not None:
        ids = list((await chat_prompt(body.messages, body, tokenizer, service.config)).ids)
    else:
        encode = tokenizer.encode if body.add_special_tokens is False else tokenizer.encode_prompt
        text = body.prompt or ""
        ids = await off_loop(len(text), lambda: encode(text))
    strings = [token_label(tokenizer.token_bytes(token)) for token in ids] if body.return_token_strs else None
    limit = service.config.limits.max_model_len
    return JSONResponse({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})


async def detokenize(request: Request) -> Response:
    """The text of ids, special tokens written out."""
    service: Service = request.app.state.service
    body = parse(DetokenizeRequest, await read_body(request, service.config))
    service.resolve_model(body.model)
    ids = list(checked_ids(body.tokens, "tokens", service.config))
    text = await off_loop(len(ids), lambda: service.tokenizer.decode(ids, skip_special=False))
    return JSONResponse({"prompt": text})
