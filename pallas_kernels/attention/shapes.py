"""Named real-model shapes of attention: whole prompts, as in calibration."""

from typing import Any

import numpy as np

from jaxserve.pallas_kernels._shapes import MODELS, Case, normal, size, spec


def cases(dtype: Any) -> list[Case]:
    """A prompt of 512 tokens a model."""
    tokens = 512
    found = []
    for model in MODELS:
        q = spec(dtype, tokens, model.heads, model.head_dim)
        k = spec(dtype, tokens, model.kv_heads, model.head_dim)
        index = spec(np.int32, tokens)
        found.append(
            Case(
                f"{model.name} prefill {tokens}",
                specs=(q, k, k, index, index),
                params={"scale": model.head_dim**-0.5, "window": None, "softcap": None},
                bytes=size(q, k, k, index, index, q),
                flops=4 * model.heads * model.head_dim * tokens * (tokens + 1) // 2,
                fill=lambda rng, q=q, k=k: (
                    normal(rng, q),
                    normal(rng, k),
                    normal(rng, k),
                    np.arange(tokens, dtype=np.int32),
                    np.zeros(tokens, np.int32),
                ),
            )
        )
    return found
