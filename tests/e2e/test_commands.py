"""Commands that need a compiled artifact."""

import json
import pathlib
import shutil

import pytest

from jaxserve.cli import main


def test_inspect(stories_artifact: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(stories_artifact)]) == 0
    text = capsys.readouterr().out
    for fact in (
        "stories260K (llama)",
        "f32, activations f32, target cpu",
        "insert-paged-kv",
        "4096 tokens in f32, pages of 16",
    ):
        assert fact in text
    assert "16 sequences of up to 512 tokens" in text and "step/step-64x16.export" in text
    assert main(["inspect", str(stories_artifact), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((stories_artifact / "manifest.json").read_text())


def test_eval(stories_artifact: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time, there was a little girl named Lily. She loved to play outside in the park. " * 8)
    command = ["eval", str(stories_artifact), "--text", str(text), "--context", "64"]
    assert main([*command, "--windows", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["perplexity", "windows", "tokens"]
    assert (found["windows"], found["tokens"]) == (2, 126) and 1 < found["perplexity"] < 20
    assert main([*command[:-1], "513"]) == 2
    assert "compile it again with a larger --max-model-len" in capsys.readouterr().err
    assert main([*command[:4], "--windows", "9", "--json"]) == 2
    assert "less than one window of --context 512" in capsys.readouterr().err
    assert main([*command, "--windows", "99", "--json"]) == 0
    found = capsys.readouterr()
    held = json.loads(found.out)["windows"]
    assert held < 99 and f"--windows 99: the text holds no more than {held} of 64 tokens" in found.err
    assert main([*command, "--windows", "-1"]) == 2
    assert "--windows -1 is less than 0" in capsys.readouterr().err
    assert main([*command[:3], str(tmp_path / "none.txt")]) == 2
    assert "none.txt: No such file" in capsys.readouterr().err


def test_bench(stories_artifact: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    command = [
        "bench",
        str(stories_artifact),
        "--concurrency",
        "1,4",
        "--prompt-len",
        "8",
        "--output-len",
        "8",
        "--json",
    ]
    assert main(command) == 0
    runs = json.loads(capsys.readouterr().out)
    assert [run["concurrency"] for run in runs] == [1, 4]


@pytest.mark.parametrize(
    ("flag", "value"), [("--max-num-seqs", "17"), ("--max-model-len", "513"), ("--kv-tokens", "4097")]
)
def test_serve_cannot_raise_limits(
    stories_artifact: pathlib.Path, flag: str, value: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["serve", str(stories_artifact), "--port", "0", flag, value]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{flag} {value} is not between 1 and {int(value) - 1}" in line
    assert f"compile it again with {flag} {value}" in line


@pytest.mark.parametrize("name", ["weights", "step", "executables", "tokenizer"])
def test_damaged_artifact_is_refused(
    stories_artifact: pathlib.Path, tmp_path: pathlib.Path, name: str, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "copy"
    shutil.copytree(stories_artifact, folder)
    victim = max((path for path in (folder / name).rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    assert main(["serve", str(folder), "--port", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{victim.relative_to(folder)} is damaged" in line
