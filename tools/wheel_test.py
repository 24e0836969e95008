"""Builds the wheel of what is committed, installs it into an empty environment and uses it there: `make wheel-test`.

In a folder that is not the repository: `jaxserve --help`, the sample model compiled, and then for each instruction set
that this machine has (JAXSERVE_CPU_ISA), with one thread and two, perplexity of a short text and a server that answers
the openai client, which runs in the environment of this script. Threads must not change a byte of either.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator

import openai

ROOT = pathlib.Path(__file__).resolve().parents[1]
ISAS = ("avx512", "avx2", "generic")
LIMITS = ["--max-num-seqs", "2", "--max-model-len", "512", "--kv-tokens", "1024", "--max-num-batched-tokens", "64"]
MOST_APART = 0.005  # perplexity of one instruction set from that of another, relative
PROMPT = "What is the capital of France?"


def run(command: list[str], folder: pathlib.Path, **environment: str) -> str:
    """Standard output and error of a command that must succeed; what it printed is shown if it does not."""
    print("$", *(f"{name}={value}" for name, value in environment.items()), *command, flush=True)
    done = subprocess.run(
        command, cwd=folder, env=clean(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nexit code {done.returncode}: {' '.join(command)}")
    return done.stdout


def clean(environment: dict[str, str]) -> dict[str, str]:
    """This process's environment without what would lead back to the repository or choose kernels."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "JAXSERVE_CPU"))}
    return {**kept, **environment}


def build_wheel(folder: pathlib.Path) -> pathlib.Path:
    """The wheel of a fresh clone."""
    run(["git", "clone", "--quiet", str(ROOT), "source"], folder)
    run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", "dist", "./source"], folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def install(wheel: pathlib.Path, folder: pathlib.Path) -> str:
    """The command `jaxserve` of a new environment that holds the wheel and what it requires."""
    run([sys.executable, "-m", "venv", "env"], folder)
    run([str(folder / "env/bin/python"), "-m", "pip", "install", "--quiet", str(wheel.resolve())], folder)
    found = run([str(folder / "env/bin/python"), "-c", "import jaxserve; print(jaxserve.__file__)"], folder)
    assert found.startswith(str(folder / "env")), f"jaxserve is imported from {found}"
    return str(folder / "env/bin/jaxserve")


@contextlib.contextmanager
def served(command: list[str], folder: pathlib.Path, **environment: str) -> Iterator[str]:
    """The address of a server; it must end well when it is told to."""
    print("$", *(f"{name}={value}" for name, value in environment.items()), *command, flush=True)
    process = subprocess.Popen(command, cwd=folder, env=clean(environment), stderr=subprocess.PIPE, text=True)
    told = []
    try:
        assert process.stderr is not None
        for line in process.stderr:
            told.append(line)
            if address := re.search(r"is served at (http://\S+);", line):
                yield address[1]
                break
        else:
            raise SystemExit(f"the server did not start:\n{''.join(told)}")
    finally:
        process.send_signal(signal.SIGTERM)
        rest, code = process.communicate()[1], process.returncode
    assert code == 0, f"the server ended with code {code}:\n{''.join(told)}{rest}"


def answer(address: str) -> str:
    """What the server says to one chat request of the openai client."""
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=300)
    model = client.models.list().data[0].id
    messages: list = [{"role": "user", "content": PROMPT}]
    reply = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=16)
    return reply.choices[0].message.content or ""


def use(jaxserve: str, folder: pathlib.Path, text: pathlib.Path) -> None:
    """Compiles the sample model, evaluates and serves it on each instruction set and number of threads."""
    assert "compile" in run([jaxserve, "--help"], folder)
    run([jaxserve, "compile", "smollm2-135m-instruct", "-o", "artifact", *LIMITS], folder)
    made = re.search(r"native kernels, (\w+)", run([jaxserve, "inspect", "artifact"], folder))
    assert made, "the artifact was not made with native kernels"
    evaluate = [jaxserve, "eval", "artifact", "--text", str(text), "--context", "256", "--windows", "1", "--json"]
    first = None
    for isa in ISAS[ISAS.index(made[1]) :]:
        found = set()
        for threads in ("1", "2"):
            chosen = {"JAXSERVE_CPU_ISA": isa, "JAXSERVE_CPU_THREADS": threads}
            (line,) = re.findall(r"^\{.*\}$", run(evaluate, folder, **chosen), re.MULTILINE)
            with served([jaxserve, "serve", "artifact", "--port", "0"], folder, **chosen) as address:
                found.add((json.loads(line)["perplexity"], answer(address)))
        assert len(found) == 1, f"one thread and two differ on {isa}: {found}"
        ((perplexity, reply),) = found
        print(f"{isa}: perplexity {perplexity:.4f}, answer {reply!r}", flush=True)
        first = first or perplexity
        assert abs(perplexity / first - 1) < MOST_APART, f"{perplexity} on {isa}, {first} on {made[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Installs the wheel into an empty environment and uses it there.")
    parser.add_argument("--wheel", type=pathlib.Path, help="a wheel that is there already (default: build one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jaxserve-wheel-") as name:
        folder = pathlib.Path(name)
        wheel = options.wheel or build_wheel(folder)
        names = zipfile.ZipFile(wheel).namelist()
        print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
        use(install(wheel, folder), folder, ROOT / "jaxserve/data/calibration.txt")
    print("the wheel works")


if __name__ == "__main__":
    main()
