"""The command line: what people get to see, and what stays behind when something is wrong."""

import json
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

import jaxserve
from jaxserve.cli import main
from jaxserve.passes.recipes import RECIPES
from tests.artifact_sample import write_sample
from tests.models.helpers import edit_json, read_safetensors, write_safetensors

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def model(shared: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A writable copy of the small model."""
    return pathlib.Path(
        shutil.copytree(shared / "fixtures" / "stories260K", tmp_path / "model", copy_function=shutil.copyfile)
    )


def refused(capture: Capture, *arguments: object) -> str:
    """The one line on standard error with which a command ends that cannot be done."""
    assert main([str(argument) for argument in arguments]) == 2
    captured = capture.readouterr()
    assert captured.out == ""
    errors = [line for line in captured.err.splitlines() if line.startswith("jaxserve ")]
    assert len(errors) == 1 and captured.err.endswith(errors[0] + "\n")
    return errors[0]


# ---- checkpoints that cannot be compiled


def change_header(change: Callable[[dict], None]) -> Callable[[pathlib.Path], None]:
    def damage(folder: pathlib.Path) -> None:
        header, data = read_safetensors(folder / "model.safetensors")
        change(header)
        write_safetensors(folder / "model.safetensors", header, data)

    return damage


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[pathlib.Path], None]:
    def damage(folder: pathlib.Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


def set_config(**changes: object) -> Callable[[pathlib.Path], None]:
    return lambda folder: edit_json(folder / "config.json", **changes)


def set_shape(header: dict) -> None:
    header["model.layers.0.mlp.up_proj.weight"]["shape"] = [64, 172]


def set_huge_shape(header: dict) -> None:
    header["model.layers.0.mlp.up_proj.weight"]["shape"] = [2**40, 2**40]


UP = r"model\.safetensors: tensor 'model\.layers\.0\.mlp\.up_proj\.weight'"
DOWN = "model.layers.4.mlp.down_proj.weight"
DAMAGES = {
    "truncated": (rewrite("model.safetensors", lambda data: data[:-1000]), r"model/model\.safetensors: "),
    "no header": (rewrite("model.safetensors", lambda data: b"\xff" * 100), r"model\.safetensors: the header claims"),
    "header of no JSON": (
        rewrite("model.safetensors", lambda data: struct.pack("<Q", 9) + b"{nonsense"),
        r"model/model\.safetensors: header: is not valid JSON",
    ),
    "missing tensor": (change_header(lambda header: header.pop(DOWN)), re.escape(DOWN)),
    "wrong shape": (change_header(set_shape), f"{UP} has shape"),
    "absurd shape": (change_header(set_huge_shape), UP),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"has neither model\.safetensors nor"),
    "no JSON": (rewrite("config.json", lambda data: data[:40]), r"model/config\.json: is not valid JSON"),
    "other shapes": (set_config(hidden_size=128), r"model\.safetensors: tensor '[\w.]+' has shape"),
    "absurd width": (set_config(hidden_size=2**50), r"model/config\.json: field 'hidden_size'"),
    "absurd depth": (set_config(num_hidden_layers=10**9), r"model/config\.json: field 'num_hidden_layers'"),
    "unknown family": (set_config(model_type="abacus"), r"model/config\.json: .*'abacus'"),
    "no tokenizer": (
        lambda folder: [path.unlink() for path in folder.glob("tokenizer*")] and None,
        r"model: .*tokenizer",
    ),
    "damaged tokenizer": (
        lambda folder: [path.write_bytes(b"{") for path in folder.glob("tokenizer.*")] and None,
        r"/model: tokenizer\.json: not a tokenizer\.json",
    ),
}  # fmt: skip


@pytest.mark.parametrize("recipe", ["f32", "bf16", "native", "w8a16", "w4a16-gptq"])
def test_weights_that_are_no_numbers(model: pathlib.Path, tmp_path: pathlib.Path, recipe: str, capsys: Capture):
    """Refused by every recipe, whether it rounds weights or not."""
    header, data = read_safetensors(model / "model.safetensors")
    start = header["model.layers.0.mlp.up_proj.weight"]["data_offsets"][0] + 4
    data = data[:start] + struct.pack("<f", float("nan")) + data[start + 4 :]
    write_safetensors(model / "model.safetensors", header, data)
    line = refused(capsys, "compile", model, "-o", tmp_path / "artifact", "--no-verify", "--recipe", recipe)
    assert re.search(f"{UP} holds nan at \\[0, 1\\]; weights must be finite numbers", line), line
    assert leftovers(tmp_path) == {"model"}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint(model: pathlib.Path, tmp_path: pathlib.Path, damage: str, capsys: Capture):
    spoil, message = DAMAGES[damage]
    spoil(model)
    line = refused(capsys, "compile", model, "-o", tmp_path / "out" / "artifact")
    assert re.search(message, line), line
    assert leftovers(tmp_path) == {"model"}


def leftovers(folder: pathlib.Path) -> set[str]:
    """What lies in a folder; empty folders made on the way do not count."""
    return {path.relative_to(folder).parts[0] for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("keep", [0, 3, 20, 1000, 0.5, 0.999])
def test_truncated_gguf(sample_gguf: pathlib.Path, tmp_path: pathlib.Path, keep: float, capsys: Capture):
    path = tmp_path / "cut.gguf"
    size = sample_gguf.stat().st_size
    with sample_gguf.open("rb") as source, path.open("wb") as target:
        target.write(source.read(keep if isinstance(keep, int) else int(keep * size)))
    assert re.search(r"cut\.gguf: ", refused(capsys, "compile", path, "-o", tmp_path / "artifact"))
    assert leftovers(tmp_path) == {"cut.gguf"}


def test_absurd_counts_in_gguf(tmp_path: pathlib.Path, capsys: Capture):
    path = tmp_path / "huge.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 2**62, 2**62))
    assert "huge.gguf: " in refused(capsys, "compile", path, "-o", tmp_path / "artifact")


def test_not_a_model(tmp_path: pathlib.Path, capsys: Capture):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    for name, message in {
        "empty": "empty: has neither a config.json nor a .gguf file",
        "notes.txt": "notes.txt: is neither a directory nor a .gguf file",
        "none.gguf": "no model '.*none.gguf'",
    }.items():
        assert re.search(message, refused(capsys, "compile", tmp_path / name, "-o", tmp_path / "artifact"))
    assert leftovers(tmp_path) == {"notes.txt"}


# ---- flags


CALIBRATED = "canonicalize,lower-dense-matmul,prune,insert-paged-kv"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--recipe", "w2a16"], "unknown recipe 'w2a16'; recipes: f32, bf16"),
        (["--disable-pass", "fuse-all"], "no pass 'fuse-all' in this pipeline; it has: canonicalize"),
        (["--stop-after", "fuse-all"], "no pass 'fuse-all' in this pipeline"),
        (["--print-ir-after", "fuse-all"], "--print-ir-after 'fuse-all': what runs is trace, canonicalize"),
        (
            ["--recipe", "fp8", "--print-ir-after", "quantize-norm"],
            "--print-ir-after 'quantize-norm': what runs is trace, canonicalize",
        ),
        (["--pipeline", "canonicalize,fly"], "unknown pass 'fly'; known: canonicalize"),
        (["--pipeline", "insert-paged-kv{leaf=3}"], "unknown option 'leaf'; options: page, kv"),
        (["--pipeline", "canonicalize"], "does not insert a KV cache"),
        (["--rule", "mlp=w5a16"], "unknown quantization scheme 'w5a16'"),
        (["--rule", "mlp"], "'mlp' is not REGEX=SCHEME"),
        (["--rule", "(=w8a16"], "is not a regular expression"),
        (["--rule", "mlp=w4a16:g48"], "unknown option 'g48'; allowed: g32, g64, g128"),
        (["--pipeline", "canonicalize", "--rule", "mlp=w8a16"], "--pipeline says it all: leave out --rule"),
        (["--rule", "mlp=w4a16:g32:g64"], "'w4a16:g32:g64': g32 and g64 decide the same"),
        (["--recipe", "w4a16", "--group", "32", "--rule", "it's=w5"], "unknown quantization scheme 'w5'"),
        (["--recipe", "bf16", "--group", "64"], "belong to recipes w4a16, w4a16-awq, w4a16-gptq, w3a16-awq, w3a16-g"),
        (["--pipeline", ""], "does not insert a KV cache"),
        (["--pipeline", "", "--recipe", "f32"], "--pipeline says it all: leave out --recipe"),
        (["--pipeline", " ", "--stop-after", "canonicalize"], "no pass 'canonicalize' in this pipeline; it has: none"),
        (["--dump-ir", "/dev/null/ir"], "--dump-ir /dev/null/ir: Not a directory"),
        (["--max-model-len", "513"], "--max-model-len 513 is not between 2 and 512"),
        (["--kv-tokens", "3"], "--kv-tokens 3 does not hold one page of 16"),
        (["--max-num-seqs", "0"], "--max-num-seqs 0 is not between"),
        (["--max-num-batched-tokens", "7"], "--max-num-batched-tokens 7 is not between --max-num-seqs 32 and"),
        (["--page-size", "257"], "--page-size 257 is not between 1 and 256"),
        (["--page-size", "0"], "--page-size 0 is not between 1 and 256"),
        (["--pipeline", "insert-paged-kv", "--page-size", "16"], "--pipeline says it all: leave out --page-size"),
        (["--pipeline", "insert-paged-kv{page=300}"], "insert-paged-kv{page=300} of the pipeline is not between 1 and"),
        (["--recipe", "w4a16", "--group", "48"], "--group 48: allowed are 32, 64, 128"),
        (["--calibration-length", "0"], "--calibration-length 0 is not at least 1"),
        (["--recipe", "f32", "--calibration-sequences", "8"], "--calibration: no pass of this pipeline looks at"),
        (["--pipeline", CALIBRATED, "--calibration-length", "513"], "--calibration-length 513 is more than 512"),
        (["--pipeline", CALIBRATED, "--calibration", "/none"], "--calibration /none: No such file or directory"),
        (["--target", "abacus"], "abacus"),
        (["--draft", "layers:6"], "--draft layers:6: allowed is layers:N with N from 1 to 5"),
        (["--draft", "half"], "--draft half: allowed is layers:N"),
    ],
)
def test_flags_that_do_not_fit(
    stories: pathlib.Path, tmp_path: pathlib.Path, flags: list[str], message: str, capsys: Capture
):
    assert message in refused(capsys, "compile", stories, "-o", tmp_path / "artifact", *flags)
    assert not any(tmp_path.iterdir())


@pytest.fixture
def stories(shared: pathlib.Path) -> pathlib.Path:
    return shared / "fixtures" / "stories260K"


def test_output_that_is_somebodys(stories: pathlib.Path, tmp_path: pathlib.Path, capsys: Capture):
    (tmp_path / "notes.txt").write_text("hello")
    assert "is not empty and not an artifact" in refused(capsys, "compile", stories, "-o", tmp_path)
    assert "exists and is not a folder" in refused(capsys, "compile", stories, "-o", tmp_path / "notes.txt")
    assert "say where to write the artifact: -o DIR" in refused(capsys, "compile", stories)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


# ---- looking at the pipeline


def test_look_at_the_ir(stories: pathlib.Path, tmp_path: pathlib.Path, capsys: Capture):
    dump = tmp_path / "ir"
    command = ["compile", str(stories), "--recipe", "w8a16", "--explain", "--dump-ir", str(dump)]
    assert main([*command, "--stop-after", "quantize-matmul", "--print-ir-after", "fuse-qkv"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("// after fuse-qkv\n") and captured.out.count("// after") == 1
    assert "self_attn/qkv_proj" in captured.out and "quantized_matmul" not in captured.out
    names = sorted(path.name for path in dump.iterdir())
    assert names[0] == "000_trace.txt" and names[-1].endswith("_quantize-matmul.txt")
    assert [name[:3] for name in names] == [f"{index:03d}" for index in range(len(names))]
    assert "quantized_matmul" in (dump / names[-1]).read_text()
    # --explain: what matched, and what did not and why
    assert "layers_0/self_attn: layers_0/self_attn/qkv_proj/kernel [128, 64]" in captured.err
    assert "embed_tokens/embedding: no match, no rule selects it" in captured.err


def test_what_was_asked_for_and_is_not_there_is_said_unasked(stories: pathlib.Path, capsys: Capture):
    assert main(["compile", str(stories), "--rule", "layer_0/=w8a16", "--stop-after", "quantize-matmul"]) == 0
    assert "rule layer_0/=w8a16: no match, selects no weight" in capsys.readouterr().err
    passes = "lower-dense-matmul,prune{targets=layer},fold-scales{targets='it''s'}"
    assert main(["compile", str(stories), "--pipeline", passes, "--stop-after", "fold-scales"]) == 0
    told = capsys.readouterr().err
    assert told.count("no match") == 1 and "targets it's: no match, selects no weight that a matmul reads" in told
    assert main(["compile", str(stories), "--rule", "it's=w8a16", "--stop-after", "quantize-matmul"]) == 0
    assert "rule it's=w8a16: no match" in capsys.readouterr().err


def test_print_everything(stories: pathlib.Path, capsys: Capture):
    assert main(["compile", str(stories), "--stop-after", "fuse-qkv", "--print-ir-after", "all"]) == 0
    printed = re.findall(r"^// after (\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert printed[0] == "trace" and printed[-1] == "fuse-qkv"


def test_disable_a_pass(stories: pathlib.Path, capsys: Capture):
    flags = ["--stop-after", "insert-paged-kv", "--print-ir-after", "insert-paged-kv"]
    assert main(["compile", str(stories), *flags]) == 0
    assert "qkv_proj" in capsys.readouterr().out
    assert main(["compile", str(stories), *flags, "--disable-pass", "fuse-qkv"]) == 0
    captured = capsys.readouterr()
    assert "qkv_proj" not in captured.out and "gate_up_proj" in captured.out
    assert "fuse-qkv" not in captured.err


def test_passes(capsys: Capture):
    assert main(["passes"]) == 0
    text = capsys.readouterr().out
    assert "quantize-matmul" in text and "w4a16" in text
    assert main(["passes", "insert-paged-kv"]) == 0
    assert "  page=16\n  kv=bf16  (one of f32, bf16, int8, int4, fp8)\n" in capsys.readouterr().out
    assert main(["passes", "w4a16-gptq"]) == 0
    assert capsys.readouterr().out == RECIPES["w4a16-gptq"].spec() + "\n"
    line = refused(capsys, "passes", "fly")
    assert "no pass and no recipe 'fly'; passes: canonicalize" in line and "; recipes: f32, bf16" in line


# ---- artifacts


def test_inspect(tmp_path: pathlib.Path, capsys: Capture):
    write_sample(tmp_path / "artifact")
    assert main(["inspect", str(tmp_path / "artifact")]) == 0
    text = capsys.readouterr().out
    assert "4 sequences of up to 64 tokens" in text and "1x feeds a softmax" in text
    assert main(["inspect", str(tmp_path / "artifact"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"] == "w4a16"


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["inspect"], ["bench"], ["eval", "--text", __file__]])
def test_no_artifact(tmp_path: pathlib.Path, command: list[str], capsys: Capture):
    name, *flags = command
    assert "is not a folder; make an artifact with: jaxserve compile" in refused(
        capsys, name, tmp_path / "none", *flags
    )
    assert "has no manifest.json" in refused(capsys, name, tmp_path, *flags)
    write_sample(tmp_path / "artifact")
    (tmp_path / "artifact" / "step" / "step-t8-s4.export").write_bytes(b"Exported")
    assert "step/step-t8-s4.export is damaged" in refused(capsys, name, tmp_path / "artifact", *flags)


# ---- ending early


def test_interrupted_compile_leaves_nothing(stories: pathlib.Path, tmp_path: pathlib.Path):
    """While programs are being compiled, in two threads."""
    command = [
        sys.executable,
        "-m",
        "jaxserve.cli",
        "compile",
        str(stories),
        "-o",
        str(tmp_path / "artifact"),
        "--no-verify",
    ]
    root = pathlib.Path(jaxserve.__file__).parents[1]
    with subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 120
            while not [*tmp_path.glob(".artifact.partial-*/executables/*")]:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
            os.kill(process.pid, signal.SIGINT)
            code = process.wait(60)
        finally:
            process.kill()
        assert process.stderr is not None
        said = process.stderr.read()
    assert code == 130
    assert said.endswith("interrupted\n") and "Traceback" not in said, said
    assert not any(tmp_path.iterdir())
