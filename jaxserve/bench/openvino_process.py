# pyright: reportMissingImports=false
"""OpenVINO GenAI as a process: reads {"prompts", "output", "sampling"} a line, answers {"seconds", "first", "tokens"}.

python openvino_process.py FILE.gguf, in an environment with openvino-genai; it imports nothing of this project.
"""

import json
import sys
import time

import numpy as np
import openvino as ov
import openvino_genai


def main() -> None:
    """Serves until its input ends. What the library prints goes to standard error: the answers own standard output."""
    answers = sys.stdout
    sys.stdout = sys.stderr
    pipeline = openvino_genai.LLMPipeline(sys.argv[1], "CPU")
    for line in sys.stdin:
        request = json.loads(line)
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = request["output"]
        config.ignore_eos = True
        if request["sampling"].get("temperature"):
            config.do_sample = True
            config.temperature, config.top_p = request["sampling"]["temperature"], request["sampling"].get("top_p", 1.0)
        ids = np.array(request["prompts"], np.int64)
        inputs = openvino_genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        start = time.perf_counter()
        found = pipeline.generate(inputs, config)
        seconds = time.perf_counter() - start
        tokens = [len(row) for row in found.tokens]
        first = found.perf_metrics.get_ttft().mean / 1e3
        print(json.dumps({"seconds": seconds, "first": first, "tokens": tokens}), file=answers, flush=True)


if __name__ == "__main__":
    main()
