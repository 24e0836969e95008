"""jaxserve serve."""

import argparse
import contextlib
import gc
import os
import pathlib
import sys
import time

CURL = """
{name} is served at {url}; try:

  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{auth} \\
    -d '{{"model": "{name}", "temperature": 0,
         "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", type=pathlib.Path, help="folder that jaxserve compile wrote; it is code: trust it")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on, 0 for any (default 8000)")
    parser.add_argument("--served-model-name", action="append", help="name that requests use; may be repeated")
    parser.add_argument("--api-key", help="key that requests must bring (default: $JAXSERVE_API_KEY, else none)")
    parser.add_argument("--max-num-seqs", type=int, default=0, help="run fewer sequences at once than compiled for")
    parser.add_argument("--max-model-len", type=int, default=0, help="accept shorter sequences than compiled for")
    parser.add_argument("--kv-tokens", type=int, default=0, help="use less KV cache than compiled for")
    parser.add_argument("--no-prefix-caching", action="store_true", help="compute every prompt whole")
    parser.add_argument(
        "--speculate", default="off", metavar="ngram|head|head+DIR|draft|DIR|off",
        help="check several tokens a step, which changes no answer: ngram proposes what followed the last tokens "
        "before, head also what the head of `compile --look-ahead` foresees, draft runs the draft model in the "
        "artifact's own folder draft, DIR that of another artifact, or adds a table of n-grams to ngram, as head+DIR "
        "does to head (default off)",
    )  # fmt: skip
    parser.add_argument("--drain-timeout", type=float, default=30.0, help="seconds that SIGTERM lets requests finish")


def run(options: argparse.Namespace) -> int:
    start = time.perf_counter()
    gc.disable()  # start-up makes a million objects that stay; collecting among them took a tenth of it
    from jaxserve.pallas_kernels._native.cores import host_threads
    from jaxserve.serving.load import LowerLimits
    from jaxserve.serving.server import listen, serve_app
    from jaxserve.serving.session import Session

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    lower = LowerLimits(
        max_num_seqs=options.max_num_seqs, max_model_len=options.max_model_len, kv_tokens=options.kv_tokens
    )
    with contextlib.ExitStack() as stack:
        socket = stack.enter_context(listen(options.host, options.port))  # an address in use is told before loading
        session = Session(options.artifact, lower, tell)
        stack.pop_all()  # the server closes it
    # What the API needs is imported while the programs load.
    from jaxserve.serving.api.app import create_app
    from jaxserve.serving.api.config import SAMPLING_DEFAULTS, ServerConfig
    from jaxserve.serving.metrics import Metrics

    generation, names = session.manifest.generation, options.served_model_name or [session.manifest.model.name]
    metrics = Metrics(names[0])
    engine = session.engine(
        metrics,
        prefix_caching=not options.no_prefix_caching,
        speculation=session.speculation(options.speculate),
    )
    api_key = options.api_key or os.environ.get("JAXSERVE_API_KEY") or None
    defaults = {k: v for k, v in generation.items() if k in SAMPLING_DEFAULTS and v is not None}
    app = create_app(
        engine,
        session.tokenizer,
        ServerConfig(served_model_names=tuple(names), limits=session.limits, api_key=api_key, defaults=defaults),
        metrics=metrics,
    )

    def ready(host: str, port: int) -> None:
        auth = " -H 'Authorization: Bearer ...'" if api_key else ""
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        tell(f"ready in {time.perf_counter() - start:.1f} s")
        tell(CURL.format(name=names[0], url=url, auth=auth))

    gc.freeze()
    gc.enable()
    with host_threads():
        engine.start()
        serve_app(
            app,
            engine,
            options.host,
            options.port,
            drain_timeout=options.drain_timeout,
            on_ready=ready,
            sockets=[socket],
        )
    return 0
