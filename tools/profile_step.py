"""Where the time of a step goes: `python tools/profile_step.py ARTIFACT --concurrency 1,16 --prefill 512`.

Requests run at once in the engine of this process. From when all have their first token until one has its last, the
native kernels time their calls; what a step takes beside them is XLA's own loops, its executor, and waiting for the
host. With `--prefill` it is one request with a prompt of that length, from its arrival to its only token. Reading as
many bytes as the weights have with the same threads and doing nothing else is the ceiling of a step of one sequence.
Both are measured in turns, several times, and the median step is printed.
"""

import argparse
import asyncio
import collections
import functools
import pathlib
import statistics
import time
from typing import NamedTuple

import numpy as np

from jaxserve.pallas_kernels._native.profile import Calls, memory_speed, profiled
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
        rounds, speeds = [], []
        for _ in range(options.rounds):
            speeds.append(memory_speed(size))
            with session.running(prefix_caching=False) as engine:
                rounds.append(asyncio.run(run(engine, session.limits.vocab_size)))
        rounds.sort(key=lambda found: found.seconds / found.steps)
        _print(name, size, statistics.median(speeds), rounds[len(rounds) // 2])


def _print(name: str, size: int, speed: float, run: Run) -> None:
    steps, step, floor = run.steps, 1e3 * run.seconds / run.steps, 1e3 * size / speed
    print(f"\n{name}: {step:.2f} ms a step, {run.tokens / run.seconds:.0f} tokens/s")
    print(f"{'':44} {'calls':>6} {'us a call':>10} {'ms a step':>10} {'share':>6}")
    rest = step
    for each in run.calls:
        ms, us = 1e3 * each.seconds / steps, 1e6 * each.seconds / each.count
        print(f"{each.name:44} {each.count / steps:6.1f} {us:10.1f} {ms:10.3f} {ms / step:6.0%}")
        rest -= ms
    print(f"{'the rest: XLA, its executor, the host':44} {'':6} {'':10} {rest:10.3f} {rest / step:6.0%}")
    print(f"{'all weights read once, nothing else':44} {'':6} {'':10} {floor:10.3f} {floor / step:6.0%}")
    print(f"({size / 1e6:.1f} MB at {speed / 1e9:.1f} GB/s)")


if __name__ == "__main__":
    main()
