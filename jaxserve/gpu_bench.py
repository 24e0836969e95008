"""What a GPU makes of every kernel: agreement with the reference, then time against the ceilings measured beside it;
after them steps of whole models with random weights, and PyTorch's kernels where it is installed.

Rows are written as they are made, and those that a file already holds are left out: a run that was cut off, or whose
minutes were over, goes on where it was. `jaxserve bench ARTIFACT` measures an artifact that was compiled for the card.
"""

import argparse
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.gpu_end_to_end import measure_model, torch_peers
from jaxserve.gpu_steps import MODELS, RECIPES
from jaxserve.pallas_kernels import OPS, Op
from jaxserve.pallas_kernels._bench import measure_ceilings, median_seconds, operand_sets
from jaxserve.pallas_kernels._shapes import Case
from jaxserve.pallas_kernels._target import compiling_for
from jaxserve.pallas_kernels.add_rms_norm import shapes as add_norm_shapes
from jaxserve.pallas_kernels.dense_matmul import shapes as dense_shapes
from jaxserve.pallas_kernels.kv_write import shapes as write_shapes
from jaxserve.pallas_kernels.paged_attention import shapes as attention_shapes
from jaxserve.pallas_kernels.quantized_matmul import shapes as quantized_shapes
from jaxserve.pallas_kernels.quantized_norm import shapes as quantized_norm_shapes
from jaxserve.pallas_kernels.rms_norm import shapes as norm_shapes
from jaxserve.targets import GPUS, H100_SXM, Target, cpu_target

Job = Callable[[], dict[str, Any]]

CALLS = 20
"""Calls that are sent off one after the other for one measurement, so that the cost of sending is not what is timed."""

ERROR = 2.0**-7
"""How far a result in bf16 may be from the reference, relative to the largest number: one unit in the last place."""

CODE_ERRORS = {"int8": 1.01 / 127, "float8_e4m3fn": 1.01 / 14}
"""The same for codes: the next one, where a number lay between two of them."""

SHAPES = {
    "dense_matmul": dense_shapes,
    "quantized_matmul": quantized_shapes,
    "paged_attention": attention_shapes,
    "rms_norm": norm_shapes,
    "add_rms_norm": add_norm_shapes,
    "quantized_norm": quantized_norm_shapes,
    "kv_write": write_shapes,
}


def target_of(device: Any) -> Target:
    """The card's description by its name; of an unknown card the H100's, on a CPU this machine's."""
    if device.platform == "cpu":
        return cpu_target()
    return next((gpu for gpu in GPUS.values() if gpu.device_kind == device.device_kind), H100_SXM)


def measure(op: Op, case: Case, target: Target, ceilings: tuple[float, float], repeats: int) -> dict[str, Any]:
    """One row: who computed it, its largest error, and for kernels the time and share of the ceiling that binds."""
    with compiling_for(target):
        choice = op.choose(target.platform, *case.specs, **case.params)
    row: dict[str, Any] = {"kernel": choice.name, "refused": "; ".join(reason for _, reason in choice.refusals)}
    if choice.name == "reference":
        return row
    run, sets = jax.jit(choice.function, donate_argnums=tuple(range(case.updated))), list(operand_sets(case))
    expected = jax.jit(lambda *operands: op.reference(*operands, **case.params))(*sets[0])

    def call(index: int) -> Any:
        found = run(*sets[index])
        if case.updated:
            sets[index] = (*found, *sets[index][case.updated :])
        return found

    def calls() -> Any:
        """The last results of each set: those before them may have been given away."""
        return [call(index % len(sets)) for index in range(CALLS)][-len(sets) :]

    leaves = jax.tree.leaves(expected)
    errors = [*map(_error, jax.tree.leaves(call(0)), leaves)]
    seconds = median_seconds(calls, repeats) / CALLS
    least = max(case.bytes / ceilings[0], case.flops / ceilings[1])
    return row | {
        "error": max(errors),
        "agrees": all(
            error <= CODE_ERRORS.get(leaf.dtype.name, ERROR) for error, leaf in zip(errors, leaves, strict=True)
        ),
        "microseconds": seconds * 1e6,
        "of_ceiling": least / seconds,
    }


def _error(found: Any, expected: Any) -> float:
    """The largest difference, relative to the largest number."""
    wide = [np.asarray(array, np.float32) for array in (found, expected)]
    return float(np.abs(wide[0] - wide[1]).max() / max(np.abs(wide[1]).max(), 1e-30))


def jobs(options: argparse.Namespace, target: Target, ceilings: tuple[float, float]) -> Iterator[tuple[str, Job]]:
    """What is to be measured, by name, in its order: what matters most comes first."""
    cases = []
    for name, shapes in SHAPES.items():
        packed = {"packed": False} if shapes is quantized_shapes and target.platform == "cuda" else {}
        cases += [(name, case) for case in shapes.cases("bfloat16", **packed)]
    large, small = ([each for each in cases if ("llama" in each[1].name) == wide] for wide in (True, False))
    for name, case in large:
        yield f"{name} {case.name}", partial(measure, OPS[f"jaxserve.{name}"], case, target, ceilings, options.repeats)
    for batch, recipe in itertools.product(options.batches, RECIPES):
        yield (
            f"step {options.model} {recipe} decode b={batch}",
            partial(measure_model, options.model, recipe, batch, batch, options.context, target, options.repeats),
        )
    for recipe in RECIPES:
        tokens = min(512, options.context)
        yield (
            f"step {options.model} {recipe} prefill {tokens}",
            partial(measure_model, options.model, recipe, tokens, 1, options.context, target, options.repeats),
        )
    for name, case in small:
        yield f"{name} {case.name}", partial(measure, OPS[f"jaxserve.{name}"], case, target, ceilings, options.repeats)


def show(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """The rows as a table in Markdown."""
    print("| what | kernel | microseconds | of the ceiling | error | launches |\n|" + " --- |" * 6)
    for key, row in rows.items():
        if key == "device":
            continue
        time, share = row.get("microseconds"), row.get("of_ceiling", row.get("of_roofline"))
        launches = ", ".join(f"{name} {number}" for name, number in row.get("launches", {}).items())
        cells = (
            key,
            row.get("kernel", ""),
            "" if time is None else f"{time:.1f}",
            "" if share is None else f"{share:.0%}",
            "" if "error" not in row else f"{row['error']:.1e}",
            launches,
        )
        print("| " + " | ".join(cells) + " |")


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m jaxserve.gpu_bench`: 1 if a kernel disagrees with its reference."""
    parser = argparse.ArgumentParser(prog="python -m jaxserve.gpu_bench", description=__doc__)
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("gpu_bench.json"), help="file of the rows")
    parser.add_argument("--match", default="", help="only what holds this text in its name")
    parser.add_argument("--repeats", type=int, default=20, help="measurements of which the median counts (default 20)")
    parser.add_argument("--minutes", type=float, default=7.0, help="start nothing after so many (default 7)")
    parser.add_argument("--model", default="llama-3-8b", choices=tuple(MODELS), help="whose steps are timed")
    parser.add_argument("--batches", type=_numbers, default=(1, 16, 64, 256), help="sequences that decode at once")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a sequence (default 1024)")
    options = parser.parse_args(arguments)
    device, start = jax.devices()[0], time.monotonic()
    target, rows = target_of(device), json.loads(options.json.read_text()) if options.json.exists() else {}
    ceilings = measure_ceilings(jnp.bfloat16, options.repeats)
    rows["device"] = {
        "kind": device.device_kind,
        "described_as": target.name,
        "bytes_per_second": ceilings[0],
        "bf16_operations_per_second": ceilings[1],
    }

    def keep(key: str, row: dict[str, Any]) -> None:
        rows[key] = row
        options.json.write_text(json.dumps(rows, indent=1))
        print(key, json.dumps(row), flush=True)

    for key, row in torch_peers(options.repeats).items():
        if options.match in key and key not in rows:
            keep(key, row)
    left = [(key, job) for key, job in jobs(options, target, ceilings) if options.match in key and key not in rows]
    while left and time.monotonic() - start < options.minutes * 60:
        key, job = left.pop(0)
        keep(key, job())
    show(rows)
    if left:
        print(f"{len(left)} rows are left; the same command measures them", file=sys.stderr)
    wrong = [key for key, row in rows.items() if not row.get("agrees", True)]
    print("\n".join(f"disagrees with its reference: {key}" for key in wrong), file=sys.stderr)
    return 1 if wrong else 0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    sys.exit(main())
