"""jaxserve distill."""

import argparse
import dataclasses
import json
import pathlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.reporting import Reporter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="the target, as `jaxserve compile` takes it")
    parser.add_argument("-o", "--output", type=pathlib.Path, required=True, help="folder of the draft's checkpoint")
    draft = parser.add_mutually_exclusive_group(required=True)
    draft.add_argument("--layers", type=int, help="layers of the draft: the target's first, trained")
    draft.add_argument(
        "--ngrams", action="store_true",
        help="train nothing and count what comes after the last tokens; for `serve --speculate` as it is",
    )  # fmt: skip
    data = parser.add_argument_group("what to train on: one of these")
    data.add_argument("--text", type=pathlib.Path, metavar="FILE", help="UTF-8 text")
    data.add_argument("--prompts", type=pathlib.Path, metavar="FILE", help="questions as Spec-Bench has them (JSONL)")
    data.add_argument("--artifact", type=pathlib.Path, metavar="DIR", help="the compiled target, which answers prompts")
    data.add_argument("--answer-tokens", type=int, default=64, help="most tokens of an answer (default 64)")
    training = parser.add_argument_group("training; a run that was killed goes on with the same flags")
    training.add_argument("--length", type=int, default=128, help="tokens of a sequence (default 128)")
    training.add_argument("--batch", type=int, default=4, help="sequences a step (default 4)")
    training.add_argument("--steps", type=int, default=500, help="steps (default 500)")
    training.add_argument("--minutes", type=float, default=0.0, help="stop training after so long (default: no limit)")
    training.add_argument("--learning-rate", type=float, default=1e-3, help="of AdamW, at its highest (default 0.001)")
    training.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="to compute in")
    training.add_argument("--seed", type=int, default=0, help="of the order of sequences (default 0)")
    training.add_argument("--save-every", type=int, default=50, metavar="N", help="steps (default 50)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON on standard output")


def run(options: argparse.Namespace) -> int:
    from jaxserve.reporting import Reporter

    report, counted = Reporter(), options.ngrams
    values = {name: value for name, value in vars(options).items() if name not in ("command", "run", "json", "ngrams")}
    summary = _count(values, report) if counted else _train(values, report)
    if options.json:
        print(json.dumps(summary))
    else:
        _tell_counted(summary, report) if counted else _tell_trained(summary, report)
    return 0


def _train(values: dict[str, Any], report: "Reporter") -> dict[str, Any]:
    from jaxserve.distill import DistillOptions, distill

    return distill(DistillOptions(**values), report)


def _count(values: dict[str, Any], report: "Reporter") -> dict[str, Any]:
    from jaxserve.distill_rows import Source
    from jaxserve.ngram_draft import count_ngrams

    names = {field.name for field in dataclasses.fields(Source)}
    return count_ngrams(Source(**{name: value for name, value in values.items() if name in names}), report)


def _tell_counted(summary: dict[str, Any], report: "Reporter") -> None:
    from jaxserve.reporting import print_table

    title = f"{summary['entries']} n-grams ({summary['bytes'] / 1e3:.0f} kB) of {summary['tokens']} tokens"
    rows = [(kind, each["known"], each["right"]) for kind, each in summary["acceptance"].items()]
    print_table(title, ["kind", "known", "right of these"], rows)
    report.note(f"done in {summary['seconds']} s; next: jaxserve serve ARTIFACT --speculate {summary['draft']}")


def _tell_trained(summary: dict[str, Any], report: "Reporter") -> None:
    from jaxserve.reporting import print_table

    rows = [
        (kind, each["cut"], each["distilled"], *each["expected_tokens"].values())
        for kind, each in summary["acceptance"].items()
    ]
    title = (
        f"Acceptance of {summary['draft']} as cut and after {summary['steps']} steps; tokens a step with K proposals"
    )
    print_table(title, ["kind", "cut", "distilled", "K=1", "K=2", "K=4"], rows)
    report.note(f"done in {summary['seconds']} s; next: jaxserve compile {summary['draft']} -o DIR")
