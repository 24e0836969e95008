"""The ASGI application: routes, middleware, error handlers."""

import re
import uuid

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import jaxserve
from jaxserve.serving.api import errors
from jaxserve.serving.api.auth import ApiKeyMiddleware
from jaxserve.serving.api.chat import chat_completions
from jaxserve.serving.api.completions import completions
from jaxserve.serving.api.config import ServerConfig
from jaxserve.serving.api.generation import Engine, Service
from jaxserve.serving.api.tokenization import detokenize, tokenize
from jaxserve.serving.metrics import Metrics
from jaxserve.serving.request import EngineClosed, InvalidRequest
from jaxserve.text import Tokenizer

_SAFE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def create_app(
    engine: Engine,
    tokenizer: Tokenizer,
    config: ServerConfig,
    *,
    metrics: Metrics | None = None,
) -> Starlette:
    """The OpenAI-compatible API in front of an engine that is already started.

    metrics: the engine's observer, shown at GET /metrics; without one that route is a 404.
    `app.state.service` is the shared `Service`; setting its `draining` makes /health and new generations answer 503.
    """
    routes = [
        Route("/v1/models", _models, methods=["GET"]),
        Route("/v1/models/{model:path}", _model, methods=["GET"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/health", _health, methods=["GET"]),
        Route("/version", _version, methods=["GET"]),
    ]
    if metrics is not None:
        metrics.attach(engine.stats)
        routes.append(Route("/metrics", _metrics, methods=["GET"]))
    middleware = [Middleware(RequestIdMiddleware)]
    if config.api_key is not None:
        middleware.append(Middleware(ApiKeyMiddleware, api_key=config.api_key))
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            errors.APIError: errors.on_api_error,
            InvalidRequest: errors.on_invalid_request,
            EngineClosed: errors.on_engine_closed,
            ClientDisconnect: errors.on_disconnect,
            HTTPException: errors.on_http_error,
            Exception: errors.on_unexpected,
        },
    )
    app.router.redirect_slashes = False
    app.state.service = Service(engine, tokenizer, config)
    app.state.metrics = metrics
    return app


class RequestIdMiddleware:
    """Gives every request an id (the client's own X-Request-Id when it is a plain one) and returns it in the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if _SAFE_ID.fullmatch(asked) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)


def _card(name: str, service: Service) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "jaxserve",
        "root": service.config.served_model_names[0],
        "max_model_len": service.config.limits.max_model_len,
    }


async def _models(request: Request) -> Response:
    service: Service = request.app.state.service
    cards = [_card(name, service) for name in service.config.served_model_names]
    return JSONResponse({"object": "list", "data": cards})


async def _model(request: Request) -> Response:
    service: Service = request.app.state.service
    return JSONResponse(_card(service.resolve_model(request.path_params["model"]), service))


async def _health(request: Request) -> Response:
    """200 while another request can be taken; 503 when the engine died or hangs, or the server drains."""
    service: Service = request.app.state.service
    if service.healthy:
        return JSONResponse({"status": "ok"})
    status = "draining" if service.draining else "engine not running"
    return JSONResponse({"status": status}, status_code=503)


async def _version(request: Request) -> Response:
    return JSONResponse({"version": jaxserve.__version__})


async def _metrics(request: Request) -> Response:
    page, content_type = request.app.state.metrics.render()
    return Response(page, headers={"content-type": content_type})
