"""Where the time of a step goes: `python tools/profile_step.py ARTIFACT --concurrency 1,16 --prefill 512`.

Requests run at once in the engine of this process. From when all have their first token until one has its last, the
native kernels time their calls; what a step takes beside them is XLA's own loops, its executor, and waiting for the
host. With `--prefill` it is one request with a prompt of that length, from its arrival to its only token.

Two things bound a step of one sequence: reading as many bytes as the weights have with the same threads and doing
nothing else, and a bare int4 product with as many weights as the step's matmuls have. The slower one is the ceiling.
All are measured in turns, several times, and medians are printed.
"""

import argparse
import asyncio
import collections
import functools
import pathlib
import re
import statistics
import time
from typing import NamedTuple

import numpy as np

from jaxserve.pallas_kernels._native.ceiling import int4_seconds, memory_seconds
from jaxserve.pallas_kernels._native.profile import Calls, profiled
from jaxserve.serving.engine import Engine
from jaxserve.serving.load import LowerLimits
from jaxserve.serving.request import GenerationRequest, SamplingParams
from jaxserve.serving.session import Session


class Run(NamedTuple):
    """Some steps and what they computed."""

    seconds: float
    steps: int
    tokens: int
    calls: list[Calls]

    @property
    def weights(self) -> int:
        """Weights that a step's matmuls multiply with, by the shapes in their names."""
        shapes = [(re.search(r"_matmul .*\[(\d+), (\d+)\]", each.name), each.count) for each in self.calls]
        return sum(int(shape[1]) * int(shape[2]) * count for shape, count in shapes if shape) // self.steps


class Ceiling(NamedTuple):
    """Seconds that bound a step: for reading its weights, and for a bare product with them where it can be had."""

    reading: float
    product: float | None


async def decode(engine: Engine, vocab: int, concurrency: int, prompt: int, params: SamplingParams) -> Run:
    """Some requests at once, with prompts of so many tokens, while all of them decode."""
    rng = np.random.default_rng(0)
    started: collections.Counter[int] = collections.Counter()
    all_started, one_ended = asyncio.Event(), asyncio.Event()

    async def one(number: int) -> None:
        ids = tuple(rng.integers(0, vocab, prompt).tolist())
        async for piece in engine.submit(GenerationRequest(f"profile-{number}", ids, params)):
            started[number] += len(piece.token_ids)
            if len(started) == concurrency and min(started.values()) > 0:
                all_started.set()
        one_ended.set()

    tasks = [asyncio.ensure_future(one(number)) for number in range(concurrency)]
    await all_started.wait()
    with profiled() as profile:
        start, steps = time.perf_counter(), engine.phases["dispatch"].count
        await one_ended.wait()
        seconds, steps = time.perf_counter() - start, engine.phases["dispatch"].count - steps
        calls = profile.calls()
    await asyncio.gather(*tasks)
    return Run(seconds, steps, concurrency * steps, calls)


async def prefill(engine: Engine, vocab: int, prompt: int) -> Run:
    """One prompt, with its first token."""
    ids = tuple(np.random.default_rng(0).integers(0, vocab, prompt).tolist())
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    with profiled() as profile:
        start, steps = time.perf_counter(), engine.phases["dispatch"].count
        async for _ in engine.submit(GenerationRequest("prefill", ids, params)):
            pass
        seconds, steps = time.perf_counter() - start, engine.phases["dispatch"].count - steps
        return Run(seconds, steps, prompt, profile.calls())


def main() -> None:
    """Prints a table for each concurrency and for each prompt."""
    parser = argparse.ArgumentParser(description="Where the time of a decode step goes.")
    parser.add_argument("artifact", type=pathlib.Path)
    parser.add_argument("--concurrency", default="1,16", help="decoding requests at once, comma separated")
    parser.add_argument("--prefill", default="", help="lengths of prompts, comma separated")
    parser.add_argument("--prompt-len", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    session = Session(options.artifact, LowerLimits(), print)
    session.runner.warmup()
    size = session.manifest.sizes.weight_bytes
    params = SamplingParams(
        max_tokens=options.output_len, temperature=options.temperature, top_p=options.top_p, ignore_eos=True
    )
    runs = []
    for concurrency in map(int, filter(None, options.concurrency.split(","))):
        run = functools.partial(decode, concurrency=concurrency, prompt=options.prompt_len, params=params)
        runs.append((f"{concurrency} at once", run))
    for length in map(int, filter(None, options.prefill.split(","))):
        runs.append((f"a prompt of {length}", functools.partial(prefill, prompt=length)))
    for name, run in runs:
        rounds, ceilings = [], []
        for _ in range(options.rounds):
            with session.running(prefix_caching=False) as engine:
                rounds.append(asyncio.run(run(engine, session.limits.vocab_size)))
            ceilings.append(Ceiling(memory_seconds(size), int4_seconds(rounds[-1].weights)))
        rounds.sort(key=lambda found: found.seconds / found.steps)
        products = [each.product for each in ceilings if each.product]
        product = statistics.median(products) if products else None
        reading = statistics.median(each.reading for each in ceilings)
        _print(name, size, Ceiling(reading, product), rounds[len(rounds) // 2])


def _print(name: str, size: int, ceiling: Ceiling, run: Run) -> None:
    steps, step = run.steps, 1e3 * run.seconds / run.steps
    print(f"\n{name}: {step:.2f} ms a step, {run.tokens / run.seconds:.0f} tokens/s")
    print(f"{'':44} {'calls':>6} {'us a call':>10} {'ms a step':>10} {'share':>6}")

    def line(what: str, ms: float, calls: str = "", us: str = "") -> None:
        print(f"{what:44} {calls:>6} {us:>10} {ms:10.3f} {ms / step:6.0%}")

    for each in run.calls:
        line(
            each.name, 1e3 * each.seconds / steps, f"{each.count / steps:.1f}", f"{1e6 * each.seconds / each.count:.1f}"
        )
    line("the rest: XLA, its executor, the host", step - sum(1e3 * each.seconds / steps for each in run.calls))
    line("all weights read once, nothing else", 1e3 * ceiling.reading)
    if ceiling.product:
        line("a bare int4 product with as many weights", 1e3 * ceiling.product)
    speeds = [f"{size / 1e6:.1f} MB at {size / ceiling.reading / 1e9:.1f} GB/s"]
    if ceiling.product:
        speeds.append(f"{run.weights / 1e6:.1f} M weights at {run.weights / ceiling.product / 1e9:.1f} G/s")
    else:
        speeds.append("no bare product: it is for AVX512-VNNI, which is not in use")
    bound = max(ceiling.reading, ceiling.product or 0.0)
    print(f"({'; '.join(speeds)})\nthe step reaches {1e3 * bound / step:.0%} of the speed of the slower one")


if __name__ == "__main__":
    main()
