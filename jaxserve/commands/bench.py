"""jaxserve bench."""

import argparse
import dataclasses
import json
import pathlib


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", type=pathlib.Path, help="folder that jaxserve compile wrote")
    parser.add_argument("--concurrency", default="1,8,32", help="requests at once, comma separated (default 1,8,32)")
    parser.add_argument("--prompt-len", type=int, default=64, help="prompt tokens a request (default 64)")
    parser.add_argument("--output-len", type=int, default=64, help="generated tokens a request (default 64)")
    parser.add_argument("--json", action="store_true", help="print the runs as JSON")


def run(options: argparse.Namespace) -> int:
    from jaxserve.bench import bench
    from jaxserve.errors import UserError
    from jaxserve.reporting import Reporter
    from jaxserve.serving.load import LowerLimits
    from jaxserve.serving.session import Session

    try:
        concurrencies = [int(part) for part in options.concurrency.split(",")]
    except ValueError:
        raise UserError(f"--concurrency {options.concurrency!r} is not a list of numbers such as 1,8,32") from None
    report = Reporter()
    session = Session(options.artifact, LowerLimits(), report.note)
    longest = session.limits.max_model_len
    if min(options.prompt_len, options.output_len, *concurrencies) < 1:
        raise UserError("--concurrency, --prompt-len and --output-len must be at least 1")
    if options.prompt_len + options.output_len > longest:
        raise UserError(
            f"--prompt-len {options.prompt_len} and --output-len {options.output_len} are more than the {longest} "
            "tokens that the artifact was compiled for"
        )
    runs = bench(session, concurrencies, options.prompt_len, options.output_len, report)
    if options.json:
        print(json.dumps([dataclasses.asdict(entry) for entry in runs]))
    return 0
