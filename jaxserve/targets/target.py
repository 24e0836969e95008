"""`Target`: what is known of any hardware that step functions are compiled for."""

import dataclasses
import hashlib


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
