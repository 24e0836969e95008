"""Server-sent events."""

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.serving.api.errors import APIError
from jaxserve.serving.api.generation import Generation, unless_disconnected

DONE = b"data: [DONE]\n\n"


def event(data: Mapping[str, Any]) -> bytes:
    """One event. Everything beyond ASCII is escaped: some clients take U+2028 and the like for line ends."""
    return b"data: " + json.dumps(data, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


class EventStream(Response):
    """Sends chunks as they come, an error event if generation fails, then [DONE]. Frees the generation in any case."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, chunks: AsyncIterator[Mapping[str, Any]]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientDisconnect):
                await unless_disconnected(receive, self._send_all(send))
        finally:
            self._generation.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": event(chunk), "more_body": True})
        except APIError as error:
            await send({"type": "http.response.body", "body": event(error.body), "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})
