"""What a model says about its rotary embedding: frequencies and how they were stretched for long contexts."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float

    def scale(self, inv_freq: np.ndarray) -> np.ndarray:
        """Scaled frequencies, same shape and dtype."""
        return inv_freq / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths divided by `factor`, short ones kept, those between blended (Llama 3.1 and later)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def scale(self, inv_freq: np.ndarray) -> np.ndarray:
        """Scaled frequencies, same shape and dtype."""
        turns = self.original_max_position * inv_freq / (2 * np.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        return inv_freq * (keep + (1.0 - keep) / self.factor)


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """Frequencies theta^(-2i/dim), i < dim/2, after `scaling`.

    `interleaved` pairs channels (2i, 2i+1) instead of (i, i + dim/2). `dim` may be smaller than the head: the channels
    after it are left alone.
    """

    dim: int
    theta: float
    scaling: LinearScaling | Llama3Scaling | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.dim <= 0 or self.dim % 2:
            raise ValueError(f"rotary dim must be positive and even, got {self.dim}")
        if not self.theta > 0:
            raise ValueError(f"rotary theta must be positive, got {self.theta}")

    def inv_freq(self) -> np.ndarray:
        """Radians per position of each pair, float32 [dim/2], computed in float64 and rounded once."""
        inv_freq = float(self.theta) ** -(np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
        if self.scaling is not None:
            inv_freq = self.scaling.scale(inv_freq)
        return inv_freq.astype(np.float32)
