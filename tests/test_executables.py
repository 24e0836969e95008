"""Programs load in another process without compiling, keep their donation, and are rebuilt when the key differs."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.artifact import Artifact, ArtifactWriter, open_artifact
from jaxserve.executables import (
    compile_program,
    executable_key,
    export_program,
    load_in_background,
    load_or_rebuild,
    serialize,
)
from jaxserve.manifest import ArtifactError, CachedExecutable, Program
from jaxserve.targets import H100_SXM, cpu_target
from tests.artifact_sample import sample_manifest

CACHE_BYTES = 2 * 64 * 8 * 4


def step(params, caches, inputs):
    """A step in small: a dict of parameters, caches that are updated in place, inputs by name."""
    row = params["w"] @ inputs["x"] + params["b"]
    caches = {name: cache.at[inputs["slot"]].set(row) for name, cache in caches.items()}
    return caches, caches["k"].sum(0)


SPECS = (
    {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32), "b": jax.ShapeDtypeStruct((8,), jnp.float32)},
    {name: jax.ShapeDtypeStruct((64, 8), jnp.float32) for name in "kv"},
    {"x": jax.ShapeDtypeStruct((8,), jnp.float32), "slot": jax.ShapeDtypeStruct((), jnp.int32)},
)


def arguments(value: float = 1.0):
    params = {"w": np.eye(8, dtype=np.float32), "b": np.full(8, value, np.float32)}
    caches = {name: jax.device_put(np.zeros((64, 8), np.float32)) for name in "kv"}
    return params, caches, {"x": np.arange(8, dtype=np.float32), "slot": np.int32(3)}


def write_program(directory: pathlib.Path, key: dict[str, str] | None = None) -> Artifact:
    """An artifact with the program "step" twice, under two names."""
    exported = export_program(step, *SPECS, donate=(1,))
    with ArtifactWriter(directory) as writer:
        writer.write("step/step.export", exported)
        writer.write("executables/step.bin", serialize(compile_program(exported, donate=(1,))))
        cached = CachedExecutable(key=key or executable_key(cpu_target()), file="executables/step.bin")
        program = Program(name="step", kind="step", export="step/step.export", donate=(1,), executables=(cached,))
        writer.finish(sample_manifest(programs=(program, dataclasses.replace(program, name="again"))))
    return open_artifact(directory)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Artifact:
    return write_program(tmp_path_factory.mktemp("executables") / "a")


def unexpected(line: str) -> None:
    pytest.fail(f"nothing to report, got: {line}")


IN_ANOTHER_PROCESS = textwrap.dedent("""
    import json, sys
    import jax, jax.monitoring
    import numpy as np
    from jaxserve.artifact import open_artifact
    from jaxserve.executables import load_or_rebuild
    from jaxserve.targets import cpu_target

    events, lines = [], []
    jax.monitoring.register_event_duration_secs_listener(lambda event, seconds, **rest: events.append(event))
    program = load_or_rebuild(open_artifact(sys.argv[1]), "step", cpu_target(), lines.append)
    params = {"w": np.eye(8, dtype=np.float32), "b": np.full(8, 1.0, np.float32)}
    caches = {name: jax.device_put(np.zeros((64, 8), np.float32)) for name in "kv"}
    for _ in range(3):
        given = caches["k"]
        caches, out = program(params, caches, {"x": np.arange(8, dtype=np.float32), "slot": np.int32(3)})
    print(json.dumps({
        "out": np.asarray(out).tolist(),
        "alias": program.memory_analysis().alias_size_in_bytes,
        "deleted": given.is_deleted(),
        "compiled": [event for event in events if "compile" in event],
        "lines": lines,
    }))
""")


def run_elsewhere(root: pathlib.Path) -> dict:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", IN_ANOTHER_PROCESS, str(root)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_another_process_runs_it_without_compiling(artifact):
    result = run_elsewhere(artifact.root)
    assert result == {
        "out": [float(value) for value in range(1, 9)],
        "alias": CACHE_BYTES,
        "deleted": True,
        "compiled": [],
        "lines": [],
    }


def test_another_key_rebuilds_says_so_and_is_kept(tmp_path):
    here = executable_key(cpu_target())
    artifact = write_program(tmp_path / "a", here | {"jaxlib": "0.0.1"})
    first = run_elsewhere(artifact.root)
    assert first["lines"] == [f"compiling step again: jaxlib is {here['jaxlib']!r} and was '0.0.1'"]
    assert first["compiled"]
    assert (first["alias"], first["deleted"]) == (CACHE_BYTES, True)
    second = run_elsewhere(artifact.root)
    assert second["lines"] == second["compiled"] == []
    assert second["out"] == first["out"]


def test_without_store_the_artifact_stays_as_it_is(tmp_path):
    artifact = write_program(tmp_path / "a", {"jaxlib": "0.0.1"})
    lines = []
    load_or_rebuild(artifact, "step", cpu_target(), lines.append, store=False)
    assert len(lines) == 1
    assert open_artifact(artifact.root).manifest == artifact.manifest


def test_a_folder_that_cannot_be_written_is_reported(tmp_path, monkeypatch):
    artifact = write_program(tmp_path / "a", {"jaxlib": "0.0.1"})

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Artifact, "add_executable", refuse)
    lines = []
    program = load_or_rebuild(artifact, "step", cpu_target(), lines.append)
    assert lines[1:] == ["could not keep step for the next start: Permission denied"]
    np.testing.assert_array_equal(program(*arguments())[1], np.arange(8) + 1)


def test_a_program_without_executable_is_built(tmp_path):
    exported = export_program(step, *SPECS, donate=(1,))
    with ArtifactWriter(tmp_path / "a") as writer:
        writer.write("step/step.export", exported)
        program = Program(name="step", kind="step", export="step/step.export", donate=(1,))
        writer.finish(sample_manifest(programs=(program,)))
    lines = []
    load_or_rebuild(open_artifact(tmp_path / "a"), "step", cpu_target(), lines.append, store=False)
    assert lines == ["compiling step again: the artifact holds no executable of it"]


def test_an_executable_changed_after_opening_is_not_run(tmp_path):
    artifact = write_program(tmp_path / "a")
    (artifact.root / "executables/step.bin").write_bytes(b"cos\nsystem\n(S'echo unsafe'\ntR.")
    with pytest.raises(ArtifactError, match=r"executables/step\.bin is damaged"):
        load_or_rebuild(artifact, "step", cpu_target(), unexpected)


def test_another_platform_is_refused(artifact):
    lines = []
    with pytest.raises(ArtifactError, match="compiled for cpu and cannot run on cuda"):
        load_or_rebuild(artifact, "step", H100_SXM, lines.append, store=False)
    assert "target is" in lines[0]


def test_loading_in_the_background(artifact):
    programs = load_in_background(artifact, ["again", "step"], cpu_target(), unexpected)
    assert list(programs) == ["again", "step"]
    for value, program in enumerate(programs.values()):
        np.testing.assert_array_equal(program.result()(*arguments(value))[1], np.arange(8) + value)


def test_a_failure_in_the_background_reaches_the_caller(artifact):
    with pytest.raises(ArtifactError, match="no program 'verify'"):
        load_in_background(artifact, ["verify"], cpu_target(), unexpected)["verify"].result()


def test_key_tells_what_matters(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_b=1 --xla_dump_to=/tmp/x --xla_a=2")
    key = executable_key(H100_SXM, {"xla_gpu_enable_triton_gemm": False})
    assert key["xla_flags"] == "--xla_a=2 --xla_b=1"
    assert key["options"] == '{"xla_gpu_enable_triton_gemm": false}'
    assert key["jax"] == jax.__version__
    assert key["target"].startswith("cuda: NVIDIA H100")
    assert key != executable_key(cpu_target(), {"xla_gpu_enable_triton_gemm": False})


def test_compiler_options_reach_the_compiler():
    exported = export_program(step, *SPECS, donate=(1,))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        compile_program(exported, donate=(1,), options={"no_such_option": True})


def test_a_process_that_ends_while_it_loads():
    """The load it is at is finished, since XLA aborts a process that ends under one; the next is not begun."""
    script = """
        import time
        from jaxserve import executables

        def load(artifact, name, target, report, *, store):
            time.sleep(0.5)
            print(name, flush=True)

        executables.load_or_rebuild = load
        executables.load_in_background(None, ["first", "second"], None, print)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "first\n", "")
