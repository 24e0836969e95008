"""Compiles every Pallas kernel over its shapes for a GPU that need not be there, and reports what ptxas says.

Fails where a register is spilled, or shared memory is more than a block may ask for. Speed is not measured.
"""

import argparse
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
    from jaxserve.pallas_kernels.dense_matmul import op as dense
    from jaxserve.pallas_kernels.dense_matmul import shapes as dense_shapes
    from jaxserve.pallas_kernels.paged_attention import op as attention
    from jaxserve.pallas_kernels.paged_attention import shapes as attention_shapes
    from jaxserve.pallas_kernels.quantized_matmul import op as quantized
    from jaxserve.pallas_kernels.quantized_matmul import shapes as quantized_shapes

    gpu = AbsentGpu(target)
    for op, shapes in (
        (dense.OP, dense_shapes),
        (quantized.OP, quantized_shapes),
        (attention.OP, attention_shapes),
    ):
        for case in shapes.cases("bfloat16", packed=False) if shapes is quantized_shapes else shapes.cases("bfloat16"):
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


def failures(rows: Sequence[dict[str, Any]], limit: int) -> list[str]:
    """What no kernel may do: spill, take more shared memory than a block may, or leave no report."""
    found = []
    for row in rows:
        if "refused" not in row and (row["spills"] or row["shared_memory"] > limit or not row["kernels"]):
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
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="jaxserve-") as folder:
        # Mosaic reads these variables when it is loaded, which compiling does.
        os.environ.update(_DUMP | {"MOSAIC_GPU_DUMP_TO": folder})
        try:
            rows = list(compile_cases(GPUS[options.target], options.match, pathlib.Path(folder)))
        except UserError as error:
            print(error, file=sys.stderr)
            return 2
    show(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    wrong = failures(rows, GPUS[options.target].shared_memory_bytes)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
