"""Bounds on raw connections, which no well-behaved client meets."""

import dataclasses
import json
import socket
import time

import httpx
import pytest

from jaxserve.serving.api.connection import MAX_HEAD_BYTES, BoundedProtocol
from tests.serving.api.support import LIMITS, Running, Script, serving, wait_for

REQUEST = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


def exchange(server: Running, *pieces: bytes, timeout: float = 5.0) -> tuple[int, dict]:
    """Sends the pieces, reads until the server closes; status and JSON body of the last answer."""
    with socket.create_connection((server.host, server.port), timeout=timeout) as connection:
        for piece in pieces:
            try:
                connection.sendall(piece)
            except (BrokenPipeError, ConnectionResetError):  # it has hung up already
                break
        answer = b""
        try:
            while data := connection.recv(65536):
                answer += data
        except ConnectionResetError:
            pass
    head, _, body = answer.rpartition(b"\r\n\r\n")
    return int(head.rpartition(b"HTTP/1.1 ")[2].split()[0]), json.loads(body)


def check(answer: tuple[int, dict], status: int, code: str) -> None:
    assert answer[0] == status
    assert answer[1]["error"]["code"] == code and set(answer[1]["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "pieces",
    [
        [b"GET /health HTTP/1.1\r\nx: " + b"a" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n"],
        [b"GET /health HTTP/1.1\r\n" + b"".join(b"x-%d: yes\r\n" % i for i in range(8000)) + b"\r\n"],
        [b"GET /health?" + b"a" * (MAX_HEAD_BYTES + 1) + b" HTTP/1.1\r\n\r\n"],
        [b"GET /health HTTP/1.1\r\nx: "] + [b"a" * 1000] * 1000,  # a header without an end
        [b"GET /health HTTP/1.1\r\n"] + [b"x: " + b"a" * 1000 + b"\r\n"] * 1000,  # headers without an end
        [b"GET /" + b"a" * 1000] + [b"a" * 1000] * 1000,
        [REQUEST.replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: ")] + [b"a" * 1000] * 1000,
    ],
)
def test_head_size(server: Running, pieces: list[bytes]):
    """Case 24: request line, headers and trailers."""
    status, _ = answer = exchange(server, *pieces)
    if b"chunked" not in pieces[0]:  # there the answer was given before the trailer came
        check(answer, 431, "headers_too_large")
    assert status in (431, 200)
    assert server.http.get("/health").status_code == 200


def test_large_but_allowed_head(server: Running):
    headers = {f"x-{number}": "a" * 1000 for number in range(25)}
    assert server.http.get("/health", headers=headers).status_code == 200


def test_not_http(server: Running):
    check(exchange(server, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"), 400, "invalid_http")
    check(exchange(server, b"GET / HTTP/9.9 nonsense\r\n\r\n"), 400, "invalid_http")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(BoundedProtocol, "head_timeout", 0.3)
    monkeypatch.setattr(BoundedProtocol, "write_timeout", 0.5)
    with serving(body_timeout=0.3) as server:
        yield server


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET /hea", b"GET /health HTTP/1.1\r\nhost: x\r\n"])
def test_half_open(impatient: Running, sent: bytes):
    """Case 28: a connection that never becomes a request."""
    begin = time.monotonic()
    check(exchange(impatient, sent), 408, "request_timeout")
    assert time.monotonic() - begin > 0.2


def test_half_open_after_a_request(impatient: Running):
    with socket.create_connection((impatient.host, impatient.port), timeout=5) as connection:
        connection.sendall(REQUEST)
        assert b"200 OK" in connection.recv(65536)
        time.sleep(0.6)  # idle between requests: allowed
        connection.sendall(REQUEST)
        assert b"200 OK" in connection.recv(65536)
        connection.sendall(b"GET /hea")
        assert b" 408 " in connection.recv(65536)
        assert connection.recv(65536) == b""


def test_body_that_does_not_come(impatient: Running):
    head = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{"
    check(exchange(impatient, head), 408, "request_timeout")


def test_answers_may_take_longer_than_heads(impatient: Running):
    impatient.engine.script = Script(delay=0.1)
    assert "".join(chunk.choices[0].text for chunk in impatient.complete(stream=True)) == "Hello, world!"


def test_client_that_does_not_read(impatient: Running):
    """Case 28: others keep streaming; the one that reads nothing is cut off and its request cancelled."""
    limits = dataclasses.replace(LIMITS, max_model_len=50_000)
    service = impatient.server._service
    impatient.engine.limits, service.config = limits, dataclasses.replace(service.config, limits=limits)
    impatient.engine.script = Script(reply=lambda request, index: b"a" * 20_000, delay=0.0)
    body = json.dumps({"prompt": "x" * 9, "stream": True, "max_tokens": 20_000, "logprobs": 3}).encode()
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect((impatient.host, impatient.port))
        head = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        deaf.sendall(head % len(body) + body)
        wait_for(lambda: len(impatient.engine.streams) == 1)
        impatient.engine.script = Script()
        assert "".join(chunk.choices[0].text for chunk in impatient.complete(stream=True)) == "Hello, world!"
        wait_for(lambda: service.active == 0, 20)


def test_too_many_connections(server: Running, monkeypatch: pytest.MonkeyPatch):
    with httpx.Client(base_url=server.url) as client:
        client.get("/health")
        open_now = len(server.server.server_state.connections)
        monkeypatch.setattr(BoundedProtocol, "max_connections", open_now)
        check(exchange(server, b""), 503, "overloaded")
        assert client.get("/health").status_code == 200
        monkeypatch.undo()
        assert httpx.get(server.url + "/health").status_code == 200


def test_expect_continue(server: Running):
    body = b'{"prompt": "x"}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-type: application/json\r\n"
    with socket.create_connection((server.host, server.port), timeout=5) as connection:
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body))
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")
