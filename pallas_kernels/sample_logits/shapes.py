"""Named real-model shapes of sample_logits."""

import functools
from typing import Any

import numpy as np

from jaxserve.pallas_kernels._shapes import STEPS, Case, size, spec

OPTIONS = {
    "greedy": {"temperature": 0.0, "top_k": 0, "top_p": 1.0},
    "plain": {"temperature": 0.8, "top_k": 0, "top_p": 1.0},
    "top_p": {"temperature": 0.8, "top_k": 0, "top_p": 0.95},
    "top_k": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
}


def cases(dtype: Any) -> list[Case]:
    """A row for every sequence of a model under every workload, drawn with different options. Logits are float32."""
    found = []
    for step, model, work in STEPS:
        rows = work.sequences
        numbers = tuple(spec(dtype, rows) for dtype in (np.int32, np.float32, np.int32, np.float32, np.float32))
        specs = (spec(np.float32, rows, model.vocab), spec(np.uint32, rows, 2), *numbers)
        for name, options in OPTIONS.items():
            found.append(
                Case(
                    f"{step} {name}",
                    specs=specs,
                    params={"vocab": model.vocab},
                    bytes=size(*specs) + 5 * rows,
                    flops=rows * model.vocab,
                    fill=functools.partial(_fill, rows=rows, vocab=model.vocab, **options),
                )
            )
    return found


def _fill(
    rng: np.random.Generator, rows: int, vocab: int, temperature: float, top_k: int, top_p: float
) -> tuple[np.ndarray, ...]:
    """Normal logits with a spread of 3, as those of language models nearly are."""
    return (
        3 * rng.standard_normal((rows, vocab), np.float32),
        rng.integers(0, 2**32, (rows, 2), np.uint32),
        rng.integers(0, 4096, rows, np.int32),
        np.full(rows, temperature, np.float32),
        np.full(rows, top_k, np.int32),
        np.full(rows, top_p, np.float32),
        np.zeros(rows, np.float32),
    )
