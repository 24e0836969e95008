"""Clients that leave, engines that die, servers that drain, many users at once."""

import asyncio
import contextlib
import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import openai
import pytest

import jaxserve
from jaxserve.errors import UserError
from jaxserve.serving.server import listen
from tests.serving.api.support import Running, Script, error_of, events, serving, wait_for

CHAT = {"messages": [{"role": "user", "content": "x"}]}
SLOW = Script(reply=lambda request, index: b"word " * 60, delay=0.1)


def active(server: Running) -> int:
    return server.server._service.active


@pytest.mark.parametrize("body", [{"prompt": "x"}, {"prompt": ["x", "y"], "n": 2}])
def test_disconnect_while_streaming(server: Running, body: dict):
    """Case 17."""
    server.engine.script = SLOW
    started = len(server.engine.streams)
    with httpx.stream("POST", server.url + "/v1/completions", json=body | {"stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        assert server.engine.running == (2 if "n" in body else 1)
    wait_for(lambda: server.engine.running == 0 and active(server) == 0, 1.0)
    assert all(stream.cancelled for stream in server.engine.streams[started:])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
def test_disconnect_before_the_first_token(server: Running, prompt, stream: bool):
    """Case 17: streaming or not, nothing has been written yet."""
    server.engine.script = Script(delay=30.0)
    connection = http.client.HTTPConnection(server.host, server.port)
    body = json.dumps({"prompt": prompt, "stream": stream})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    wait_for(lambda: server.engine.running == (2 if isinstance(prompt, list) else 1))
    connection.close()
    wait_for(lambda: server.engine.running == 0 and active(server) == 0, 1.0)
    assert server.engine.streams[-1].cancelled


def test_finished_requests_leave_nothing(server: Running):
    server.chat(n=2)
    list(server.complete(["a", "b"], stream=True))
    server.post("/v1/completions", {"prompt": "x", "top_p": 7})
    wait_for(lambda: active(server) == 0)
    assert server.engine.running == 0


def test_health_of_a_dead_engine(server: Running):
    """Case 21."""
    assert server.http.get("/health").json() == {"status": "ok"}
    server.engine.healthy = False
    assert server.http.get("/health").status_code == 503
    error = error_of(server.post("/v1/chat/completions", CHAT), 503, None, "engine_unavailable")
    assert error["type"] == "server_error"
    server.engine.healthy = True
    assert server.http.get("/health").status_code == 200


def test_closed_engine(server: Running):
    server.engine.closed = True
    try:
        response = server.post("/v1/chat/completions", CHAT)
        error_of(response, 503, None, "engine_unavailable")
        assert response.headers["retry-after"] == "1"
    finally:
        server.engine.closed = False


def test_overload():
    with serving(script=SLOW, max_active=1) as server:
        with server.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}):
            with pytest.raises(openai.InternalServerError) as caught:
                server.chat()
            assert caught.value.status_code == 503 and caught.value.code == "overloaded"
        wait_for(lambda: active(server) == 0)
        server.engine.script = Script()
        assert server.chat().choices[0].message.content == "Hello, world!"


def test_many_streams_at_once():
    """64 users and more, each gets its own text."""

    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(model="tiny", prompt=f"user {number}", stream=True, max_tokens=100)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def everyone(server: Running) -> list[str]:
        async with server.async_client() as client:
            return await asyncio.gather(*(one(client, number) for number in range(96)))

    script = Script(reply=lambda request, index: bytes(request.prompt_ids) * 3, delay=0.002)
    with serving(script=script) as server:
        assert asyncio.run(everyone(server)) == [f"user {number}" * 3 for number in range(96)]


def test_500_connections(server: Running):
    """Case 28: idle and half-open sockets keep nobody from streaming."""
    with contextlib.ExitStack() as stack:
        idle = [socket.create_connection((server.host, server.port), timeout=5) for _ in range(500)]
        for number, each in enumerate(idle):
            stack.enter_context(each)
            if number % 2:
                each.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-le")
        assert "".join(chunk.choices[0].text for chunk in server.complete(stream=True)) == "Hello, world!"
        assert server.http.get("/health").status_code == 200
        for each in idle:  # nobody was let in by closing those before
            each.setblocking(False)
            with pytest.raises(BlockingIOError):
                each.recv(1)


def test_drain():
    """Case 28: a drain refuses new work, finishes what runs, stops the engine and ends."""
    script = Script(reply=lambda request, index: b"word " * 10, delay=0.02)
    with serving(script=script) as server:
        text = []
        with server.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 90}) as r:
            lines = (line for line in r.iter_lines() if line)
            text.append(next(lines))
            server.server.begin_drain()
            with httpx.Client(base_url=server.url) as other:
                assert other.get("/health").status_code == 503
                error_of(other.post("/v1/chat/completions", json=CHAT), 503, None, "shutting_down")
                assert other.get("/v1/models").status_code == 200
            text += lines
        pieces = [json.loads(event)["choices"][0]["text"] for event in events("\n\n".join(text))[:-1]]
        assert "".join(pieces) == "word " * 10 and text[-1] == "data: [DONE]"
        server.thread.join(5)
        assert not server.thread.is_alive() and server.engine.stopped


def test_drain_is_bounded():
    script = Script(reply=lambda request, index: b"word " * 90, delay=0.2)
    with serving(script=script, drain_timeout=0.5) as server:
        with server.http.stream(
            "POST", "/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 400}
        ) as r:
            server.server.begin_drain()
            *_, failure, done = events(r.read().decode())
        assert json.loads(failure)["error"]["code"] == "aborted" and done == "[DONE]"
        server.thread.join(5)
        assert not server.thread.is_alive()


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_and_exits_zero(sig: int):
    """Case 28, as a process."""
    root = pathlib.Path(jaxserve.__file__).parents[1]
    command = [sys.executable, "-W", "error", "-m", "tests.serving.api.process"]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(30, process.kill)
        watchdog.start()
        assert process.stdout is not None and process.stderr is not None
        port = int(process.stdout.readline())
        url = f"http://127.0.0.1:{port}"
        with httpx.stream(
            "POST", url + "/v1/completions", json={"prompt": "x", "stream": True}, timeout=20
        ) as response:
            lines = response.iter_lines()
            first = next(lines)
            os.kill(process.pid, sig)
            time.sleep(0.2)
            assert httpx.get(url + "/health").status_code == 503
            rest = [first, *(line for line in lines if line)]
        assert rest[-1] == "data: [DONE]" and len(rest) == 17
        assert process.wait(10) == 0
        assert process.stderr.read() == ""
        watchdog.cancel()


def test_address_in_use(server: Running):
    with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{server.port}: Address already in use"):
        listen("127.0.0.1", server.port)
    with pytest.raises(UserError, match="0 to 65535"):
        listen("127.0.0.1", 70000)
