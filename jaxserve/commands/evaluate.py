"""jaxserve eval."""

import argparse
import dataclasses
import json
import pathlib


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", type=pathlib.Path, help="folder that jaxserve compile wrote")
    parser.add_argument("--text", type=pathlib.Path, required=True, help="UTF-8 text file, used as it is")
    parser.add_argument(
        "--context", type=int, help="tokens a window (default 2048, or as many as the artifact takes)"
    )  # fmt: skip
    parser.add_argument("--windows", type=int, default=0, help="score only the first N windows (default 0: all)")
    parser.add_argument("--json", action="store_true", help="print perplexity, windows and tokens as JSON")


def run(options: argparse.Namespace) -> int:
    from jaxserve.errors import UserError
    from jaxserve.evaluate import DEFAULT_CONTEXT, measure_perplexity, read_text, text_windows
    from jaxserve.reporting import Reporter
    from jaxserve.serving.load import LowerLimits
    from jaxserve.serving.session import Session

    if options.windows < 0:
        raise UserError(f"--windows {options.windows} is less than 0; 0 takes all")
    report = Reporter()
    text = read_text(options.text)
    session = Session(options.artifact, LowerLimits(), report.note)
    longest = session.limits.max_model_len
    context = min(DEFAULT_CONTEXT, longest) if options.context is None else options.context
    if not 2 <= context <= longest:
        raise UserError(
            f"--context {context} is not between 2 and {longest}, which the artifact was compiled for; "
            "ask for less, or compile it again with a larger --max-model-len"
        )
    vocab = session.limits.vocab_size
    windows = text_windows(session.tokenizer, vocab, text, context, options.windows, report)
    with session.running() as engine:
        result = measure_perplexity(engine, windows, report)
    if options.json:
        print(json.dumps(dataclasses.asdict(result)))
    return 0
