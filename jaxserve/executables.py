"""Programs of an artifact: exported as StableHLO, compiled ahead of time, and loaded without compiling.

The export is the truth. An executable is a cache of it, valid for one key (versions, target, options); where the key
differs the export is compiled again. Both go the same way, export then compile, so a rebuilt program is the
same program. An executable is a pickle: its bytes come only from `Artifact.read`, which hashes them first.
"""

import contextlib
import functools
import importlib.metadata
import json
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.export
from jax.experimental import serialize_executable

from jaxserve.artifact import Artifact
from jaxserve.heap import give_back_free_memory
from jaxserve.manifest import ArtifactError, Program
from jaxserve.pallas_kernels._native import describe
from jaxserve.targets import Target

Options = Mapping[str, str | bool | int | float]
Report = Callable[[str], None]

PALLAS_CALL = "mosaic_gpu_v2"
"""What a Pallas kernel is in StableHLO; JAX's plugin knows it."""

_VERSIONED = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")


def export_program(
    function: Callable, *specs: Any, donate: Sequence[int] = (), platform: str = "cpu", custom_calls: Sequence[str] = ()
) -> bytes:
    """StableHLO of `function` at the given shapes (trees of `jax.ShapeDtypeStruct`), for one platform.

    `custom_calls` names the FFI targets that it calls; they must be registered again before the program is loaded.
    """
    if platform == "cuda":
        custom_calls = (*custom_calls, PALLAS_CALL)
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in custom_calls]
    jitted = jax.jit(function, donate_argnums=tuple(donate))
    exported = jax.export.export(jitted, platforms=(platform,), disabled_checks=checks)(*specs)
    return bytes(exported.serialize())


def exported_call(exported: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function that `export_program` exported, and the shapes of its arguments."""
    program = jax.export.deserialize(bytearray(exported))
    specs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.in_avals]
    return program.call, jax.tree.unflatten(program.in_tree, specs)[0]


def compile_program(exported: bytes, *, donate: Sequence[int] = (), options: Options | None = None) -> Any:
    """Compile what `export_program` made; returns a `jax.stages.Compiled` that takes the same arguments.

    Calling an export forgets what the exported function donated, so `donate` is given again.
    """
    call, arguments = exported_call(exported)
    lowered = jax.jit(call, donate_argnums=tuple(donate)).lower(*arguments)
    return lowered.compile(compiler_options=dict(options) if options else None)


def serialize(compiled: Any) -> bytes:
    """Machine code of a compiled program with the trees of its arguments and results."""
    return pickle.dumps(serialize_executable.serialize(compiled))


def deserialize(data: bytes) -> Any:
    """The program that `serialize` wrote. Runs code from `data`: pass only bytes whose hash was checked."""
    return serialize_executable.deserialize_and_load(*pickle.loads(data))


def executable_key(target: Target, options: Options | None = None) -> dict[str, str]:
    """Everything that decides whether machine code made here runs there, as text for people, one entry a cause."""
    flags = sorted(flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith("--xla_dump"))
    key = {name: version for name in _VERSIONED if (version := _version(name))}
    return key | {
        "kernels": describe() if target.platform == "cpu" else "Pallas kernels",
        "target": target.fingerprint(),
        "xla_flags": " ".join(flags),
        "options": json.dumps(dict(options or {}), sort_keys=True),
    }


def load_or_rebuild(artifact: Artifact, name: str, target: Target, report: Report, *, store: bool = True) -> Any:
    """The program `name`, ready to call, without compiling when a cached executable has this machine's key.

    Otherwise the export is compiled, `report` gets one line that says why, and with `store` the result is
    kept in the artifact if its folder can be written.

    Raises:
        ArtifactError: when the program is unknown, a file is damaged, or the export is for another platform.
    """
    program = artifact.manifest.program(name)
    key = executable_key(target, program.compiler_options)
    for cached in program.executables:
        if cached.key == key:
            return deserialize(artifact.read(cached.file))
    report(f"compiling {name} again: {_difference(program, key)}")
    compiled = _rebuild(artifact, program, target)
    if store:
        try:
            artifact.add_executable(name, key, serialize(compiled))
        except OSError as error:
            report(f"could not keep {name} for the next start: {error.strerror}")
    return compiled


class Loading:
    """A program that is loaded once, by whoever needs it first: the thread that loads ahead, or a caller that cannot
    wait for its turn."""

    def __init__(self, load: Callable[[], Any]):
        self._load: Callable[[], Any] | None = load
        self._lock = threading.Lock()
        self._program: Any = None

    @property
    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._load is None

    def result(self) -> Any:
        """The program, loaded now if it has not been. Raises as `load_or_rebuild`."""
        with self._lock:
            if self._load is not None:
                self._program = self._load()
                self._load = None
            return self._program


def load_in_background(
    artifact: Artifact, names: Iterable[str], target: Target, report: Report, *, store: bool = True
) -> dict[str, Loading]:
    """Programs that one thread loads in the given order, while others may take theirs out of turn.

    One thread: loading releases the GIL, and three loads took 0.83 s one after another and 0.71 s in three threads.
    `report` is called from the thread that loads. What fails to load fails again, and raises, where it is asked for.
    """
    programs = {
        name: Loading(functools.partial(load_or_rebuild, artifact, name, target, report, store=store)) for name in names
    }

    def load_all() -> None:
        with contextlib.suppress(ArtifactError):
            for program in programs.values():
                if not threading.main_thread().is_alive():  # the process is ending
                    return
                program.result()
        give_back_free_memory()

    # No daemon: the interpreter would end under a load, and XLA aborts the process then.
    threading.Thread(target=load_all, name="load-programs").start()
    return programs


def _rebuild(artifact: Artifact, program: Program, target: Target) -> Any:
    data = artifact.read(program.export)
    platforms = jax.export.deserialize(bytearray(data)).platforms
    if target.platform not in platforms:
        raise ArtifactError(
            f"{artifact.root}: {program.name} was compiled for {', '.join(platforms)} and cannot run on "
            f"{target.platform}; compile the model for this target"
        )
    return compile_program(data, donate=program.donate, options=program.compiler_options)


def _difference(program: Program, key: Mapping[str, str]) -> str:
    """Why no cached executable fits, told by the one that was compiled first."""
    if not program.executables:
        return "the artifact holds no executable of it"
    made = program.executables[0].key
    names = sorted(name for name in made.keys() | key.keys() if made.get(name) != key.get(name))
    return "; ".join(f"{name} is {key.get(name, 'absent')!r} and was {made.get(name, 'absent')!r}" for name in names)


@functools.cache
def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
