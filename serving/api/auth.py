"""The API key."""

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.serving.api.errors import APIError

OPEN_PATHS = frozenset({"/health"})


class ApiKeyMiddleware:
    """Answers 401 to every request without `Authorization: Bearer KEY`, /health excepted (/metrics is guarded too).

    Digests are compared, in constant time, so that neither the key's characters nor its length show in the time taken.
    """

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app = app
        self._expected = _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._authorized(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        refusal = APIError(
            401,
            "missing or wrong API key; send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer", "connection": "close"},
        )
        await refusal.response()(scope, receive, send)

    def _authorized(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(
            _digest(key.strip().encode("latin-1")), self._expected
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
