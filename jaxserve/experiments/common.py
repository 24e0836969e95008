"""What all experiments share: the model and what to calibrate on, tables, files, and how a command ends."""

import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from types import ModuleType
from typing import Any

from absl import app, flags

from jaxserve.calibration import CalibrationOptions
from jaxserve.charts import write_chart
from jaxserve.errors import UserError

MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "what `jaxserve compile` takes: a folder, file or name")
CALIBRATION = flags.DEFINE_string("calibration", None, "UTF-8 text to calibrate on (default: the built-in one)")
SEQUENCES = flags.DEFINE_integer("calibration_sequences", 64, "sequences of the calibration text", lower_bound=1)
LENGTH = flags.DEFINE_integer("calibration_length", 512, "tokens of each of them", lower_bound=1)
ACTIVATIONS = flags.DEFINE_enum("activations", None, ["f32", "bf16"], "of named recipes (default: what each says)")
JSON = flags.DEFINE_string("json", None, "file to write everything to")
PLOT = flags.DEFINE_string("plot", None, "file to draw to, .svg")


@dataclasses.dataclass(frozen=True)
class Settings:
    """On what an experiment runs."""

    model: str
    calibration: CalibrationOptions

    @staticmethod
    def from_flags() -> "Settings":
        calibration = CalibrationOptions(
            text=pathlib.Path(CALIBRATION.value) if CALIBRATION.value else None,
            sequences=SEQUENCES.value,
            length=LENGTH.value,
        )
        return Settings(MODEL.value, calibration)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))


def write_json(path: str | pathlib.Path, data: Mapping[str, Any]) -> None:
    """Writes a result with the versions it was measured with; numbers that are not finite become null."""
    versions = {name: version(name) for name in ("jaxserve", "jax", "jaxlib")}
    text = json.dumps(_finite({**data, "versions": versions}), indent=1, allow_nan=False)
    try:
        pathlib.Path(path).write_text(text + "\n")
    except OSError as error:
        raise UserError(f"--json {path}: {error.strerror}") from None


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_outputs(data: Mapping[str, Any], chart: str) -> None:
    """Writes what --json and --plot ask for."""
    if JSON.value:
        write_json(JSON.value, data)
    if PLOT.value:
        write_chart(pathlib.Path(PLOT.value), chart)


def _check_flags(known: Sequence[str], idle: Sequence[str]) -> None:
    for module, defined in flags.FLAGS.flags_by_module_dict().items():
        if module.startswith("jaxserve.experiments."):
            for flag in defined:
                if flag.present and (module not in known or flag.name in idle):
                    raise UserError(f"--{flag.name} is not a flag of this experiment; --help lists them")


def _check_outputs() -> None:
    """Refuses files that cannot be written now and not after the work; UserError names the flag."""
    for flag, value in (("--json", JSON.value), ("--plot", PLOT.value)):
        if value and not pathlib.Path(value).absolute().parent.is_dir():
            raise UserError(f"{flag} {value}: there is no such folder")
    if PLOT.value and not PLOT.value.endswith(".svg"):
        raise UserError(f"--plot {PLOT.value}: charts are written as .svg")


def run_main(experiment: Callable[[Settings], None], *modules: ModuleType, idle: Sequence[str] = ()) -> None:
    """The end of an experiment's module: reads flags and runs `experiment(settings)`.

    Its flags are its own and those of this module and of `modules`, without those that `idle` names; --help shows them,
    and others that happen to be defined are refused. A UserError is one line and exit code 2.
    """
    known = (sys.modules[__name__], *modules)
    for module in known:
        for flag in flags.FLAGS.get_key_flags_for_module(module):
            if flag.name not in idle:
                flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)

    def main(arguments: Sequence[str]) -> int:
        try:
            if len(arguments) > 1:
                raise UserError(f"unexpected argument {arguments[1]!r}: everything is a --flag=value")
            _check_flags([module.__name__ for module in known], idle)
            _check_outputs()
            experiment(Settings.from_flags())
        except UserError as error:
            print(f"{pathlib.Path(arguments[0]).stem}: {error}", file=sys.stderr)
            return 2
        return 0

    app.run(main)
