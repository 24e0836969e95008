"""Benchmarks over HTTP: what is reported against numbers worked by hand, and stand-ins for other systems."""

import json
import math
import pathlib
import stat
import sys
import textwrap

import numpy as np
import pytest

from jaxserve.bench import compare, peers, summary
from jaxserve.bench.load import Answers, Load, Timing
from jaxserve.cli import main
from jaxserve.errors import UserError

LLAMA_SERVER = """
    import http.server, json, sys
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers()
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200); self.end_headers()
            for _ in range(body["max_tokens"]):
                self.wfile.write(b'data: {"choices": [{"text": "x"}]}\\n\\n')
            usage = json.dumps({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
            self.wfile.write(f"data: {usage}\\n\\ndata: [DONE]\\n\\n".encode())
        def log_message(self, *_): pass
    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def program(path: pathlib.Path, text: str) -> str:
    """An executable Python script."""
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(text)}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_summary_by_hand():
    """Two requests of three tokens: TTFT 100 and 300 ms, gaps of 50 and 150 and of 10 and 30 ms; one that failed."""
    first = Timing(1.0, 5, [1.1, 1.15, 1.3], 3)
    second = Timing(2.0, 7, [2.3, 2.31, 2.34], 3)
    found = summary.summarize(Answers([first, second, Timing(2.0, 9, error="x")], 2.0), {"ttft": 200, "tpot": 150})
    assert (found["completed"], found["failed"], found["request_throughput"]) == (2, 1, 1.0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (12, 6)
    assert (found["output_throughput"], found["total_token_throughput"], found["request_goodput"]) == (3.0, 9.0, 0.5)
    assert found["mean_ttft_ms"] == pytest.approx(200) and found["std_ttft_ms"] == pytest.approx(100)
    assert found["mean_tpot_ms"] == pytest.approx(60)  # (200 / 2 + 40 / 2) / 2
    assert found["median_itl_ms"] == pytest.approx(40) and found["p90_itl_ms"] == pytest.approx(120)
    assert found["p99_e2el_ms"] == pytest.approx(340 - 0.01 * 40)


def test_a_single_token_has_no_tpot():
    found = summary.summarize(Answers([Timing(0.0, 1, [0.1], 1)], 1.0), {})
    assert found["mean_tpot_ms"] is None and found["mean_itl_ms"] is None and found["request_goodput"] is None


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "latency:3", "tpot:0", "itl:5"])
def test_bad_goodput(text):
    with pytest.raises(UserError, match=f"--goodput '{text}'"):
        summary.parse_goodput(text)


def test_arrivals_are_poisson():
    load = Load(requests=4000, prompt=1, output=1, rate=8.0)
    gaps = np.diff(load.arrivals())
    assert load.arrivals()[0] == 0 and gaps.mean() == pytest.approx(1 / 8, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.1)  # of an exponential distribution: the mean
    assert not Load(3, 1, 1).arrivals().any()
    assert load.prompts(50)[:2] == load.prompts(50)[:2] and max(map(max, load.prompts(50))) < 50


def test_medians_and_ratios():
    ours, theirs = [{"x": 3.0, "y": 1}, {"x": 9.0, "y": None}, {"x": 5.0, "y": 2}], [{"x": 2.5, "y": 4}]
    assert compare.medians(ours) == {"x": 5.0, "y": None}
    assert compare.ratios(compare.medians(ours), compare.medians(theirs)) == {"x": 2.0}


def test_our_server_against_a_stand_in(stories_artifact, tmp_path, capsys):
    """Both answer the same prompts in turn; the stand-in takes the place of llama.cpp's server."""
    fake, file, plot = program(tmp_path / "llama-server", LLAMA_SERVER), tmp_path / "model.gguf", tmp_path / "a.svg"
    file.touch()
    command = ["bench", str(stories_artifact), "--against", "llama.cpp", "--llama-server", fake, "--gguf", str(file)]
    shape = ["--num-prompts", "5", "--prompt-len", "6", "--output-len", "7", "--max-concurrency", "3", "--rounds", "2"]
    measured = ["--goodput", "e2el:60000", "--request-rate", "50", "--json", "--plot", str(plot)]
    assert main([*command, *shape, *measured]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [system["name"] for system in data["systems"]] == ["jaxserve", "llama.cpp"]
    for system in data["systems"]:
        assert [run["total_output_tokens"] for run in system["rounds"]] == [35, 35]
        for run in system["rounds"]:
            assert run["completed"] == 5 and run["request_goodput"] == run["request_throughput"]
    assert data["systems"][0]["ratio"]["output_throughput"] == 1 and "jaxserve" in plot.read_text()
    assert main([*command, *shape, "--rounds", "1"]) == 0
    assert "jaxserve against it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--against", "vllm"], "--against 'vllm': known are llama.cpp, openvino"),
        (["--against", "llama.cpp", "--gguf", "none.gguf"], "none.gguf is none: name one with --gguf"),
        (["--request-rate", "0"], "--request-rate must be positive"),  # without --online: the flag asks for it
        (["--against", "openvino", "--gguf", "FILE.gguf", "--request-rate", "2"], "--request-rate must be inf"),
        (["--online", "--plot", "a.png"], "charts are written as .svg"),
        (["--online", "--rounds", "0"], "must be at least 1"),
        (["--online", "--prompt-len", "600"], "tokens that the artifact was compiled for"),
        (["--concurrency", "0"], "is not a list of positive numbers"),
        (["--url", "http://127.0.0.1:9", "--num-prompts", "2", "--rounds", "1"], "every request failed"),
    ],
)
def test_what_is_refused(flags, message, stories_artifact, tmp_path, monkeypatch, capsys):
    (tmp_path / "FILE.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["bench", str(stories_artifact), *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_server_that_does_not_start(tmp_path):
    fake, load = program(tmp_path / "llama-server", "raise SystemExit('no such model')"), Load(1, 1, 1)
    with (
        pytest.raises(UserError, match="llama-server did not start: no such model"),
        peers.llama_server(fake, tmp_path, load),
    ):
        pass
    with pytest.raises(UserError, match="there is no such program"), peers.llama_server("no-llama", tmp_path, load):
        pass


def test_batches_of_openvino(tmp_path):
    """Its answers a batch become timings; the stand-in says what the process would."""
    answers = """
        import json, sys
        for line in sys.stdin:
            request = json.loads(line)
            tokens = [request["output"]] * len(request["prompts"])
            print(json.dumps({"seconds": 2.0, "first": 0.5, "tokens": tokens}), flush=True)
    """
    fake = program(tmp_path / "python", answers)
    with peers.openvino(fake, tmp_path / "a.gguf") as system:
        found = system.run(Load(3, 2, 4, concurrency=2), [[1, 2]] * 3)
    assert found.duration == 4.0 and [timing.tokens for timing in found.timings] == [4, 4, 4]
    assert [timing.pieces for timing in found.timings] == [[0.5, 2.0], [0.5, 2.0], [2.5, 4.0]]
    assert (
        compare.describe(Load(3, 2, 4, math.inf, 2)) == "3 requests of 2 + 4 tokens, all at once, at most 2 in flight"
    )
