"""Weights to quantize, the statistics of what they multiply, and how wrong a result is."""

import numpy as np


def problem(seed: int, outputs: int = 12, inputs: int = 96, tokens: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """A weight [O, I] and the gram of correlated activations whose channels differ in size."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(tokens, inputs)) @ rng.normal(size=(inputs, inputs)) * np.exp(rng.normal(size=inputs))
    return rng.normal(size=(outputs, inputs)).astype(np.float32), (mixed.T @ mixed / tokens).astype(np.float32)


def error(quantized: np.ndarray, weight: np.ndarray, gram: np.ndarray) -> float:
    change = quantized.astype(np.float64) - weight
    return float(np.einsum("oi,ij,oj->", change, gram, change))
