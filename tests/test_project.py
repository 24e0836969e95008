"""The project's own machinery: finding a Python, the Makefile's steps, and what a wheel holds."""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("jaxserve", "models", "passes", "pallas_kernels", "serving")


def script(path: pathlib.Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


# tools/find_python.sh -----------------------------------------------------------------------------


@pytest.fixture
def find(tmp_path):
    """Runs the script where only `tmp_path`/bin and the shell's own tools are on PATH, and `tmp_path` is home."""
    for tool in ("sh", "cat"):
        path = tmp_path / "bin" / tool
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(str(shutil.which(tool)))

    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(ROOT / "tools/find_python.sh")],
            env={"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path), **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


GOOD = f'exec {sys.executable} "$@"'
UNSELECTED = 'echo "pyenv: command not found" >&2; exit 127'
TOO_OLD = "exit 1"
REAL = [os.path.realpath(sys.executable), sys.executable]


@pytest.mark.parametrize(
    "places",
    [
        {"bin/python3": GOOD},
        {"bin/python3": TOO_OLD, "bin/python3.13": GOOD},
        {"bin/python3": TOO_OLD, "bin/python3.13": UNSELECTED, "bin/python3.12": GOOD},
        {"bin/python3": UNSELECTED, ".pyenv/versions/3.12.1/bin/python3": GOOD},
        {".local/share/uv/python/cpython-3.13.2-linux-x86_64-gnu/bin/python3": GOOD},
    ],
    ids=["python3", "python3.13", "python3.12", "pyenv", "uv"],
)  # fmt: skip
def test_a_python_is_found(find, tmp_path, places):
    for place, body in places.items():
        script(tmp_path / place, body)
    result = find()
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.strip() in REAL


def test_no_python_says_how_to_get_one(find, tmp_path):
    script(tmp_path / "bin/python3", TOO_OLD)
    result = find()
    assert (result.returncode, result.stdout) == (1, "")
    for word in ("Python 3.12 or newer", "apt install", "uv python install", "pyenv install"):
        assert word in result.stderr


def test_a_named_python_is_taken_or_refused(find, tmp_path):
    script(tmp_path / "bin/python3", UNSELECTED)
    script(tmp_path / "mine", GOOD)
    assert find(PYTHON=str(tmp_path / "mine")).returncode == 0
    refused = find(PYTHON=str(tmp_path / "bin/python3"))
    assert refused.returncode == 1
    assert "bin/python3 is not a Python >= 3.12" in refused.stderr


# Makefile -----------------------------------------------------------------------------------------


@pytest.fixture
def make(tmp_path):
    """Runs make in a copy whose environment holds stand-ins; returns the commands they were called with."""
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    log = tmp_path / "log"
    record = f'echo "$(basename "$0") $*" >> {log}'
    for name in ("python", "ruff", "pyright"):
        script(tmp_path / ".venv/bin" / name, record)
    script(
        tmp_path / ".venv/bin/jaxserve",
        f'{record}\nif [ "$1" = compile ]; then mkdir -p "$4" && touch "$4/manifest.json"; fi',
    )

    def run(*arguments: str) -> list[str]:
        log.write_text("")
        subprocess.run(["make", *arguments], cwd=tmp_path, check=True, capture_output=True, env=clean_environment())
        return [line for line in log.read_text().splitlines() if not line.startswith("python -c")]

    return run


def clean_environment() -> dict[str, str]:
    """The environment without what an outer make hands down."""
    hidden = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "PYTHON", "PYTEST_FLAGS")
    return {name: value for name, value in os.environ.items() if name not in hidden}


LINT = ["ruff check .", "ruff format --check .", "pyright "]
PYTEST = "python -m pytest -m not slow and not peer and not gpu"


def pip(requirement: str) -> str:
    return f"python -m pip install --quiet --disable-pip-version-check --editable {requirement}"


def test_make_test_installs_once(make, tmp_path):
    assert [line.strip() for line in make("test")] == [pip(".[test]"), *map(str.strip, LINT), PYTEST]
    (tmp_path / "pyproject.toml").touch()
    assert [line.strip() for line in make("test")] == [*map(str.strip, LINT), PYTEST]
    with (tmp_path / "pyproject.toml").open("a") as file:
        file.write("# another dependency\n")
    assert make("test")[0] == pip(".[test]")


def test_make_serve_compiles_once(make):
    serve = "jaxserve serve artifacts/smollm2-135m-instruct --host 127.0.0.1 --port 8000"
    first = [line.strip() for line in make("serve")]
    assert first == [pip("."), "jaxserve compile smollm2-135m-instruct -o artifacts/smollm2-135m-instruct", serve]
    assert [line.strip() for line in make("serve")] == [serve]


def test_make_serve_takes_another_model(make):
    lines = make("serve", "MODEL=org/tiny", "PORT=9000", "COMPILE_FLAGS=--recipe w8a16")
    assert lines[1] == "jaxserve compile org/tiny -o artifacts/tiny --recipe w8a16"
    assert lines[2].strip() == "jaxserve serve artifacts/tiny --host 127.0.0.1 --port 9000"


def test_the_environment_for_tests_serves_too(make):
    make("test")
    assert [line.split()[1] for line in make("serve")] == ["compile", "serve"]


def test_pyright_reads_the_linked_folders():
    """It does not follow links that it meets, so each must be named."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    assert {f"jaxserve/{name}" for name in PACKAGES[1:]} <= set(settings["include"])


def test_continuous_integration_can_be_run():
    assert os.access(ROOT / ".ci/run", os.X_OK)


# Wheel --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_wheel_holds_every_file_of_the_five_folders(tmp_path, compiler):
    """And, if there is a compiler, the library that is compiled from C++, in place of its sources."""
    source = tmp_path / "source"
    source.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "setup.py"):
        shutil.copy(ROOT / name, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        "out",
        ".",
    ]
    stand_ins = {} if compiler else {"CC": "false", "CXX": "false"}
    subprocess.run(command, cwd=source, check=True, capture_output=True, env={**os.environ, **stand_ins})
    (wheel,) = (source / "out").glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = set()
    for name in PACKAGES:
        prefix = name if name == "jaxserve" else f"jaxserve/{name}"
        files = (path for path in (source / name).rglob("*") if path.is_file())
        expected |= {f"{prefix}/{path.relative_to(source / name).as_posix()}" for path in files}
    library = f"jaxserve/pallas_kernels/_native/kernels{sysconfig.get_config_var('EXT_SUFFIX')}"
    compiled = {library} if compiler and shutil.which("c++") else set()
    assert packed == {name for name in expected if not name.endswith((".cc", ".h", ".inc"))} | compiled
