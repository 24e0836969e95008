"""Systems under test: our server, llama.cpp's, and OpenVINO GenAI, each a process that answers the same requests.

Every process inherits the cores that this one may use and is told to use as many threads.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from jaxserve.bench.load import Answers, Load, Timing, run_load
from jaxserve.errors import UserError

START = 120.0  # seconds that a server may take to be ready


class System(Protocol):
    """Something that answers prompts of token ids."""

    def run(self, load: Load, prompts: Sequence[Sequence[int]]) -> Answers: ...


class HttpServer:
    """An OpenAI-compatible server that runs already."""

    def __init__(self, url: str, model: str):
        self.url, self.model = url.rstrip("/"), model

    def run(self, load: Load, prompts: Sequence[Sequence[int]]) -> Answers:
        return run_load(self.url, self.model, load, prompts)


@contextlib.contextmanager
def our_server(artifact: pathlib.Path) -> Iterator[HttpServer]:
    """`jaxserve serve ARTIFACT` on a free port."""
    port = free_port()
    command = [sys.executable, "-m", "jaxserve.cli", "serve", str(artifact), "--port", str(port)]
    with _server("jaxserve serve", [*command, "--served-model-name", "bench", "--no-prefix-caching"], port) as server:
        yield server


@contextlib.contextmanager
def llama_server(binary: str, gguf: pathlib.Path, load: Load) -> Iterator[HttpServer]:
    """llama.cpp's server, with a slot for every request that may be in flight."""
    found = shutil.which(binary)
    if found is None:
        raise UserError(f"--llama-server {binary}: there is no such program; build it from llama.cpp's sources")
    port, slots = free_port(), load.concurrency or load.requests
    room = slots * (load.prompt + load.output + 16)
    command = [found, "-m", str(gguf), "--port", str(port), "-np", str(slots), "-c", str(room), "-t", str(cores())]
    with _server("llama-server", command, port) as server:
        yield server


@contextlib.contextmanager
def _server(name: str, command: Sequence[str], port: int) -> Iterator[HttpServer]:
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _wait(name, process, f"http://127.0.0.1:{port}/health", log)
            yield HttpServer(f"http://127.0.0.1:{port}", "bench")
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(name: str, process: subprocess.Popen[bytes], url: str, log: Any) -> None:
    deadline = time.monotonic() + START
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=5) as response:
            if response.status == 200:
                return
        time.sleep(0.1)
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
    raise UserError(f"{name} did not start: {lines[-1][:300]}")


@contextlib.contextmanager
def openvino(python: str, gguf: pathlib.Path) -> Iterator["OpenVino"]:
    """OpenVINO GenAI in a process of its own, in an environment that has it."""
    script = pathlib.Path(__file__).with_name("openvino_process.py")
    if python == sys.executable and importlib.util.find_spec("openvino_genai") is None:
        raise UserError("--against openvino: pip install openvino-genai, or name an environment with --openvino-python")
    try:
        process = subprocess.Popen(
            [python, str(script), str(gguf)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    except OSError as error:
        raise UserError(f"--openvino-python {python}: {error.strerror}") from None
    with process:
        try:
            yield OpenVino(process)
        finally:
            process.kill()


class OpenVino:
    """Batches of prompts through `LLMPipeline.generate`: there are no arrivals and no single tokens to time."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process

    def run(self, load: Load, prompts: Sequence[Sequence[int]]) -> Answers:
        """Batches of `concurrency` prompts, one after the other."""
        size, timings, total = load.concurrency or len(prompts), [], 0.0
        for first in range(0, len(prompts), size):
            batch = prompts[first : first + size]
            assert self._process.stdin is not None and self._process.stdout is not None
            request = {"prompts": batch, "output": load.output, "sampling": dict(load.sampling)}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            if not line:
                raise UserError(f"OpenVINO GenAI ended with code {self._process.wait()}")
            answer = json.loads(line)
            start, ends = total, total + answer["seconds"]
            for prompt, tokens in zip(batch, answer["tokens"], strict=True):
                timings.append(Timing(start, len(prompt), [start + answer["first"], ends], tokens))
            total = ends
        return Answers(timings, total)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
