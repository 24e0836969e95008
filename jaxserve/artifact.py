"""Artifact folders: written whole or not at all, and checked when opened.

    manifest.json   see `jaxserve.manifest`
    graph/          the IR after every pass             weights/      orbax checkpoints
    tokenizer/      as the checkpoint shipped it        step/         StableHLO, the programs' truth
    executables/    machine code, a cache

An artifact is code: executables hold pickles, and loading one runs it. The hashes catch damage and mix-ups. They
protect from nobody who can write the manifest, so serve only artifacts you trust.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import fcntl
import glob
import hashlib
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self

from jaxserve import manifest as manifests
from jaxserve.manifest import ArtifactError, CachedExecutable, FileEntry, Manifest

MANIFEST = "manifest.json"
WEIGHTS = "weights"
TOKENIZER = "tokenizer"
GRAPH = "graph"
REPORT = "report.html"
STEP = "step"
EXECUTABLES = "executables"
DISK_FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT)))
"""What errors of a full disk have in them, those that are no OSError (of the weights' writer), too."""


@dataclasses.dataclass(frozen=True)
class Artifact:
    """An opened artifact, every listed file present and of the listed size and content."""

    root: pathlib.Path
    manifest: Manifest

    @property
    def weights(self) -> pathlib.Path:
        """Folder of the weights, for `jaxserve.weights_io.load_weights`."""
        return self.root / WEIGHTS

    @property
    def tokenizer(self) -> pathlib.Path:
        """Folder of the tokenizer, for `jaxserve.text.load_tokenizer`."""
        return self.root / TOKENIZER

    def read(self, name: str) -> bytes:
        """The bytes of a listed file, hashed as read: what is returned is what the manifest says.

        Raises:
            ArtifactError: when the manifest does not list the file, or it changed since the artifact was opened.
        """
        entry = self.manifest.files.get(name)
        if entry is None:
            raise ArtifactError(f"{self.root}: {name} is not listed in {MANIFEST}; compile the model again")
        data = _listed_file(self.root, name).read_bytes()
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise ArtifactError(_damaged(self.root, name, "its content is not what was compiled"))
        return data

    def add_executable(self, program: str, key: dict[str, str], data: bytes) -> None:
        """Keep machine code that was rebuilt for another key, so that the next start finds it.

        The manifest is read again, extended and replaced; when two processes do so at once, one entry may be lost, and
        will be rebuilt. Raises `OSError` when the folder cannot be written.
        """
        digest = hashlib.sha256(data).hexdigest()
        name = f"{EXECUTABLES}/{program}.{digest[:16]}.bin"
        current = _read_manifest(self.root)
        programs = tuple(
            dataclasses.replace(item, executables=(*item.executables, CachedExecutable(key=key, file=name)))
            if item.name == program
            else item
            for item in current.programs
        )
        files = {**current.files, name: FileEntry(size=len(data), sha256=digest)}
        _replace_file(self.root / name, data)
        text = manifests.to_json(dataclasses.replace(current, programs=programs, files=files))
        _replace_file(self.root / MANIFEST, text.encode())


def open_artifact(directory: str | os.PathLike[str], *, verify_weights: bool = True) -> Artifact:
    """Open the artifact in `directory`: the manifest's version, and every listed file's size and hash.

    Hashing costs about 0.35 s for a GB on two cores, a tenth of loading it, and leaves the file in the page cache; pass
    `verify_weights=False` to check only the sizes of the weights.

    Raises:
        ArtifactError: naming the file or field that is wrong.
    """
    root = pathlib.Path(directory)
    if not root.is_dir():
        raise ArtifactError(f"{root} is not a folder; make an artifact with: jaxserve compile MODEL -o {root}")
    manifest = _read_manifest(root)
    paths = {name: _checked_size(root, name, entry) for name, entry in manifest.files.items()}
    hashed = [name for name in paths if verify_weights or not name.startswith(f"{WEIGHTS}/")]
    hashed.sort(key=lambda name: -manifest.files[name].size)
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = pool.map(_sha256, [paths[name] for name in hashed])
        for name, digest in zip(hashed, digests, strict=True):
            if digest != manifest.files[name].sha256:
                raise ArtifactError(_damaged(root, name, "its content is not what was compiled"))
    return Artifact(root, manifest)


class ArtifactWriter:
    """Writes an artifact into a hidden folder beside its place, and moves it there when it is finished.

        with ArtifactWriter(directory) as writer:
            writer.write("graph/000_trace.txt", text)
            save_weights(writer.path("weights"), arrays)
            writer.finish(manifest)

    Leaving the block in any other way, by an exception, Ctrl-C or SIGTERM too, removes what was written and keeps
    the artifact that was there before; a full disk is an `ArtifactError`. What a killed process left behind is removed
    by the next writer.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = pathlib.Path(os.path.realpath(directory))
        self._stack = contextlib.ExitStack()
        self._signals = _StopSignals()
        self._root: pathlib.Path | None = None

    def __enter__(self) -> Self:
        """Raises `ArtifactError` when the place is taken by something that is not an artifact, or not writable."""
        _check_replaceable(self.directory)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._signals)
            self._root = stack.enter_context(_scratch_folder(self.directory))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._root = None
        self._stack.__exit__(kind, error, trace)
        if isinstance(error, Exception) and any(words in str(error) for words in DISK_FULL):
            raise ArtifactError(f"{self.directory}: no space is left there; nothing was written") from error

    @property
    def root(self) -> pathlib.Path:
        """The hidden folder."""
        if self._root is None:
            raise RuntimeError("an ArtifactWriter is used inside its with block")
        return self._root

    def path(self, name: str) -> pathlib.Path:
        """Where to write the file or folder `name`; the folders above it are made. Ends here when told to stop."""
        self._signals.check()
        path = self.root / _safe_name(self.root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, name: str, data: str | bytes) -> pathlib.Path:
        """Write one file, text as UTF-8; returns its path."""
        path = self.path(name)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return path

    def finish(self, manifest: Manifest) -> Manifest:
        """Hash every file, write the manifest, put the artifact in its place; returns the manifest as written.

        Raises:
            ArtifactError: when a program names a file that was not written, or the place was taken meanwhile.
        """
        paths = sorted(path for path in self.root.rglob("*") if path.is_file())
        with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            digests = pool.map(_sha256, paths)
            files = {
                path.relative_to(self.root).as_posix(): FileEntry(size=path.stat().st_size, sha256=digest)
                for path, digest in zip(paths, digests, strict=True)
            }
        for program in manifest.programs:
            for name in (program.export, *(item.file for item in program.executables)):
                if name not in files:
                    raise ArtifactError(f"program {program.name} names the file {name}, which was not written")
        manifest = dataclasses.replace(manifest, files=files)
        self.write(MANIFEST, manifests.to_json(manifest))
        for path in [*paths, self.root / MANIFEST, *(p for p in self.root.rglob("*") if p.is_dir()), self.root]:
            _fsync(path)
        self._signals.check()
        _put_in_place(self.root, self.directory)
        return manifest


def _read_manifest(root: pathlib.Path) -> Manifest:
    path = root / MANIFEST
    if not path.is_file():
        raise ArtifactError(f"{root} has no {MANIFEST}, so it is not an artifact of jaxserve compile")
    return manifests.from_json(path.read_bytes(), str(path))


def _safe_name(root: pathlib.Path, name: str) -> str:
    """`name` when it is a plain relative path that stays inside the artifact; `ArtifactError` otherwise."""
    parts = pathlib.PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        raise ArtifactError(f"{root}: file name {name!r} leads out of the artifact; do not use this artifact")
    return name


def _listed_file(root: pathlib.Path, name: str) -> pathlib.Path:
    """Path of a listed file, which must be a regular file that no link leads out of the artifact to."""
    path = root / _safe_name(root, name)
    if not path.is_file():
        raise ArtifactError(_damaged(root, name, "it is missing"))
    inside = pathlib.Path(os.path.realpath(root))
    if pathlib.Path(os.path.realpath(path)) != inside / name:
        raise ArtifactError(f"{root}: {name} is reached through a link; an artifact holds plain files only")
    return path


def _checked_size(root: pathlib.Path, name: str, entry: FileEntry) -> pathlib.Path:
    path = _listed_file(root, name)
    size = path.stat().st_size
    if size != entry.size:
        raise ArtifactError(_damaged(root, name, f"it has {size} bytes instead of {entry.size}"))
    return path


def _damaged(root: pathlib.Path, name: str, what: str) -> str:
    return f"{root}: {name} is damaged: {what}; compile the model again"


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_file(path: pathlib.Path, data: bytes) -> None:
    """Write a file so that readers see the old one or the new one and nothing between."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            os.fchmod(file.fileno(), 0o644)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            pathlib.Path(file.name).rename(path)
        except BaseException:
            pathlib.Path(file.name).unlink(missing_ok=True)
            raise


def _check_replaceable(directory: pathlib.Path) -> None:
    """Nothing, an empty folder or an older artifact may be replaced; anything else is somebody's data."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ArtifactError(f"{directory} exists and is not a folder; choose another output")
    if any(directory.iterdir()) and not (directory / MANIFEST).is_file():
        raise ArtifactError(f"{directory} is not empty and not an artifact; choose another output or empty it")


def _put_in_place(scratch: pathlib.Path, directory: pathlib.Path) -> None:
    """Rename `scratch` to `directory`; an older artifact there steps aside first and comes back if that fails."""
    _check_replaceable(directory)
    aside = _aside(directory)
    if directory.exists():
        directory.rename(aside)
    try:
        scratch.rename(directory)
    finally:
        _settle(directory)
    _fsync(directory.parent)


def _aside(directory: pathlib.Path) -> pathlib.Path:
    """Where an older artifact stands while the new one takes its place."""
    return directory.with_name(f".{directory.name}.replaced")


def _settle(directory: pathlib.Path) -> None:
    """Bring an older artifact back when no new one took its place, and drop it when one did."""
    aside = _aside(directory)
    if aside.is_dir() and not directory.exists():
        aside.rename(directory)
    elif aside.is_dir():
        shutil.rmtree(aside)


@contextlib.contextmanager
def _scratch_folder(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """A locked hidden folder beside `directory`, removed at the end unless it was renamed."""
    prefix = f".{directory.name}.partial-"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _settle(directory)
        _remove_abandoned(directory.parent, prefix)
        folder = pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=directory.parent))
    except OSError as error:
        raise ArtifactError(f"cannot write beside {directory}: {error.strerror}; choose another output") from error
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        folder.chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_abandoned(parent: pathlib.Path, prefix: str) -> None:
    """Remove the folders of writers that were killed: those that no living process holds locked."""
    for folder in parent.glob(f"{glob.escape(prefix)}*"):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.ENOENT):
                raise
        finally:
            os.close(descriptor)


class _StopSignals:
    """While the block runs, SIGTERM and SIGHUP unwind the stack as Ctrl-C does, where the program leaves them to the
    system; and none of the three can get lost.

    Python raises what a handler raises wherever the main thread happens to be. In a destructor or a callback of the
    garbage collector it prints the exception and goes on: here it goes on in silence, and `check` raises it again.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._replaced: dict[int, Any] = {}
        self._unraisable = sys.unraisablehook

    def __enter__(self) -> Self:
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._ignore
        if threading.current_thread() is threading.main_thread():
            defaults: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
            defaults[signal.SIGINT] = signal.default_int_handler
            for number, default in defaults.items():
                if signal.getsignal(number) is default:
                    self._replaced[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *error: object) -> None:
        sys.unraisablehook = self._unraisable
        while self._replaced:
            signal.signal(*self._replaced.popitem())

    def _ignore(self, unraisable: "sys.UnraisableHookArgs") -> None:
        if self._received is None or not issubclass(unraisable.exc_type, (KeyboardInterrupt, SystemExit)):
            self._unraisable(unraisable)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        self.check()

    def check(self) -> None:
        """Raises KeyboardInterrupt or SystemExit if a signal has come, from whatever thread."""
        if self._received == signal.SIGINT:
            raise KeyboardInterrupt
        if self._received is not None:
            raise SystemExit(128 + self._received)
