"""jaxserve bench."""

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.bench.compare import Open
    from jaxserve.bench.load import Load

PEERS = ("llama.cpp", "openvino")
ONLINE = {
    "online": False,
    "url": None,
    "model": None,
    "num_prompts": 32,
    "request_rate": math.inf,
    "max_concurrency": 0,
    "temperature": 0.0,
    "top_p": 1.0,
    "goodput": "",
    "rounds": 3,
    "against": "",
    "gguf": None,
    "llama_server": "llama-server",
    "openvino_python": sys.executable,
    "plot": None,
}
"""Defaults of the flags that belong to a measurement over HTTP: giving one asks for it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", type=pathlib.Path, help="folder that jaxserve compile wrote")
    parser.add_argument("--concurrency", default="1,8,32", help="offline: requests at once (default 1,8,32)")
    parser.add_argument("--prompt-len", type=int, default=64, help="prompt tokens a request (default 64)")
    parser.add_argument("--output-len", type=int, default=64, help="generated tokens a request (default 64)")
    parser.add_argument("--json", action="store_true", help="print the runs as JSON")
    about = "asked for by any of these flags; a server of its own is started for the artifact"
    online = parser.add_argument_group("over HTTP", about)
    online.add_argument("--online", action="store_true", help="measure requests to the HTTP server")
    online.add_argument("--url", help="measure this OpenAI-compatible server instead of starting one")
    online.add_argument("--model", help="the model's name at --url (default: that of the artifact)")
    online.add_argument("--num-prompts", type=int, help="requests a round (default 32)")
    online.add_argument("--request-rate", type=float, help="Poisson arrivals a second (default inf)")
    online.add_argument("--max-concurrency", type=int, help="requests in flight at most (default: no limit)")
    online.add_argument("--temperature", type=float, help="of sampling (default 0: greedy)")
    online.add_argument("--top-p", type=float, help="of sampling (default 1)")
    online.add_argument("--goodput", help="count requests within ttft:MS,tpot:MS,e2el:MS")
    online.add_argument("--rounds", type=int, help="rounds, of which medians are taken (default 3)")
    online.add_argument("--against", help=f"other systems that take turns, of {', '.join(PEERS)}")
    online.add_argument("--gguf", type=pathlib.Path, help="file that they run (default: where the artifact came from)")
    online.add_argument("--llama-server", help="llama.cpp's server (default: on the PATH)")
    online.add_argument("--openvino-python", help="python of an environment with openvino-genai")
    online.add_argument("--plot", type=pathlib.Path, help="draw tokens per second to this .svg")
    parser.set_defaults(**ONLINE)


def run(options: argparse.Namespace) -> int:
    from jaxserve.errors import UserError

    if min(options.prompt_len, options.output_len, options.num_prompts, options.rounds) < 1:
        raise UserError("--prompt-len, --output-len, --num-prompts and --rounds must be at least 1")
    asked = any(getattr(options, name) != default for name, default in ONLINE.items())
    return _online(options) if asked else _offline(options)


def _offline(options: argparse.Namespace) -> int:
    from jaxserve.bench.offline import bench
    from jaxserve.errors import UserError
    from jaxserve.reporting import Reporter
    from jaxserve.serving.load import LowerLimits
    from jaxserve.serving.session import Session

    try:
        concurrencies = [int(part) for part in options.concurrency.split(",")]
    except ValueError:
        concurrencies = []
    if not concurrencies or min(concurrencies) < 1:
        raise UserError(f"--concurrency {options.concurrency!r} is not a list of positive numbers such as 1,8,32")
    report = Reporter()
    session = Session(options.artifact, LowerLimits(), report.note)
    _check_length(options, session.limits.max_model_len)
    runs = bench(session, concurrencies, options.prompt_len, options.output_len, report)
    if options.json:
        print(json.dumps([dataclasses.asdict(entry) for entry in runs]))
    return 0


def _check_length(options: argparse.Namespace, longest: int) -> None:
    from jaxserve.errors import UserError

    if options.prompt_len + options.output_len > longest:
        raise UserError(
            f"--prompt-len {options.prompt_len} and --output-len {options.output_len} are more than the {longest} "
            "tokens that the artifact was compiled for"
        )


def _online(options: argparse.Namespace) -> int:
    from jaxserve.artifact import open_artifact
    from jaxserve.bench import compare, summary
    from jaxserve.bench.load import Load
    from jaxserve.charts import write_chart
    from jaxserve.errors import UserError
    from jaxserve.reporting import Reporter

    if not options.request_rate > 0 or options.max_concurrency < 0:
        raise UserError("--request-rate must be positive, and --max-concurrency not negative")
    goodput = summary.parse_goodput(options.goodput)
    if options.plot and options.plot.suffix != ".svg":
        raise UserError(f"--plot {options.plot}: charts are written as .svg")
    manifest = open_artifact(options.artifact, verify_weights=False).manifest
    _check_length(options, manifest.limits.max_model_len)
    sampling = {"temperature": options.temperature, **({"top_p": options.top_p} if options.top_p != 1 else {})}
    shape = (options.num_prompts, options.prompt_len, options.output_len)
    load = Load(*shape, options.request_rate, options.max_concurrency, sampling)
    systems = _systems(options, load, manifest.model.name, manifest.model.origin)
    found = compare.compare(systems, load, manifest.limits.vocab_size, options.rounds, goodput, Reporter())
    if options.plot:
        write_chart(options.plot, compare.chart(found, load))
    if options.json:
        print(json.dumps({"load": _finite(load), "systems": [dataclasses.asdict(one) for one in found]}))
    else:
        compare.show(found, load)
    return 0


def _finite(load: "Load") -> dict[str, object]:
    return {**dataclasses.asdict(load), "rate": load.rate if math.isfinite(load.rate) else None}


def _systems(options: argparse.Namespace, load: "Load", model: str, origin: str) -> dict[str, "Open"]:
    """What takes turns, by name; ours first."""
    import contextlib

    from jaxserve.bench import peers
    from jaxserve.errors import UserError
    from jaxserve.models.sample import SAMPLES, fetch_sample

    systems: dict[str, Open] = {"jaxserve": functools.partial(peers.our_server, options.artifact)}
    if options.url:
        server = peers.HttpServer(options.url, options.model or model)
        systems = {options.url: lambda: contextlib.nullcontext(server)}
    wanted = [name for name in options.against.split(",") if name]
    gguf = options.gguf or (fetch_sample(origin) if wanted and origin in SAMPLES else pathlib.Path(origin))
    for name in wanted:
        if name not in PEERS:
            raise UserError(f"--against {name!r}: known are {', '.join(PEERS)}")
        if gguf.suffix != ".gguf" or not gguf.is_file():
            raise UserError(f"--against {name} runs a GGUF file, and {gguf} is none: name one with --gguf")
        if name == "openvino" and math.isfinite(load.rate):
            raise UserError("--against openvino runs batches: there are no arrivals, so --request-rate must be inf")
        if name == "llama.cpp":
            systems[name] = functools.partial(peers.llama_server, options.llama_server, gguf, load)
        else:
            systems[name] = functools.partial(peers.openvino, options.openvino_python, gguf)
    return systems
