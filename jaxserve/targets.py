"""What a program is compiled for: the platform and the few numbers that kernels and cache keys need.

Kernels take core counts and limits from here and never from the default device, so that a program can be compiled
for hardware this machine does not have. Nothing here imports JAX.
"""

import dataclasses
import hashlib
import os
import pathlib
import platform

from jaxserve.errors import UserError

# Flags of /proc/cpuinfo that change which instructions a compiler may emit; the others come and go with the kernel.
_INSTRUCTION_SETS = ("sse", "ssse", "avx", "amx", "fma", "bmi", "f16c", "popcnt", "abm", "movbe", "aes", "vaes",
                     "gfni", "sha", "vpclmul", "adx", "asimd", "sve", "neon", "fphp", "bf16", "i8mm")  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Hardware that step functions are compiled for.

    `cores` counts CPU cores that this process may use, or streaming multiprocessors; it steers performance only and is
    no part of a cache key. `shared_memory_bytes` is what one GPU thread block may ask for (0 on a CPU). `features` are
    the instruction sets of a CPU or the compute capability of a GPU, sorted.
    """

    name: str
    platform: str
    device_kind: str
    cores: int
    memory_bytes: int
    shared_memory_bytes: int = 0
    features: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        """Short text that is equal on two machines exactly when machine code of one may run on the other."""
        digest = hashlib.sha256(" ".join(self.features).encode()).hexdigest()[:12]
        return f"{self.platform}: {self.device_kind} ({digest})"


H100_SXM = Target(
    name="h100-sxm",
    platform="cuda",
    device_kind="NVIDIA H100 80GB HBM3",
    cores=132,
    memory_bytes=84_929_347_584,
    shared_memory_bytes=232_448,
    features=("sm_90a",),
)


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
    if name == H100_SXM.name:
        return H100_SXM
    raise UserError(f"unknown target {name!r}; known targets: cpu, {H100_SXM.name}")


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
