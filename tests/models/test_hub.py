"""Downloading from the Hub, against a stand-in that speaks the part of its protocol that a snapshot needs."""

import hashlib
import http.server
import json
import threading

import numpy as np
import pytest

from jaxserve.errors import UserError
from jaxserve.models import resolve as resolving
from jaxserve.models.hub import fetch_snapshot, is_hub_id
from jaxserve.models.resolve import resolve
from jaxserve.models.safetensors_reader import HFCheckpoint

REVISION = "a" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves repositories given as {name: {file: bytes}}, and remembers which files were asked for."""

    repositories: dict[str, dict[str, bytes]]
    asked: list[str]

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0].strip("/")
        for name, files in self.repositories.items():
            if path == f"api/models/{name}/revision/main":
                return self.reply_json({"id": name, "sha": REVISION, "siblings": [{"rfilename": f} for f in files]})
            if path == f"api/models/{name}/tree/{REVISION}":
                return self.reply_json(
                    [{"type": "file", "path": f, "size": len(data), "oid": etag(data)} for f, data in files.items()]
                )
            file = path.removeprefix(f"{name}/resolve/{REVISION}/")
            if file in files:
                self.asked.append(file)
                return self.reply(200, files[file], {"ETag": f'"{etag(files[file])}"', "X-Repo-Commit": REVISION})
        code = "GatedRepo" if "gated" in path else "RepoNotFound"
        return self.reply(403 if code == "GatedRepo" else 404, b"{}", {"X-Error-Code": code})

    def reply_json(self, value):
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def reply(self, status, body, headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format, *args):
        pass


def etag(data):
    """What the Hub calls a file's version."""
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub(shared):
    """The stand-in's address and handler, with a fixture as the repository `org/llama`."""
    folder = shared / "fixtures" / "llama"
    files = {name: (folder / name).read_bytes() for name in ("config.json", "generation_config.json")}
    files |= {"model.safetensors": (folder / "model.safetensors").read_bytes(), "tokenizer.json": b"{}"}
    files |= {"pytorch_model.bin": b"no", "consolidated.safetensors": b"no", "README.md": b"no"}
    handler = type("Handler", (Hub,), {"asked": [], "repositories": {"org/llama": files, "org/gguf": {"m.gguf": b""}}})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_snapshot_holds_what_a_model_needs(hub, tmp_path, shared):
    endpoint, handler = hub
    folder = fetch_snapshot("org/llama", endpoint=endpoint, cache=tmp_path)
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip
    assert set(handler.asked) == {path.name for path in folder.iterdir()}
    path = "layers_0/mlp/up_proj/kernel"
    np.testing.assert_array_equal(
        HFCheckpoint(folder).read(path), HFCheckpoint(shared / "fixtures" / "llama").read(path)
    )
    handler.asked.clear()
    assert fetch_snapshot("org/llama", endpoint=endpoint, cache=tmp_path) == folder
    assert handler.asked == []


def test_resolving_a_hub_id(hub, tmp_path, monkeypatch):
    endpoint, _ = hub
    monkeypatch.setattr(
        resolving, "fetch_snapshot", lambda name: fetch_snapshot(name, endpoint=endpoint, cache=tmp_path)
    )
    checkpoint = resolve("org/llama")
    assert (checkpoint.origin, checkpoint.config.width) == ("org/llama", 64)
    with pytest.raises(UserError, match="no file or directory 'org/none' here, and there is no Hub repository"):
        resolve("org/none")


@pytest.mark.parametrize(
    ("repository", "message"),
    [
        ("org/none", "there is no Hub repository 'org/none', or it is private"),
        ("org/gated", "Hub repository 'org/gated' is gated: accept"),
        ("org/gguf", "Hub repository 'org/gguf' has no config.json"),
        ("org/bad--name", "cannot download 'org/bad--name' from the Hub: "),
    ],
)
def test_failures_say_why(hub, tmp_path, repository, message):
    with pytest.raises(UserError, match=message) as caught:
        fetch_snapshot(repository, endpoint=hub[0], cache=tmp_path)
    assert "\n" not in str(caught.value)


def test_no_network(tmp_path):
    with pytest.raises(UserError, match=r"cannot download 'org/llama' from the Hub: .*Connect") as caught:
        fetch_snapshot("org/llama", endpoint="http://127.0.0.1:9", cache=tmp_path)
    assert "\n" not in str(caught.value)


def test_what_counts_as_a_hub_id():
    assert is_hub_id("Qwen/Qwen3-0.6B")
    assert not any(map(is_hub_id, ["gpt2", "./a/b", "../b", "a/b/c", "/abs", "a b/c", "org/"]))
