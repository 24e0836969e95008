"""Where the time of a decode step goes: `python tools/profile_step.py ARTIFACT --concurrency 1,16`.

Requests run at once in the engine of this process. From when all have their first token until one has its last, the
native kernels time their calls; what a step takes beside them is XLA's own loops, its executor, and waiting for the
host. Reading as many bytes as the weights have with the same threads and doing nothing else is the ceiling of a step
of one sequence. Both are measured in turns, several times, and the median step is printed.
"""

import argparse
import asyncio
import collections
import pathlib
import statistics
import time

import numpy as np

from jaxserve.pallas_kernels._native.profile import Calls, memory_speed, profiled
from jaxserve.serving.engine import Engine
from jaxserve.serving.load import LowerLimits
from jaxserve.serving.request import GenerationRequest, SamplingParams
from jaxserve.serving.session import Session


async def decode(
    engine: Engine, vocab: int, concurrency: int, prompt: int, output: int
) -> tuple[float, int, list[Calls]]:
    """Seconds, steps and calls of some requests while all of them decode."""
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
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
    return seconds, steps, calls


def main() -> None:
    """Prints a table for each concurrency."""
    parser = argparse.ArgumentParser(description="Where the time of a decode step goes.")
    parser.add_argument("artifact", type=pathlib.Path)
    parser.add_argument("--concurrency", default="1,16", help="requests at once, comma separated")
    parser.add_argument("--prompt-len", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    session = Session(options.artifact, LowerLimits(), print)
    session.runner.warmup()
    size = session.manifest.sizes.weight_bytes
    for concurrency in map(int, options.concurrency.split(",")):
        rounds, speeds = [], []
        for _ in range(options.rounds):
            speeds.append(memory_speed(size))
            with session.running(prefix_caching=False) as engine:
                run = decode(engine, session.limits.vocab_size, concurrency, options.prompt_len, options.output_len)
                rounds.append(asyncio.run(run))
        rounds.sort(key=lambda found: found[0] / found[1])
        _print(concurrency, size, statistics.median(speeds), *rounds[len(rounds) // 2])


def _print(concurrency: int, size: int, speed: float, seconds: float, steps: int, calls: list[Calls]) -> None:
    step, floor = 1e3 * seconds / steps, 1e3 * size / speed
    print(f"\n{concurrency} at once: {step:.2f} ms a step, {concurrency * steps / seconds:.0f} tokens/s")
    print(f"{'':44} {'calls':>6} {'us a call':>10} {'ms a step':>10} {'share':>6}")
    rest = step
    for each in calls:
        ms, us = 1e3 * each.seconds / steps, 1e6 * each.seconds / each.count
        print(f"{each.name:44} {each.count / steps:6.1f} {us:10.1f} {ms:10.3f} {ms / step:6.0%}")
        rest -= ms
    print(f"{'the rest: XLA, its executor, the host':44} {'':6} {'':10} {rest:10.3f} {rest / step:6.0%}")
    print(f"{'all weights read once, nothing else':44} {'':6} {'':10} {floor:10.3f} {floor / step:6.0%}")
    print(f"({size / 1e6:.1f} MB at {speed / 1e9:.1f} GB/s)")


if __name__ == "__main__":
    main()
