"""What a benchmark over HTTP reports, under the names of vLLM's.

TTFT is the time to a request's first token, TPOT the mean time between its tokens after that, ITL every gap between two
pieces of a stream, E2EL the time to the last one; all in milliseconds.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.bench.load import Answers, Timing
from jaxserve.errors import UserError

OF_REQUEST = ("ttft", "tpot", "e2el")


def parse_goodput(text: str) -> dict[str, float]:
    """`ttft:500,tpot:50`: the most milliseconds a request may take to count; UserError for anything else."""
    limits = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            raise UserError(f"--goodput {part!r} is not METRIC:MILLISECONDS") from None
        if name not in OF_REQUEST or not limits[name] > 0:
            raise UserError(f"--goodput {part!r}: metrics are ttft, tpot and e2el, with a positive number")
    return limits


def of_request(timing: Timing) -> dict[str, float]:
    """ttft, tpot (NaN for a single token) and e2el of one request, in milliseconds."""
    first, last = timing.pieces[0], timing.pieces[-1]
    tpot = (last - first) / (timing.tokens - 1) if timing.tokens > 1 else math.nan
    return {"ttft": 1e3 * (first - timing.sent), "tpot": 1e3 * tpot, "e2el": 1e3 * (last - timing.sent)}


def summarize(answers: Answers, goodput: Mapping[str, float]) -> dict[str, Any]:
    """Counts, throughputs a second, and mean, median, std, p90 and p99 of every metric."""
    done = [timing for timing in answers.timings if not timing.error]
    requests = [of_request(timing) for timing in done]
    good = sum(all(request[name] <= limit for name, limit in goodput.items()) for request in requests)
    inputs, outputs = sum(timing.prompt for timing in done), sum(timing.tokens for timing in done)
    found: dict[str, Any] = {
        "completed": len(done),
        "failed": len(answers.timings) - len(done),
        "errors": sorted({timing.error for timing in answers.timings if timing.error}),
        "duration": answers.duration,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / answers.duration,
        "request_goodput": good / answers.duration if goodput else None,
        "output_throughput": outputs / answers.duration,
        "total_token_throughput": (inputs + outputs) / answers.duration,
    }
    values = {name: [each[name] for each in requests if not math.isnan(each[name])] for name in OF_REQUEST}
    values["itl"] = [1e3 * float(gap) for timing in done for gap in np.diff(timing.pieces)]
    for name, of_all in values.items():
        found |= _statistics(name, of_all)
    return found


def _statistics(name: str, values: Sequence[float]) -> dict[str, float | None]:
    functions = {
        "mean": np.mean,
        "median": np.median,
        "std": np.std,
        "p90": lambda array: np.percentile(array, 90),
        "p99": lambda array: np.percentile(array, 99),
    }
    return {f"{kind}_{name}_ms": float(of(np.array(values))) if values else None for kind, of in functions.items()}
