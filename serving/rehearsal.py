"""Steps that serve nobody: what a step of each size costs, known before the first request. Plain Python: no jax."""

import time

from jaxserve.serving.plan import Row, Runner, StepPlan
from jaxserve.serving.request import GenerationRequest, Limits, SamplingParams, Sequence

_CONTEXT = 256  # positions before the rows: the ratios of sizes hardly change with them
_ROUNDS = 3
_SECONDS = 0.25  # after which no further step begins


def step_seconds(runner: Runner, limits: Limits) -> dict[int, float]:
    """Seconds of a step of each of limits.row_sizes, the least of three: what disturbs a step only makes it slower.

    One sequence brings all the rows, as one whose proposals are checked does. Sizes that do not fit into the pages or
    the model's length, or into _SECONDS, are left out.

    It uses the first slot and the first pages, so nobody may have any yet. What it leaves there is never read: whoever
    gets a slot loads it, and whoever gets a page writes a position before reading it.
    """
    best: dict[int, float] = {}
    begin = time.perf_counter()
    positions = min(limits.max_model_len, limits.num_pages * limits.page_size)
    # Round by round, so that a machine that is slow for a while is so for all sizes.
    for size in _ROUNDS * tuple(size for size in limits.row_sizes if size <= positions):
        if time.perf_counter() - begin > _SECONDS:
            break
        seconds = _step(runner, limits, min(_CONTEXT, positions - size), size)
        best[size] = min(seconds, best.get(size, seconds))
    # A busy machine may have left a size no good step; a smaller one takes no longer than a larger.
    return {size: min(each for other, each in best.items() if other >= size) for size in best}


def _step(runner: Runner, limits: Limits, start: int, size: int) -> float:
    """Seconds of a step of `size` rows from position `start` on."""
    request = GenerationRequest("rehearsal", (0,) * (start + 1), SamplingParams(max_tokens=1, temperature=0.0, seed=0))
    seq = Sequence.create(request, limits)
    seq.slot, seq.blocks, seq.num_admitted = 0, list(range(-(-(start + size) // limits.page_size))), start
    runner.admit(seq)
    begin = time.perf_counter()
    pending = runner.dispatch(StepPlan("step", [Row(seq, seq.slot, start, size, (0,) * size, size, 0)], [], []))
    pending.wait()
    return time.perf_counter() - begin
