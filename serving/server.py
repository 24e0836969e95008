"""Runs the ASGI application on uvicorn until a signal, then drains."""

import asyncio
import contextlib
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.applications import Starlette

from jaxserve.errors import UserError
from jaxserve.serving.api.connection import MAX_CONNECTIONS, BoundedProtocol

KEEP_ALIVE = 30  # seconds an idle connection stays open; longer than clients' own pools pause between requests
BACKLOG = 2048
FLUSH_TIMEOUT = 3  # seconds for the last bytes of answers once generation has ended

Ready = Callable[[str, int], None]


class Stoppable(Protocol):
    """What is stopped after the last answer."""

    def stop(self) -> None: ...


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Clients wait in its backlog until it is served.

    Raises UserError when the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(BACKLOG)  # only this finds out another server that is just starting
    except OSError as error:
        bound.close()
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose others with --host and --port"
        ) from None
    except OverflowError:
        bound.close()
        raise UserError(f"cannot listen on port {port}: a port is a number from 0 to 65535") from None
    return bound


def serve_app(
    app: Starlette,
    engine: Stoppable,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    drain_timeout: float = 30.0,
    on_ready: Ready | None = None,
    sockets: list[socket.socket] | None = None,
) -> None:
    """Serves `create_app(...)` until SIGTERM or SIGINT, then returns.

    The signal starts a drain: /health and new generations answer 503, running ones finish, for at most `drain_timeout`
    seconds (a second signal ends the wait). Then the engine is stopped, which ends what still runs with an error.
    on_ready(host, port) is called once connections are accepted. `sockets`, from `listen`, replace host and port.
    """
    _raise_file_limit()
    bound = sockets or [listen(host, port)]
    Server(app, engine, drain_timeout, on_ready).run(sockets=bound)


class Server(uvicorn.Server):
    """uvicorn's server with a drain before its shutdown. In a thread it takes no signals: call `begin_drain`."""

    def __init__(
        self, app: Starlette, engine: Stoppable, drain_timeout: float = 30.0, on_ready: Ready | None = None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=FLUSH_TIMEOUT,
            )
        )
        self._service = app.state.service
        self._engine = engine
        self._drain_timeout = drain_timeout
        self._drain_until: float | None = None
        self._on_ready = on_ready

    def begin_drain(self) -> None:
        """First call: refuse new generations, wait for the running ones. Second: wait no longer. From any thread."""
        self._service.draining = True
        self._drain_until = time.monotonic() + (self._drain_timeout if self._drain_until is None else 0)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_ready is not None:
            address = self.servers[0].sockets[0].getsockname()
            self._on_ready(address[0], address[1])

    async def on_tick(self, counter: int) -> bool:
        stopping = await super().on_tick(counter)
        if self._drain_until is not None:
            stopping |= self._service.active == 0 or time.monotonic() >= self._drain_until
        if stopping:
            self._service.draining = True
            await asyncio.to_thread(self._engine.stop)
        return stopping

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.begin_drain()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a signal that was obeyed is not raised again: the process exits with code 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {each: signal.signal(each, self.handle_exit) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in previous.items():
                signal.signal(each, handler)


def _raise_file_limit() -> None:
    """Room for every connection the server admits; many systems start processes with 1024 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + 512
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
