"""Compiles every Pallas kernel over its shapes, or whole steps of models, for a GPU that need not be there, and reports
what ptxas says.

Fails where a register is spilled, shared memory is more than a block may ask for, or a step copies its cache or needs
many temporaries. Speed is not measured.
"""

import argparse
import importlib
import itertools
import json
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from jaxserve.errors import UserError
from jaxserve.targets import GPUS, Gpu

_DUMP = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_PTX": "1", "JAX_PLATFORMS": "cpu"}
KERNELS = (
    *("dense_matmul", "quantized_matmul", "paged_attention", "kv_write"),
    *("rms_norm", "add_rms_norm", "quantized_norm"),
)
"""The ops with kernels for GPUs."""

COLUMNS = ("op", "shape", "kernel", "registers", "spills", "shared_memory", "temporaries", "refused")


def report(folder: pathlib.Path) -> dict[str, int]:
    """The worst of what ptxas says of the kernels dumped in a folder, which is emptied."""
    found = {"kernels": 0, "registers": 0, "spills": 0, "shared_memory": 0}
    for path in sorted(folder.glob("*.ptxas")):
        text = path.read_text()
        resources = path.with_suffix(".resources.txt").read_text()
        found["kernels"] += 1
        for name, pattern, source in (
            ("registers", r"Used (\d+) registers", text),
            ("spills", r"(\d+) bytes spill", text),
            ("shared_memory", r"smem_scratch_bytes=(\d+)", resources),
        ):
            found[name] = max(found[name], *map(int, re.findall(pattern, source) or [0]))
    for path in folder.iterdir():
        path.unlink()
    return found


def compile_cases(target: Gpu, match: str, folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """A row for each shape of each op that has a kernel: who computes it, and ptxas's report."""
    from jaxserve.absent import AbsentGpu
    from jaxserve.pallas_kernels import OPS

    gpu = AbsentGpu(target)
    for name in KERNELS:
        op = OPS[f"jaxserve.{name}"]
        shapes = importlib.import_module(f"jaxserve.pallas_kernels.{name}.shapes")
        packed = {"packed": False} if name == "quantized_matmul" else {}  # panels are the CPU's
        for case in shapes.cases("bfloat16", **packed):
            if match not in f"{op.name} {case.name}":
                continue
            with gpu.lowering():
                choice = op.choose("cuda", *case.specs, **case.params)
            row = {"op": op.name, "shape": case.name, "kernel": choice.name, "bytes": case.bytes}
            if choice.name == "reference":
                yield row | {"refused": "; ".join(reason for _, reason in choice.refusals)}
                continue
            compiled = gpu.compile(choice.function, *case.specs)
            yield row | report(folder) | {"temporaries": compiled.memory_analysis().temp_size_in_bytes}


STEPS = {"decode": (16, 16), "prefill": (512, 1)}
"""Tokens and sequences of the steps that are compiled."""

STEP_CONTEXT = 2048
MOST_TEMPORARIES = 1 << 30
"""Bytes: what a step of those sizes may need beside its arguments; a dequantized layer would show."""


def compile_steps(target: Gpu, match: str, layers: int, folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """A row for each step of each model and recipe; with `layers`, of the models' first ones."""
    from jaxserve.absent import AbsentGpu
    from jaxserve.gpu_steps import MODELS, RECIPES, make_step
    from jaxserve.programs import chosen_kernels

    gpu = AbsentGpu(target)
    for model, recipe, (kind, (tokens, seqs)) in itertools.product(MODELS, RECIPES, STEPS.items()):
        name = f"{model} {recipe} {kind} {tokens}x{seqs}"
        if match not in name or model == "tiny":
            continue
        step = make_step(model, recipe, tokens, seqs, STEP_CONTEXT, target, layers)
        compiled = gpu.compile(step.function, *step.specs, donate=(1, 2))
        memory = compiled.memory_analysis()
        yield (
            {"op": "step", "shape": name, "kernel": f"{layers or 'all'} layers"}
            | report(folder)
            | {
                "temporaries": memory.temp_size_in_bytes,
                "cache": step.cache_bytes,
                "aliased": memory.alias_size_in_bytes,
                "chosen": chosen_kernels(step.graph, target),
            }
        )


def failures(rows: Sequence[dict[str, Any]], limit: int) -> list[str]:
    """What no kernel may do: spill, take more shared memory than a block may, or leave no report; and what no step may:
    return a copy of its cache, or need many temporaries."""
    found = []
    for row in rows:
        bad = "refused" not in row and (row["spills"] or row["shared_memory"] > limit or not row["kernels"])
        if bad or row.get("aliased", 0) < row.get("cache", 0) or row.get("temporaries", 0) > MOST_TEMPORARIES:
            found.append(f"{row['op']} {row['shape']}: {row}")
    return found


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The rows as a table in Markdown."""
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS))
    for row in rows:
        print("| " + " | ".join(str(row.get(column, "")) for column in COLUMNS) + " |")


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m jaxserve.gpu_report`: 1 if a kernel fails, 2 if nothing can be compiled here."""
    parser = argparse.ArgumentParser(prog="python -m jaxserve.gpu_report", description=__doc__)
    parser.add_argument("--target", default="h100-sxm", choices=tuple(GPUS))
    parser.add_argument("--match", default="", help="only shapes whose op and name hold this text")
    parser.add_argument("--json", type=pathlib.Path, help="file to write everything to")
    parser.add_argument("--steps", action="store_true", help="compile whole steps of models, not kernels over shapes")
    parser.add_argument("--layers", type=int, default=0, help="with --steps: only so many layers (default: all)")
    options = parser.parse_args(arguments)
    target = GPUS[options.target]
    with tempfile.TemporaryDirectory(prefix="jaxserve-") as folder:
        # Mosaic reads these variables when it is loaded, which compiling does.
        os.environ.update(_DUMP | {"MOSAIC_GPU_DUMP_TO": folder})
        try:
            made = (
                compile_steps(target, options.match, options.layers, pathlib.Path(folder))
                if options.steps
                else compile_cases(target, options.match, pathlib.Path(folder))
            )
            rows = []
            for row in made:
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
        except UserError as error:
            print(error, file=sys.stderr)
            return 2
    show(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    wrong = failures(rows, target.shared_memory_bytes)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
