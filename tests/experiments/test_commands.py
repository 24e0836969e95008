"""Experiments as people start them."""

import subprocess
import sys

import pytest


def start(name: str, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", f"jaxserve.experiments.{name}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_help_lists_every_flag_of_the_experiment_and_no_other():
    _, text = start("alpha_sweep", "--help")
    flags = {line.split(":")[0].strip().removeprefix("--") for line in text.splitlines() if line.startswith("  --")}
    assert {"model", "text", "windows", "calibration", "alphas", "pipeline", "json", "plot", "activations"} <= flags
    assert not {"recipes", "against", "scheme"} & flags


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("alpha_sweep", ["--recipes=f32"], "alpha_sweep: --recipes is not a flag of this experiment"),
        (
            "speculation",
            ["--artifact=a", "--questions=q", "--model=m"],
            "speculation: --model is not a flag of this experiment",
        ),
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
