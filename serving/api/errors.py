"""Failures as HTTP responses: one exception, one body shape (`{"error": {message, type, param, code}}`).

What a client reads is written here or in the code that refused its request. Exceptions nobody expected become a generic
500 that carries the request's id and nothing of the exception; the log has the rest under the same id.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxserve.serving.request import EngineClosed, InvalidRequest

logger = logging.getLogger("jaxserve.serving.api")

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


class APIError(Exception):
    """A refusal or failure with everything the client is told about it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        kind = INVALID_REQUEST if self.status < 500 else SERVER_ERROR
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole HTTP response."""
        return JSONResponse(self.body, status_code=self.status, headers=self.headers)


def invalid(message: str, param: str | None, code: str = "invalid_value") -> APIError:
    """400: the named field cannot be honoured."""
    return APIError(400, message, param=param, code=code)


def context_length_exceeded(message: str, param: str) -> APIError:
    """400 with the code by which clients recognise a prompt that is too long."""
    return invalid(message, param, "context_length_exceeded")


def too_large(limit: int) -> APIError:
    """413; the connection closes because the rest of the body is not read."""
    message = f"request body is larger than the limit of {limit} bytes"
    return APIError(413, message, code="request_too_large", headers={"connection": "close"})


def unavailable(message: str, code: str) -> APIError:
    """503 that asks the client to come back."""
    return APIError(503, message, code=code, headers={"retry-after": "1"})


def internal_error(request_id: str) -> APIError:
    """500 that says nothing but where to look in the log."""
    return APIError(
        500,
        f"internal error; the server's log has the details under request id {request_id}",
        code="internal_error",
        headers={"x-request-id": request_id},
    )


def raw_response(error: APIError) -> bytes:
    """An HTTP/1.1 response for connections that never became a request; the connection closes after it."""
    reason = {
        400: b"Bad Request",
        408: b"Request Timeout",
        431: b"Request Header Fields Too Large",
        503: b"Service Unavailable",
    }
    body = json.dumps(error.body).encode()
    head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    return head % (error.status, reason[error.status], len(body)) + body


def field_path(location: tuple[int | str, ...]) -> str | None:
    """A pydantic location as clients write it: ('messages', 0, 'content') is `messages[0].content`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or None


def from_validation(error: ValidationError) -> APIError:
    """The first thing wrong with a body, as a 400 that names its field. The value itself is not echoed."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = field_path(first["loc"])
    if first["type"] == "json_invalid":
        return APIError(400, f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    if first["type"] == "missing":
        return invalid(f"missing required field '{param}'", param, "missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return invalid(f"unknown field '{param}'", param, "unknown_parameter")
    if param is None:
        return invalid(f"the body must be a JSON object: {first['msg']}", None)
    return invalid(f"'{param}': {first['msg']}", param)


async def on_api_error(request: Request, error: Exception) -> Response:
    """Starlette handler of APIError."""
    assert isinstance(error, APIError)
    return error.response()


async def on_invalid_request(request: Request, error: Exception) -> Response:
    """Starlette handler of what the engine refuses at submission."""
    assert isinstance(error, InvalidRequest)
    return invalid(str(error), error.param).response()


async def on_engine_closed(request: Request, error: Exception) -> Response:
    """Starlette handler of a submission to an engine that takes no more."""
    assert isinstance(error, EngineClosed)
    return unavailable(
        "the engine takes no requests: it is shutting down or has failed", "engine_unavailable"
    ).response()


async def on_disconnect(request: Request, error: Exception) -> Response:
    """Starlette handler of a client that left: nobody reads this answer."""
    return Response(status_code=499)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Starlette handler of the router's own errors (404, 405)."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        answer = APIError(404, f"no such route: {request.method} {request.url.path[:200]}", code="unknown_url")
    elif error.status_code == 405:
        answer = APIError(
            405, f"{request.method} is not allowed here", code="method_not_allowed", headers=error.headers
        )
    else:
        answer = APIError(error.status_code, error.detail, headers=error.headers)
    return answer.response()


async def on_unexpected(request: Request, error: Exception) -> Response:
    """Starlette handler of everything else; the exception goes on to the ASGI server, which logs its traceback."""
    request_id = request.scope["state"]["request_id"]
    logger.error("request %s failed: %s", request_id, type(error).__name__)
    return internal_error(request_id).response()
