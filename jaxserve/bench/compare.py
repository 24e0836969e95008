"""Systems in turn on the same prompts: medians over rounds, and ratios to the first of them."""

import contextlib
import dataclasses
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from jaxserve.bench.load import Load
from jaxserve.bench.peers import System
from jaxserve.bench.summary import summarize
from jaxserve.charts import bar_chart
from jaxserve.reporting import Reporter, print_table

COLUMNS = {
    "output_throughput": "tokens/s",
    "request_goodput": "good requests/s",
    "median_ttft_ms": "TTFT p50, ms",
    "p99_ttft_ms": "TTFT p99",
    "median_tpot_ms": "TPOT p50",
    "p99_tpot_ms": "TPOT p99",
    "median_e2el_ms": "E2EL p50",
}
Open = Callable[[], AbstractContextManager[System]]


@dataclasses.dataclass(frozen=True)
class Compared:
    """One system: the summary of each round, the median of each number over them, and its ratio to the first system's.

    A ratio above 1 means more of that number, whether that is good or bad.
    """

    name: str
    rounds: Sequence[Mapping[str, Any]]
    median: Mapping[str, Any]
    ratio: Mapping[str, float]


def compare(
    systems: Mapping[str, Open], load: Load, vocab: int, rounds: int, goodput: Mapping[str, float], report: Reporter
) -> list[Compared]:
    """Starts every system, lets each answer one load that is not counted, then `rounds` rounds in turn."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    with contextlib.ExitStack() as stack, report.stage("bench", describe(load), total=rounds * len(systems)) as stage:
        running = {name: stack.enter_context(opened()) for name, opened in systems.items()}
        for system in running.values():  # a whole round: a server may still be loading behind its first answers
            system.run(load, load.prompts(vocab, seed=rounds))
        for turn in range(rounds):
            prompts = load.prompts(vocab, seed=turn)
            for name, system in running.items():
                found[name].append(summarize(system.run(load, prompts), goodput))
                stage.advance(f"{name} {found[name][-1]['output_throughput']:.1f} tokens/s")
        stage.done(f"{', '.join(systems)}: {describe(load)}, {rounds} rounds in turn")
    first = next(iter(found.values()))
    return [Compared(name, runs, medians(runs), ratios(medians(first), medians(runs))) for name, runs in found.items()]


def describe(load: Load) -> str:
    """The load in words."""
    how = f"{load.rate:g} a second" if load.rate < float("inf") else "all at once"
    most = f", at most {load.concurrency} in flight" if load.concurrency else ""
    return f"{load.requests} requests of {load.prompt} + {load.output} tokens, {how}{most}"


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of every number over the runs; None where a run lacks it."""
    found = {name: [run[name] for run in runs] for name in runs[0]}
    numbers = {name: values for name, values in found.items() if name != "errors"}
    return {name: None if None in values else statistics.median(values) for name, values in numbers.items()}


def ratios(first: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    """first / other for every number that both have."""
    return {name: first[name] / other[name] for name in first if first[name] is not None and other[name]}


def show(compared: Sequence[Compared], load: Load) -> None:
    """A table: medians over rounds, and tokens a second of the first system in multiples of each."""
    columns = {name: title for name, title in COLUMNS.items() if any(one.median[name] is not None for one in compared)}
    rows = []
    for one in compared:
        failed = sum(run["failed"] for run in one.rounds)
        rows.append([one.name, *(one.median[name] for name in columns), failed, one.ratio.get("output_throughput")])
    titles = ["system", *columns.values(), "failed", f"{compared[0].name} against it"]
    for one in compared:
        reasons = {error for run in one.rounds for error in run["errors"]}
        for reason in sorted(reasons):
            print(f"{one.name}: {reason}", file=sys.stderr)
    print_table(f"{describe(load)}, medians of {len(compared[0].rounds)} rounds", titles, rows)


def chart(compared: Sequence[Compared], load: Load) -> str:
    """Tokens a second as bars."""
    return bar_chart(f"tokens/s, {describe(load)}", [(one.name, one.median["output_throughput"]) for one in compared])
