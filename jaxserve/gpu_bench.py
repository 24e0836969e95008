"""What a GPU makes of every kernel: agreement with the reference, then time against the ceilings measured beside it.

Rows are written as they are made, and those that a file already holds are left out: a run that was cut off goes on
where it was. End to end, `jaxserve bench ARTIFACT` measures an artifact that was compiled for the card.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels import OPS, Op
from jaxserve.pallas_kernels._bench import measure_ceilings, median_seconds, operand_sets
from jaxserve.pallas_kernels._shapes import Case
from jaxserve.pallas_kernels._target import compiling_for
from jaxserve.pallas_kernels.dense_matmul import shapes as dense_shapes
from jaxserve.pallas_kernels.paged_attention import shapes as attention_shapes
from jaxserve.pallas_kernels.quantized_matmul import shapes as quantized_shapes
from jaxserve.targets import GPUS, H100_SXM, Target, cpu_target

CALLS = 20
"""Calls that are sent off one after the other for one measurement, so that the cost of sending is not what is timed."""

ERROR = 2.0**-7
"""How far a result in bf16 may be from the reference, relative to the largest number: one unit in the last place."""

SHAPES = {"dense_matmul": dense_shapes, "quantized_matmul": quantized_shapes, "paged_attention": attention_shapes}


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
    run, sets = jax.jit(choice.function), operand_sets(case)
    expected = jax.jit(lambda *operands: op.reference(*operands, **case.params))(*sets[0])
    wide = [np.asarray(array, np.float32) for array in (run(*sets[0]), expected)]
    error = float(np.abs(wide[0] - wide[1]).max() / max(np.abs(wide[1]).max(), 1e-30))
    seconds = median_seconds(lambda: [run(*sets[i % len(sets)]) for i in range(CALLS)], repeats) / CALLS
    least = max(case.bytes / ceilings[0], case.flops / ceilings[1])
    return row | {
        "error": error,
        "agrees": error <= ERROR,
        "microseconds": seconds * 1e6,
        "of_ceiling": least / seconds,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m jaxserve.gpu_bench`: 1 if a kernel disagrees with its reference."""
    parser = argparse.ArgumentParser(prog="python -m jaxserve.gpu_bench", description=__doc__)
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("gpu_bench.json"), help="file of the rows")
    parser.add_argument("--match", default="", help="only shapes whose op and name hold this text")
    parser.add_argument("--repeats", type=int, default=20, help="measurements of which the median counts (default 20)")
    options = parser.parse_args(arguments)
    device = jax.devices()[0]
    target, rows = target_of(device), json.loads(options.json.read_text()) if options.json.exists() else {}
    ceilings = measure_ceilings(jnp.bfloat16, options.repeats)
    rows["device"] = {
        "kind": device.device_kind,
        "described_as": target.name,
        "bytes_per_second": ceilings[0],
        "bf16_operations_per_second": ceilings[1],
    }
    for name, shapes in SHAPES.items():
        packed = {"packed": False} if shapes is quantized_shapes and target.platform == "cuda" else {}
        for case in shapes.cases("bfloat16", **packed):
            key = f"{name} {case.name}"
            if options.match in key and key not in rows:
                rows[key] = measure(OPS[f"jaxserve.{name}"], case, target, ceilings, options.repeats)
                options.json.write_text(json.dumps(rows, indent=1))
                print(key, json.dumps(rows[key]), flush=True)
    wrong = [key for key, row in rows.items() if not row.get("agrees", True)]
    print("\n".join(f"disagrees with its reference: {key}" for key in wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
