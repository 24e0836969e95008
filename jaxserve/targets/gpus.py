"""NVIDIA GPUs as data: what a program is compiled for without the card, and the ceilings that bound its speed.

Sizes and clocks are those that the CUDA driver reports. Rates are the dense ones of NVIDIA's data sheets (where a sheet
prints only the rate with sparsity, half of it): A100 (2021-06), H100 (2023-03), H200 (2024), HGX B200 (2025). They are
ceilings on paper: a card under its power limit does not hold them.
"""

import dataclasses

from jaxserve.targets.target import Target

TERA = 10**12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu(Target):
    """A GPU. `rates` are operations a second by what is multiplied: `bf16` (f16 alike), `fp8`, `int8` on the matrix
    units, `f32` outside of them; a unit that the card lacks is absent. `bandwidth` is bytes a second of its memory."""

    platform: str = "cuda"
    bandwidth: int
    rates: dict[str, float] = dataclasses.field(hash=False)
    capability: int  # the major version
    clock_ghz: float
    l2_bytes: int
    shared_memory_per_core: int
    lanes_per_core: int = 128

    def ridge(self, unit: str) -> float:
        """Operations for each byte at which computing takes as long as reading."""
        return self.rates[unit] / self.bandwidth

    def target_config(self) -> str:
        """XLA's description of the card (a GpuTargetConfigProto as text), for compiling without it."""
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_memory_per_core}
  threads_per_core_limit: 2048
  core_count: {self.cores}
  fpus_per_core: {self.lanes_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth}
  l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  shared_memory_per_block_optin: {self.shared_memory_bytes}
  cuda_compute_capability {{ major: {self.capability} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{self.device_kind}"
"""


_HOPPER = {
    "shared_memory_bytes": 232_448,
    "shared_memory_per_core": 233_472,
    "features": ("sm_90a",),
    "capability": 9,
    "l2_bytes": 52_428_800,
}
_HOPPER_SXM_RATES = {"bf16": 989.4 * TERA, "fp8": 1978.9 * TERA, "int8": 1978.9 * TERA, "f32": 66.9 * TERA}

H100_SXM = Gpu(
    name="h100-sxm",
    device_kind="NVIDIA H100 80GB HBM3",
    cores=132,
    memory_bytes=84_929_347_584,
    bandwidth=3_352_320_000_000,
    rates=_HOPPER_SXM_RATES,
    clock_ghz=1.98,
    **_HOPPER,
)
H100_PCIE = Gpu(
    name="h100-pcie",
    device_kind="NVIDIA H100 PCIe",
    cores=114,
    memory_bytes=84_942_979_072,
    bandwidth=2_039_040_000_000,
    rates={"bf16": 756.5 * TERA, "fp8": 1513 * TERA, "int8": 1513 * TERA, "f32": 51.2 * TERA},
    clock_ghz=1.755,
    **_HOPPER,
)
H200 = Gpu(
    name="h200",
    device_kind="NVIDIA H200",
    cores=132,
    memory_bytes=151_397_597_184,
    bandwidth=4_800_000_000_000,
    rates=_HOPPER_SXM_RATES,
    clock_ghz=1.98,
    **_HOPPER,
)
B200 = Gpu(
    name="b200",
    device_kind="NVIDIA B200",
    cores=148,
    memory_bytes=191_514_411_008,
    bandwidth=7_672_320_000_000,
    rates={"bf16": 2250 * TERA, "fp8": 4500 * TERA, "int8": 4500 * TERA, "f32": 75 * TERA},
    clock_ghz=1.965,
    shared_memory_bytes=232_448,
    shared_memory_per_core=233_472,
    features=("sm_100a",),
    capability=10,
    l2_bytes=132_644_864,
)
A100 = Gpu(
    name="a100",
    device_kind="NVIDIA A100-SXM4-80GB",
    cores=108,
    memory_bytes=85_100_068_864,
    bandwidth=2_039_040_000_000,
    rates={"bf16": 312 * TERA, "int8": 624 * TERA, "f32": 19.5 * TERA},
    clock_ghz=1.41,
    shared_memory_bytes=166_912,
    shared_memory_per_core=167_936,
    features=("sm_80",),
    capability=8,
    l2_bytes=41_943_040,
    lanes_per_core=64,
)

GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in (H100_SXM, H100_PCIE, H200, B200, A100)}
