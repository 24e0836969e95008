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
    draft.add_argument(
        "--head", action="store_true", help="train a head that foresees one token, for `compile --look-ahead`"
    )
    head = parser.add_argument_group("with --head")
    head.add_argument("--head-vocab", type=int, metavar="M", help="tokens it knows (default 6144, or all of fewer)")
    head.add_argument("--head-width", type=int, metavar="F", help="its hidden channels (default twice the model's)")
    data = parser.add_argument_group("what to train on: --text, or what the target answers")
    data.add_argument("--text", type=pathlib.Path, metavar="FILE", help="UTF-8 text")
    data.add_argument("--prompts", type=pathlib.Path, metavar="FILE", help="questions as Spec-Bench has them (JSONL)")
    data.add_argument("--invented", type=int, metavar="N", help="so many prompts that the target makes up (default 0)")
    data.add_argument("--artifact", type=pathlib.Path, metavar="DIR", help="the compiled target, which answers prompts")
    data.add_argument("--answer-tokens", type=int, default=64, help="most tokens of an answer (default 64)")
    data.add_argument("--samples", type=int, metavar="N", help="further answers to each prompt, sampled (default 0)")
    training = parser.add_argument_group("training; a run that was killed goes on with the same flags")
    training.add_argument("--length", type=int, help="tokens of a sequence (default 128; of --head 256)")
    training.add_argument("--batch", type=int, help="sequences a step (default 4), or positions of --head (1024)")
    training.add_argument("--steps", type=int, help="steps (default 500)")
    training.add_argument("--minutes", type=float, help="stop training after so long (default: no limit)")
    training.add_argument("--learning-rate", type=float, help="of AdamW, at its highest (default 0.001)")
    training.add_argument("--dtype", choices=("float32", "bfloat16"), help="to compute in (default float32)")
    training.add_argument("--seed", type=int, help="of the order of sequences (default 0)")
    training.add_argument("--save-every", type=int, metavar="N", help="steps (default 50)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON on standard output")


def run(options: argparse.Namespace) -> int:
    from jaxserve.reporting import Reporter

    report = Reporter()
    known = ("command", "run", "json", "ngrams", "head")
    values = {name: value for name, value in vars(options).items() if name not in known and value is not None}
    if options.ngrams:
        summary, tell = _count(values, report), _tell_counted
    else:
        summary, tell = _train(values, options.head, report), _tell_head if options.head else _tell_layers
    if options.json:
        print(json.dumps(summary))
    else:
        tell(summary, report)
    return 0


def _train(values: dict[str, Any], head: bool, report: "Reporter") -> dict[str, Any]:
    from jaxserve.distill import DistillOptions, HeadOptions, distill

    if head:
        return distill(HeadOptions(**values), report)
    _refuse_others(values, {field.name for field in dataclasses.fields(DistillOptions)}, "--layers trains no head")
    return distill(DistillOptions(**values), report)


def _count(values: dict[str, Any], report: "Reporter") -> dict[str, Any]:
    from jaxserve.distill_rows import Source
    from jaxserve.ngram_draft import count_ngrams

    taken = {field.name for field in dataclasses.fields(Source)} - {"length"}
    _refuse_others(values, taken, "--ngrams trains nothing")
    return count_ngrams(Source(**values), report)


def _refuse_others(values: dict[str, Any], taken: set[str], why: str) -> None:
    """UserError that says why, and which flags are not among those taken."""
    from jaxserve.errors import UserError

    if idle := sorted(values.keys() - taken):
        flags = ", ".join("--" + name.replace("_", "-") for name in idle)
        raise UserError(f"{why}: leave out {flags}")


def _tell_counted(summary: dict[str, Any], report: "Reporter") -> None:
    from jaxserve.reporting import print_table

    title = f"{summary['entries']} n-grams ({summary['bytes'] / 1e3:.0f} kB) of {summary['tokens']} tokens"
    rows = [(kind, each["known"], each["right"]) for kind, each in summary["acceptance"].items()]
    print_table(title, ["kind", "known", "right of these"], rows)
    report.note(f"done in {summary['seconds']} s; next: jaxserve serve ARTIFACT --speculate {summary['draft']}")


def _tell_layers(summary: dict[str, Any], report: "Reporter") -> None:
    _tell_acceptance(summary, "cut")
    report.note(f"done in {summary['seconds']} s; next: jaxserve compile {summary['draft']} -o DIR")


def _tell_head(summary: dict[str, Any], report: "Reporter") -> None:
    _tell_acceptance(summary, "begun")
    draft, model = summary["draft"], summary["model"]
    report.note(f"done in {summary['seconds']} s; next: jaxserve compile {model} --look-ahead {draft} -o ARTIFACT")


def _tell_acceptance(summary: dict[str, Any], first: str) -> None:
    from jaxserve.reporting import print_table

    found = summary["acceptance"]
    rows = [(kind, each[first], each["distilled"], *each["expected_tokens"].values()) for kind, each in found.items()]
    trained = f"Acceptance of {summary['draft']} as {first} and after {summary['steps']} steps"
    columns = [f"K={count}" for count in found["all"]["expected_tokens"]]
    print_table(f"{trained}; tokens a step with K proposals", ["kind", first, "distilled", *columns], rows)
