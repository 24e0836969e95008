"""What speculative decoding gives: tokens a step and speed-up by kind of prompt, in the form of Spec-Bench (Xia et al.
2024).

Each question of --questions (spec_bench_question.jsonl) is answered by --artifact without speculation and with each of
--proposers, one right after the other and in an order that changes, so that a machine whose speed drifts favours none.
Only decoding counts, from the first token of an answer to its last. Every answer must be that without speculation;
those that are not are counted.
"""

import asyncio
import dataclasses
import pathlib
import statistics
import time
from collections.abc import Mapping, Sequence

from absl import flags, logging

from jaxserve.charts import bar_chart
from jaxserve.experiments import common
from jaxserve.experiments.common import Settings
from jaxserve.questions import prompt_ids, read_questions
from jaxserve.reporting import print_table
from jaxserve.serving.engine import Engine
from jaxserve.serving.load import LowerLimits
from jaxserve.serving.request import GenerationRequest, SamplingParams
from jaxserve.serving.session import Session
from jaxserve.serving.speculation import Speculation

ARTIFACT = flags.DEFINE_string("artifact", None, "folder that jaxserve compile wrote", required=True)
QUESTIONS = flags.DEFINE_string("questions", None, "spec_bench_question.jsonl", required=True)
PROPOSERS = flags.DEFINE_list("proposers", ["ngram"], "what `serve --speculate` takes")
TOKENS = flags.DEFINE_integer("tokens", 64, "tokens of an answer", lower_bound=2)
EVERY = flags.DEFINE_integer("every", 1, "take each n-th question of a category only", lower_bound=1)
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0: greedy")


@dataclasses.dataclass(frozen=True)
class Answer:
    """The tokens of an answer, after how many steps and seconds of decoding the last of them came."""

    ids: list[int]
    steps: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Row:
    """A category under one proposer. `speedup` is the median over its questions of plain seconds a token divided by
    this proposer's, paired by question; `overall` the quotient of the sums."""

    category: str
    proposer: str
    questions: int
    tokens_per_step: float
    speedup: float
    overall: float
    unequal: int


async def answer(engine: Engine, prompt: tuple[int, ...], tokens: int, temperature: float) -> Answer:
    """One answer, alone on the engine."""
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=0)
    ids: list[int] = []
    steps, first, last = 0, 0.0, 0.0
    async for output in engine.submit(GenerationRequest("speculation", prompt, params)):
        if output.token_ids:
            last = time.perf_counter()
            first = first or last
            steps += bool(ids)
            ids += output.token_ids
    return Answer(ids, steps, last - first)


def summarize(category: str, proposer: str, pairs: Sequence[tuple[Answer, Answer]]) -> Row:
    """Of (plain, speculative) answers; those of one token have nothing to measure."""
    timed = [(plain, fast) for plain, fast in pairs if plain.seconds and fast.seconds]
    tokens = sum(len(fast.ids) - 1 for _, fast in timed)
    paired = [plain.seconds / len(plain.ids) / (fast.seconds / len(fast.ids)) for plain, fast in timed]
    return Row(
        category,
        proposer,
        len(pairs),
        tokens / max(1, sum(fast.steps for _, fast in timed)),
        statistics.median(paired) if paired else float("nan"),
        sum(p.seconds for p, _ in timed) / sum(f.seconds for _, f in timed) if timed else float("nan"),
        sum(plain.ids != fast.ids for plain, fast in pairs),
    )


def predicted(speculation: Speculation) -> float | None:
    """The speed-up if every step took the measured time of its size, next to one without proposals, and nothing else:
    of all that was generated. None when that time is not known."""
    costs = speculation.costs
    one = costs.ratio(costs.sizes[0])
    ratios = {size: costs.ratio(size) for size, count in costs.counts.items() if count}
    if not ratios or one is None or None in ratios.values():
        return None
    steps = sum(costs.counts[size] for size in ratios)
    return (
        one
        * (steps + speculation.num_accepted)
        / sum(costs.counts[size] * (ratio or 0) for size, ratio in ratios.items())
    )


def run(settings: Settings) -> None:
    """The command."""
    logging.set_verbosity(logging.WARNING)  # the reader of the weights tells how it goes
    session = Session(pathlib.Path(ARTIFACT.value), LowerLimits(), lambda line: None)
    questions = read_questions(pathlib.Path(QUESTIONS.value), EVERY.value, "--questions")
    speculations = {name: session.speculation(name) for name in ("off", *PROPOSERS.value)}
    session.runner.warmup()
    answers: dict[str, list[Answer]] = {name: [] for name in speculations}
    for number, (_, turn) in enumerate(questions):
        prompt = prompt_ids(session.tokenizer, turn, session.limits.max_model_len - TOKENS.value)
        names = list(speculations)
        for name in names if number % 2 else reversed(names):
            with session.running(prefix_caching=False, speculation=speculations[name]) as engine:
                answers[name].append(asyncio.run(answer(engine, prompt, TOKENS.value, TEMPERATURE.value)))
    deliver(questions, answers, speculations, session.runner.compilations)


def deliver(
    questions: Sequence[tuple[str, str]],
    answers: Mapping[str, Sequence[Answer]],
    speculations: Mapping[str, Speculation | None],
    compilations: int,
) -> None:
    """Prints the table, writes the files."""
    categories = list(dict.fromkeys(category for category, _ in questions))
    rows = []
    for name, speculation in speculations.items():
        if speculation is None:
            continue
        pairs = list(zip([c for c, _ in questions], zip(answers["off"], answers[name], strict=True), strict=True))
        rows += [summarize(each, name, [pair for c, pair in pairs if c == each]) for each in categories]
        rows.append(summarize("all", name, [pair for _, pair in pairs]))
    title = f"Speculative decoding, {ARTIFACT.value}, {len(questions)} questions of {TOKENS.value} tokens"
    columns = [field.name for field in dataclasses.fields(Row)]
    print_table(title, columns, [dataclasses.astuple(row) for row in rows])
    costs = {
        name: {
            "predicted": predicted(each),
            "ratios": {size: each.costs.ratio(size) for size in each.costs.sizes},
            "steps": each.costs.counts,
            **each.stats(),
        }
        for name, each in speculations.items()
        if each is not None
    }
    for name, each in costs.items():
        print_table(f"{name}: steps by size", ["size", "steps", "time"], [
            (str(size), count, each["ratios"][size])
            for size, count in each["steps"].items()
        ])  # fmt: skip
        print(f"{name}: speed-up predicted from these and the acceptance: {each['predicted'] or float('nan'):.3f}")
    print(f"compilations while serving: {compilations}")
    data = {"rows": [dataclasses.asdict(row) for row in rows], "costs": costs, "compilations": compilations}
    bars = [(f"{row.category}, {row.proposer}", row.tokens_per_step) for row in rows]
    common.write_outputs(data, bar_chart(f"Tokens a step. {title}", bars))


if __name__ == "__main__":
    common.run_main(run, idle=("model", "calibration", "calibration_sequences", "calibration_length", "activations"))
