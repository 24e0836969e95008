"""Offline benchmark of an artifact: N requests at once, tokens per second, latencies, and host time per step.

Prompts are random token ids of one length and every request generates the same number of tokens, so that all N run
together to the end. Field names are those of vLLM's benchmark.
"""

import asyncio
import dataclasses
import statistics
import time

import numpy as np

from jaxserve.reporting import Reporter
from jaxserve.serving.engine import Engine
from jaxserve.serving.request import GenerationRequest, SamplingParams
from jaxserve.serving.session import Session

HOST_PHASES = ("schedule", "prepare", "dispatch", "collect", "deliver")


@dataclasses.dataclass(frozen=True)
class Run:
    """One concurrency.

    Throughputs are tokens per second over the whole run, prefill included; `tpot` is the mean time between a request's
    tokens after its first; `host_ms` sums schedule, prepare, dispatch and collect (read back), a step, and
    `host_processor_ms` is the processor time of the engine's thread in them: a device on the host's own cores takes
    turns with it.
    """

    concurrency: int
    input_tokens: int
    output_tokens: int
    duration: float
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    median_ttft_ms: float
    median_tpot_ms: float
    steps: int
    host_ms: float
    host_processor_ms: float
    phase_ms: dict[str, float]


def bench(session: Session, concurrencies: list[int], prompt: int, output: int, report: Reporter) -> list[Run]:
    """One run for each concurrency, after every program has run once."""
    runs = []
    with report.stage("warm up", "every program once") as stage:
        session.runner.warmup()
        stage.done("every program has run once")
    for concurrency in concurrencies:
        with (
            report.stage("bench", f"{concurrency} at once, {prompt} + {output} tokens") as stage,
            session.running(prefix_caching=False) as engine,
        ):
            start = time.perf_counter()
            times = asyncio.run(_requests(engine, session, concurrency, prompt, output))
            runs.append(_summary(engine, times, time.perf_counter() - start, prompt, output))
            stage.done(
                f"{concurrency:>3} at once: {runs[-1].output_throughput:.1f} tokens/s, "
                f"TTFT {runs[-1].median_ttft_ms:.0f} ms, TPOT {runs[-1].median_tpot_ms:.1f} ms, "
                f"host {runs[-1].host_ms:.2f} ms a step, {runs[-1].host_processor_ms:.2f} of them on a core"
            )
    return runs


async def _requests(
    engine: Engine, session: Session, concurrency: int, prompt: int, output: int
) -> list[tuple[float, float]]:
    """(time to first token, seconds from first to last) of each request."""
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)

    async def one(number: int) -> tuple[float, float]:
        ids = tuple(rng.integers(0, session.limits.vocab_size, prompt).tolist())
        start, first = time.perf_counter(), 0.0
        async for piece in engine.submit(GenerationRequest(f"bench-{number}", ids, params)):
            first = first or (time.perf_counter() if piece.token_ids else 0.0)
        return first - start, time.perf_counter() - first

    return await asyncio.gather(*(one(number) for number in range(concurrency)))


def _summary(engine: Engine, times: list[tuple[float, float]], duration: float, prompt: int, output: int) -> Run:
    phases = engine.phases
    steps = phases["dispatch"].count
    means = {name: 1e3 * phases[name].total / max(phases[name].count, 1) for name in HOST_PHASES}
    return Run(
        concurrency=len(times),
        input_tokens=prompt * len(times),
        output_tokens=output * len(times),
        duration=duration,
        request_throughput=len(times) / duration,
        output_throughput=output * len(times) / duration,
        total_token_throughput=(prompt + output) * len(times) / duration,
        median_ttft_ms=1e3 * statistics.median(first for first, _ in times),
        median_tpot_ms=1e3 * statistics.median(rest / max(output - 1, 1) for _, rest in times),
        steps=steps,
        host_ms=sum(means[name] for name in HOST_PHASES[:4]),
        host_processor_ms=1e3 * phases["processor"].total / max(steps, 1),
        phase_ms=means,
    )
