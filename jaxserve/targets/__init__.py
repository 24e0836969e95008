"""What a program is compiled for: the platform and the few numbers that kernels and cache keys need.

Kernels take core counts and limits from here and never from the default device, so that a program can be compiled
for hardware this machine does not have. Nothing here imports JAX.
"""

import os
import pathlib
import platform

from jaxserve.errors import UserError
from jaxserve.targets.gpus import GPUS, H100_SXM, Gpu
from jaxserve.targets.target import Target

__all__ = ["GPUS", "H100_SXM", "Gpu", "Target", "cpu_target", "find_target"]

# Flags of /proc/cpuinfo that change which instructions a compiler may emit; the others come and go with the kernel.
_INSTRUCTION_SETS = ("sse", "ssse", "avx", "amx", "fma", "bmi", "f16c", "popcnt", "abm", "movbe", "aes", "vaes",
                     "gfni", "sha", "vpclmul", "adx", "asimd", "sve", "neon", "fphp", "bf16", "i8mm")  # fmt: skip


def cpu_target(cpuinfo: str | None = None) -> Target:
    """The CPU of this machine; `cpuinfo` stands in for the text of /proc/cpuinfo in tests."""
    text = _read_cpuinfo() if cpuinfo is None else cpuinfo
    fields = _first_processor(text)
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    vendor = fields.get("vendor_id") or fields.get("CPU implementer") or platform.machine()
    family = fields.get("cpu family") or fields.get("CPU architecture") or "?"
    model = fields.get("model") or fields.get("CPU part") or "?"
    return Target(
        name="cpu",
        platform="cpu",
        device_kind=f"{platform.machine()} {vendor} family {family} model {model}",
        cores=_usable_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        features=tuple(sorted({flag for flag in flags if flag.startswith(_INSTRUCTION_SETS)})),
    )


def find_target(name: str) -> Target:
    """The target called `name`.

    Raises:
        UserError: when there is no such target; the message lists those there are.
    """
    if name == "cpu":
        return cpu_target()
    if name in GPUS:
        return GPUS[name]
    raise UserError(f"unknown target {name!r}; known targets: cpu, {', '.join(GPUS)}")


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read_cpuinfo() -> str:
    path = pathlib.Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else f"vendor_id : {platform.processor()}\n"


def _first_processor(text: str) -> dict[str, str]:
    """Fields of the first block of /proc/cpuinfo, by name."""
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
