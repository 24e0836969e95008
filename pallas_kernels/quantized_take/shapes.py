"""Named real-model shapes of quantized_take."""

from typing import Any

import numpy as np

from jaxserve.pallas_kernels._shapes import STEPS, Case, size, spec
from jaxserve.pallas_kernels.quantized_matmul.shapes import FORMATS, field_specs, random_fields


def cases(dtype: Any) -> list[Case]:
    """The embedding table of a model under every workload, 8 bits per channel and 4 bits in groups of 64."""
    found = []
    for step, model, work in STEPS:
        ids, rows = spec(np.int32, work.step_tokens), spec(dtype, work.step_tokens, model.width)
        for format in FORMATS:
            fields = field_specs(format, model.vocab, model.width, "panels")
            found.append(
                Case(
                    f"{step} {format}",
                    specs=(ids, *fields),
                    params={
                        "format": format,
                        "shape": (model.vocab, model.width),
                        "dtype": np.dtype(dtype).name,
                        "layout": "panels",
                    },
                    bytes=size(ids, rows) + format.nbytes(work.step_tokens, model.width),
                    flops=2 * work.step_tokens * model.width,
                    fill=lambda rng, ids=ids, fields=fields, vocab=model.vocab: (
                        rng.integers(0, vocab, ids.shape, np.int32),
                        *random_fields(rng, fields),
                    ),
                )
            )
    return found
