"""Artifacts are written whole or not at all, and damage is found and named when one is opened."""

import contextlib
import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
from typing import cast

import numpy as np
import pytest

from jaxserve import manifest as manifests
from jaxserve.artifact import ArtifactWriter, open_artifact
from jaxserve.errors import UserError
from jaxserve.manifest import ArtifactError
from jaxserve.passes.weights import Source
from jaxserve.spill import Spill
from tests.artifact_sample import FILES, sample_manifest, write_sample


def edit_manifest(directory: pathlib.Path, **changes: object) -> None:
    path = directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_manifest_round_trip():
    manifest = sample_manifest()
    assert manifests.from_json(manifests.to_json(manifest), "m") == manifest


def test_what_was_written_is_what_opens(tmp_path):
    written = write_sample(tmp_path / "a")
    artifact = open_artifact(tmp_path / "a")
    assert artifact.manifest == written
    assert set(written.files) == set(FILES)
    assert artifact.read("executables/step-t8-s4.bin") == b"machine code"
    assert artifact.manifest.program("step-t8-s4").donate == (1, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_unknown_program_lists_the_known(tmp_path):
    with pytest.raises(ArtifactError, match=r"no program 'verify'.*step-t8-s4"):
        sample_manifest().program("verify")


# Interrupted writing ------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("bad layer"), KeyboardInterrupt(), SystemExit(143)])
def test_an_exception_leaves_nothing(tmp_path, error):
    with pytest.raises(type(error)), ArtifactWriter(tmp_path / "a") as writer:
        writer.write("graph/000_trace.txt", "half")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_an_exception_keeps_the_older_artifact(tmp_path):
    write_sample(tmp_path / "a")
    with pytest.raises(ValueError, match="bad layer"), ArtifactWriter(tmp_path / "a") as writer:
        writer.write("graph/000_trace.txt", "half")
        raise ValueError("bad layer")
    assert open_artifact(tmp_path / "a").read("graph/000_trace.txt") == b"graph\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_leaving_without_finish_leaves_nothing(tmp_path):
    with ArtifactWriter(tmp_path / "a") as writer:
        writer.write("graph/000_trace.txt", "stopped after a pass")
    assert list(tmp_path.iterdir()) == []


WRITE_AND_WAIT = textwrap.dedent("""
    import sys, time
    from jaxserve.artifact import ArtifactWriter
    with ArtifactWriter(sys.argv[1]) as writer:
        writer.write("weights/part", b"x" * 1000)
        print("writing", flush=True)
        time.sleep(60)
""")


def start_writer(directory: pathlib.Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE_AND_WAIT, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_that_a_destructor_swallowed_still_ends_the_writer(tmp_path, number, error):
    with pytest.raises(error), ArtifactWriter(tmp_path / "a") as writer:
        with contextlib.suppress(BaseException):  # as Python does in __del__
            signal.raise_signal(number)
        writer.write("graph/000_trace.txt", "graph")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_leaves_nothing(tmp_path, number):
    with start_writer(tmp_path / "a") as process:
        process.send_signal(number)
        assert process.wait(30) != 0
    assert list(tmp_path.iterdir()) == []


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path):
    with start_writer(tmp_path / "a") as process:
        process.kill()
    assert [path.name.startswith(".a.partial-") for path in tmp_path.iterdir()] == [True]
    write_sample(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_writer_leaves_a_living_one_alone(tmp_path):
    with start_writer(tmp_path / "a") as process:
        write_sample(tmp_path / "a")
        assert len(list(tmp_path.glob(".a.partial-*/weights/part"))) == 1
        process.terminate()


def test_killed_between_the_two_renames_the_older_artifact_comes_back(tmp_path):
    write_sample(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / ".a.replaced")
    with ArtifactWriter(tmp_path / "a"):
        pass
    assert open_artifact(tmp_path / "a").read("graph/000_trace.txt") == b"graph\n"


def test_sigterm_is_given_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with ArtifactWriter(tmp_path / "a"):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


# Replacing ----------------------------------------------------------------------------------------


def test_an_artifact_is_replaced(tmp_path):
    write_sample(tmp_path / "a", {"graph/001_extra.txt": "old"})
    write_sample(tmp_path / "a", {"graph/000_trace.txt": "new\n"})
    artifact = open_artifact(tmp_path / "a")
    assert artifact.read("graph/000_trace.txt") == b"new\n"
    assert not (tmp_path / "a/graph/001_extra.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_empty_folder_is_replaced(tmp_path):
    (tmp_path / "a").mkdir()
    write_sample(tmp_path / "a")
    open_artifact(tmp_path / "a")


def test_somebodys_folder_is_refused_and_kept(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ArtifactError, match="not empty and not an artifact"), ArtifactWriter(tmp_path):
        pytest.fail("must refuse before any work is done")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_folder_that_fills_up_meanwhile_is_kept(tmp_path):
    with pytest.raises(ArtifactError, match="not empty"), ArtifactWriter(tmp_path / "a") as writer:
        for name, data in FILES.items():
            writer.write(name, data)
        (tmp_path / "a").mkdir()
        (tmp_path / "a/notes").write_text("mine")
        writer.finish(sample_manifest())
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["notes"]


def test_a_file_in_the_place_is_refused(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(ArtifactError, match="not a folder"):
        write_sample(tmp_path / "a")


def test_an_unwritable_place_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="cannot write beside"):
        write_sample(tmp_path / "file" / "a")


def test_a_program_without_its_file_is_refused(tmp_path):
    message = r"step-t8-s4 names the file step/step-t8-s4\.export"
    with pytest.raises(ArtifactError, match=message), ArtifactWriter(tmp_path / "a") as writer:
        writer.finish(sample_manifest())
    assert list(tmp_path.iterdir()) == []


# Damage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "truncated", "corrupted", "longer"])
def test_damage_is_found_and_named(tmp_path, name, damage):
    write_sample(tmp_path / "a")
    path = tmp_path / "a" / name
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"truncated": data[:-1], "corrupted": b"?" + data[1:], "longer": data + b"\0"}[damage])
    with pytest.raises(UserError, match=name) as caught:
        open_artifact(tmp_path / "a")
    assert "\n" not in str(caught.value)


def test_weights_can_be_left_unhashed(tmp_path):
    write_sample(tmp_path / "a")
    path = tmp_path / "a/weights/part-00000/d/data"
    path.write_bytes(b"?" * 1000)
    open_artifact(tmp_path / "a", verify_weights=False)
    path.write_bytes(b"?" * 999)
    with pytest.raises(ArtifactError, match="999 bytes instead of 1000"):
        open_artifact(tmp_path / "a", verify_weights=False)


def test_a_file_that_changes_after_opening_is_not_read(tmp_path):
    write_sample(tmp_path / "a")
    artifact = open_artifact(tmp_path / "a")
    (tmp_path / "a/executables/step-t8-s4.bin").write_bytes(b"malign code!")
    with pytest.raises(ArtifactError, match=r"executables/step-t8-s4\.bin is damaged"):
        artifact.read("executables/step-t8-s4.bin")


def test_an_unlisted_file_is_not_read(tmp_path):
    write_sample(tmp_path / "a")
    (tmp_path / "a/executables/extra.bin").write_bytes(b"malign code")
    with pytest.raises(ArtifactError, match="not listed"):
        open_artifact(tmp_path / "a").read("executables/extra.bin")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"schema": 1}', '{"model": {}}'],
    ids=["empty", "cut", "list", "null", "int", "none"],
)
def test_what_is_no_manifest_is_refused(tmp_path, text):
    write_sample(tmp_path / "a")
    (tmp_path / "a/manifest.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        open_artifact(tmp_path / "a")


def test_no_folder_and_no_manifest(tmp_path):
    with pytest.raises(ArtifactError, match="jaxserve compile MODEL -o"):
        open_artifact(tmp_path / "a")
    with pytest.raises(ArtifactError, match=r"has no manifest\.json"):
        open_artifact(tmp_path)


@pytest.mark.parametrize("schema", ["1.0", "0.9", "10.0", "one"])
def test_an_unknown_major_is_refused(tmp_path, schema):
    write_sample(tmp_path / "a")
    edit_manifest(tmp_path / "a", schema=schema)
    with pytest.raises(ArtifactError, match=f"has schema {schema}.*reads 5.0"):
        open_artifact(tmp_path / "a")


def test_unknown_fields_of_the_same_major_are_ignored(tmp_path):
    written = write_sample(tmp_path / "a")
    programs = [{**program, "speculative": True} for program in json.loads(manifests.to_json(written))["programs"]]
    edit_manifest(tmp_path / "a", schema="5.7", adapters=["x"], programs=programs)
    assert open_artifact(tmp_path / "a").manifest.programs == written.programs


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [("recipe", 4, "field recipe"), ("limits", {"max_num_seqs": 4}, "field limits.max_model_len")],
)
def test_a_wrong_field_is_named(tmp_path, field, value, named):
    write_sample(tmp_path / "a")
    edit_manifest(tmp_path / "a", **{field: value})
    with pytest.raises(ArtifactError, match=named) as caught:
        open_artifact(tmp_path / "a")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "weights/../../secret", "a\\..\\secret", ""])
def test_names_that_lead_out_are_refused(tmp_path, name):
    written = write_sample(tmp_path / "a")
    (tmp_path / "secret").write_text("secret")
    files = json.loads(manifests.to_json(written))["files"]
    edit_manifest(tmp_path / "a", files=files | {name: {"size": 6, "sha256": "0" * 64}})
    with pytest.raises(ArtifactError, match="leads out of the artifact"):
        open_artifact(tmp_path / "a")


@pytest.mark.parametrize("folder", [False, True])
def test_links_that_lead_out_are_refused(tmp_path, folder):
    write_sample(tmp_path / "a")
    path = tmp_path / "a/tokenizer" if folder else tmp_path / "a/tokenizer/tokenizer.json"
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(ArtifactError, match="reached through a link"):
        open_artifact(tmp_path / "a")


def test_the_writer_stays_inside_too(tmp_path):
    with ArtifactWriter(tmp_path / "a") as writer, pytest.raises(ArtifactError, match="leads out"):
        writer.write("../b", "")


# Extending ----------------------------------------------------------------------------------------


def test_a_rebuilt_executable_is_kept(tmp_path):
    write_sample(tmp_path / "a")
    open_artifact(tmp_path / "a").add_executable("step-t8-s4", {"jaxlib": "9"}, b"newer code")
    artifact = open_artifact(tmp_path / "a")
    (cached,) = artifact.manifest.program("step-t8-s4").executables
    assert cached.key == {"jaxlib": "9"}
    assert artifact.read(cached.file) == b"newer code"
    assert not list((tmp_path / "a").rglob(".*"))


def test_opening_through_a_link_and_a_relative_path(tmp_path, monkeypatch):
    write_sample(tmp_path / "a")
    (tmp_path / "link").symlink_to("a")
    monkeypatch.chdir(tmp_path)
    assert open_artifact("link").read("tokenizer/tokenizer.json") == b"{}"
    write_sample(pathlib.Path("link"), {"tokenizer/tokenizer.json": "{ }"})
    assert os.path.islink("link")
    assert open_artifact("a").read("tokenizer/tokenizer.json") == b"{ }"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "weights"),
        ValueError("UNKNOWN: Error writing to file: [OS error 28: ENOSPC No space left on device]"),
    ],
)
def test_a_full_disk_leaves_one_line_and_nothing_else(tmp_path: pathlib.Path, error: Exception):
    refused = pytest.raises(ArtifactError, match=r"a: no space is left there; nothing was written")
    with refused, ArtifactWriter(tmp_path / "a") as writer:
        writer.write("weights", "some")
        raise error
    assert not any(tmp_path.iterdir())


def test_what_calibration_puts_aside_says_that_the_disk_is_full(tmp_path: pathlib.Path):
    spill = Spill(tmp_path / "spill", cast(Source, None))
    (tmp_path / "spill" / "000000").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        spill.put("w", np.zeros(1 << 20, np.float32))
