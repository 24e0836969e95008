"""Experiments as people start them."""

import subprocess
import sys

import pytest


def start(name: str, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", f"jaxserve.experiments.{name}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_help_lists_every_flag_of_the_experiment_and_no_other():
    _, text = start("salient", "--help")
    flags = {line.split(":")[0].strip().removeprefix("--") for line in text.splitlines() if line.startswith("  --")}
    assert {"model", "text", "windows", "calibration", "scheme", "fraction", "json", "plot", "activations"} <= flags
    assert not {"recipes", "against", "pipeline"} & flags


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("salient", ["--recipes=f32"], "salient: --recipes is not a flag of this experiment"),
        (
            "layer_error",
            ["--json=/no/such/folder/a.json"],
            "layer_error: --json /no/such/folder/a.json: there is no such",
        ),
    ],
)
def test_what_cannot_be_done_is_one_line(name, arguments, message):
    code, text = start(name, *arguments)
    assert code == 2 and text.startswith(message) and text.count("\n") == 1
