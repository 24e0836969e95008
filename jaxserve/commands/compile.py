"""jaxserve compile."""

import argparse
import json
import pathlib
import sys
import typing

if typing.TYPE_CHECKING:
    from jaxserve.calibration import CalibrationOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a Hugging Face folder, a .gguf file, a sample's name, or a Hub id ORG/NAME")
    parser.add_argument("-o", "--output", type=pathlib.Path, help="folder of the artifact")
    parser.add_argument(
        "--draft", metavar="layers:N",
        help="compile a draft for speculative decoding in place of the model: its first N layers and its head",
    )  # fmt: skip
    parser.add_argument(
        "--look-ahead", type=pathlib.Path, metavar="DIR",
        help="add the head in DIR, which `jaxserve distill --head` made, to the steps, for `serve --speculate head`",
    )  # fmt: skip
    parser.add_argument(
        "--recipe",
        help="`jaxserve passes` lists them (default: native for a quantized checkpoint, else bf16)",
    )
    parser.add_argument("--activations", choices=("f32", "bf16"), help="dtype of activations (default: the recipe's)")
    parser.add_argument(
        "--kv-dtype", choices=("f32", "bf16", "int8", "int4", "fp8"),
        help="what the KV cache keeps keys and values in (default: the recipe's, else the activations' dtype)",
    )  # fmt: skip
    parser.add_argument("--group", help="inputs a scale, for w4a16... and w3a16...: 32, 64 or 128 (default 64)")
    parser.add_argument("--sym", action="store_true", help="w4a16... and w3a16... without a minimum")
    parser.add_argument(
        "--rule", action="append", default=[], metavar="REGEX=SCHEME",
        help="quantize weights whose path matches, before the recipe's own rule; SCHEME: skip, native, w8a16, "
        "w4a16, w3a16, w8a8, w4a8, fp8, with options such as :g64 (`jaxserve passes quantize-matmul` lists them); "
        "may be repeated, the first match wins",
    )  # fmt: skip
    calibration = parser.add_argument_group("calibration, for recipes that look at activations")
    calibration.add_argument(
        "--calibration", type=pathlib.Path, metavar="FILE", help="UTF-8 text to calibrate on (default: a small sample)"
    )
    calibration.add_argument("--calibration-sequences", type=int, metavar="N", help="sequences of it (default 64)")
    calibration.add_argument("--calibration-length", type=int, metavar="N", help="tokens of each (default 512)")
    limits = parser.add_argument_group("limits, fixed in the artifact")
    limits.add_argument("--max-num-seqs", type=int, default=32, help="sequences that run at once (default 32)")
    limits.add_argument(
        "--max-model-len", type=int, default=0, help="tokens a sequence (default: the model's, at most 4096)"
    )
    limits.add_argument(
        "--kv-tokens", type=int, default=0, help="tokens that the KV cache holds (default at most 16384)"
    )
    limits.add_argument("--max-num-batched-tokens", type=int, default=512, help="tokens a step (default 512)")
    limits.add_argument("--page-size", type=int, help="tokens a page of the KV cache (default 16)")
    ir = parser.add_argument_group("the pipeline")
    ir.add_argument("--pipeline", metavar="SPEC", help="a pipeline of your own in place of the recipe's")
    ir.add_argument("--explain", action="store_true", help="say for every pass what matched and what did not, and why")
    ir.add_argument(
        "--print-ir-after", action="append", default=[], metavar="PASS|all", help="print the IR after a pass"
    )
    ir.add_argument("--dump-ir", type=pathlib.Path, metavar="DIR", help="write the IR after every pass to DIR")
    ir.add_argument("--disable-pass", action="append", default=[], metavar="PASS", help="leave a pass out")
    ir.add_argument("--stop-after", metavar="PASS", help="run the pipeline up to a pass and write no artifact")
    ir.add_argument(
        "--no-verify", action="store_true", help="skip the numeric checks of passes (structure is always checked)"
    )
    parser.add_argument("--target", default="cpu", help="what to compile for (default cpu: this machine)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON on standard output")


def _group(options: argparse.Namespace) -> str:
    """What --group and --sym add to a scheme."""
    from jaxserve.errors import UserError
    from jaxserve.passes.rules import GROUPS

    allowed = [str(size) for size in GROUPS.values()]
    if options.group not in (None, *allowed):
        raise UserError(f"--group {options.group}: allowed are {', '.join(allowed)}")
    return (f":g{options.group}" if options.group else "") + (":sym" if options.sym else "")


def _calibration(options: argparse.Namespace) -> "CalibrationOptions | None":
    """What the flags say, or None when none was given."""
    from jaxserve.calibration import CalibrationOptions

    given = {
        "text": options.calibration,
        "sequences": options.calibration_sequences,
        "length": options.calibration_length,
    }
    given = {name: value for name, value in given.items() if value is not None}
    return CalibrationOptions(**given) if given else None


def run(options: argparse.Namespace) -> int:
    from jaxserve.compile import compile_model
    from jaxserve.plan import CompileOptions
    from jaxserve.reporting import Reporter

    report = Reporter()
    summary = compile_model(
        CompileOptions(
            model=options.model,
            output=None if options.stop_after else options.output,
            draft=options.draft,
            look_ahead=options.look_ahead,
            recipe=options.recipe,
            activations=options.activations,
            kv_dtype=options.kv_dtype,
            pipeline=options.pipeline,
            rules=tuple(options.rule),
            group=_group(options),
            calibration=_calibration(options),
            page_size=options.page_size,
            max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_model_len,
            kv_tokens=options.kv_tokens,
            max_num_batched_tokens=options.max_num_batched_tokens,
            target=options.target,
            disabled=tuple(options.disable_pass),
            stop_after=options.stop_after,
            print_ir_after=tuple(options.print_ir_after),
            dump_ir=options.dump_ir,
            explain=options.explain,
            verify=not options.no_verify,
        ),
        report,
    )
    if options.json:
        json.dump(summary, sys.stdout)
        sys.stdout.write("\n")
    elif "artifact" in summary:
        before, after = summary["checkpoint_bytes"] / 1e6, summary["weight_bytes"] / 1e6
        report.note("")
        kind = f"{summary['recipe']}, activations {summary['activations']}"
        report.note(f"weights   {before:.1f} MB in the checkpoint, {after:.1f} MB in memory ({kind})")
        report.note(f"KV cache  {summary['kv_tokens']} tokens, {summary['kv_bytes'] / 1e6:.1f} MB")
        if summary["calibration"]:
            report.note(f"calibrated on {summary['calibration']}, in {summary['calibration_seconds']} s")
        report.note(f"limits    {summary['max_num_seqs']} sequences of up to {summary['max_model_len']} tokens")
        report.note(f"programs  {', '.join(summary['buckets'])}")
        flags = " --speculate head" if options.look_ahead else ""
        report.note(f"done in {summary['seconds']} s; next: jaxserve serve {summary['artifact']}{flags}")
    return 0
