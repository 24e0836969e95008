"""uvicorn's HTTP/1.1 connection with the bounds that it leaves open.

httptools reads heads of any size for any length of time. Here a head is bounded in bytes (431) and in seconds (408), a
client that does not read its answer is cut off, and connections beyond a number are turned away (503), each with an
OpenAI error body.
"""

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from jaxserve.serving.api.errors import APIError, raw_response, unavailable

MAX_HEAD_BYTES = 32 * 1024
MAX_CONNECTIONS = 2048
HEAD_TIMEOUT = 20.0
WRITE_TIMEOUT = 60.0


class _HeadTooLarge(Exception):
    pass


class BoundedProtocol(HttpToolsProtocol):
    """One client connection."""

    max_head_bytes = MAX_HEAD_BYTES
    max_connections = MAX_CONNECTIONS
    head_timeout = HEAD_TIMEOUT
    write_timeout = WRITE_TIMEOUT

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_bytes = 0  # of this message's URL, headers and trailers
        self._unparsed = 0  # received since the parser last reported anything
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(unavailable("too many connections", "overloaded"))
        else:
            self._arm_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm_head_timer()
        self._disarm_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unparsed += len(data)
        if self._head_timer is None and self._idle:
            self._arm_head_timer()
        super().data_received(data)
        if self._unparsed > self.max_head_bytes and not self.transport.is_closing():
            self._refuse(self._too_large())

    def send_400_response(self, msg: str) -> None:
        if self._head_bytes > self.max_head_bytes:
            self._refuse(self._too_large())
        else:
            self._refuse(APIError(400, "this is not a valid HTTP request", code="invalid_http"))

    # Parser callbacks

    def on_message_begin(self) -> None:
        self._unparsed = self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unparsed = 0
        self._disarm_head_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._disarm_head_timer()
        super().on_message_complete()

    def _count(self, size: int) -> None:
        self._unparsed = 0
        self._head_bytes += size
        if self._head_bytes > self.max_head_bytes:
            raise _HeadTooLarge  # httptools turns it into the parser error that uvicorn answers by send_400_response

    @property
    def _idle(self) -> bool:
        """No answer is under way."""
        return self.cycle is None or self.cycle.response_complete

    # Slow clients

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        self._disarm_write_timer()
        super().resume_writing()

    def _arm_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout, self._head_too_slow)

    def _disarm_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _disarm_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _head_too_slow(self) -> None:
        self._refuse(APIError(408, f"no complete request within {self.head_timeout:g} seconds", code="request_timeout"))

    def _too_large(self) -> APIError:
        message = f"request line and headers are larger than the limit of {self.max_head_bytes} bytes"
        return APIError(431, message, code="headers_too_large")

    def _refuse(self, error: APIError) -> None:
        """Answers what never became a request, unless an earlier request's answer is under way, and hangs up."""
        self._disarm_head_timer()
        if not self.transport.is_closing():
            if self._idle:
                self.transport.write(raw_response(error))
            self.transport.close()
