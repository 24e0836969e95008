"""A server process on an artifact: what it must not import or compile, and how it ends."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import openai

import jaxserve

ROOT = pathlib.Path(jaxserve.__file__).parents[1]


@contextlib.contextmanager
def process(report: pathlib.Path, artifact: pathlib.Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process and its address, once it accepts connections."""
    command = [sys.executable, "-m", "tests.e2e.serve_process", str(report), str(artifact), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        watchdog = threading.Timer(300, server.kill)
        watchdog.start()
        try:
            assert server.stderr is not None
            said = ""
            while not (found := re.search(r"is served at (\S+);", said)):
                line = server.stderr.readline()
                assert line, said
                said += line
            yield server, found[1]
        finally:
            server.kill()
            watchdog.cancel()


def test_serves_without_a_compiler_and_drains(sample_artifact: pathlib.Path, tmp_path: pathlib.Path):
    report = tmp_path / "report.json"
    name = json.loads((sample_artifact / "manifest.json").read_text())["model"]["name"]
    with (
        process(report, sample_artifact) as (server, url),
        openai.OpenAI(base_url=url + "/v1", api_key="none") as client,
    ):
        stream = client.chat.completions.create(
            model=name,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=40,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
            stream_options={"include_usage": True},
        )
        chunks = iter(stream)
        text = ""
        while not text:
            text += next(chunks).choices[0].delta.content or ""
        os.kill(server.pid, signal.SIGTERM)
        *rest, usage = chunks
        assert usage.usage is not None and usage.usage.completion_tokens == 40
        assert rest[-1].choices[0].finish_reason == "length"
        assert "Paris" in text + "".join(chunk.choices[0].delta.content or "" for chunk in rest)
        assert server.wait(60) == 0
    found = json.loads(report.read_text())
    assert found["compilations"] == 0
    compiler = ("jaxserve.models", "jaxserve.passes", "jaxserve.compile", "flax")
    assert not [module for module in found["modules"] if module.startswith(compiler)]
    assert "jaxserve.serving.engine" in found["modules"]
