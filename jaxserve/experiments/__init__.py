"""Experiments, each a command: `python -m jaxserve.experiments.NAME --model=... --help`.

perplexity    recipes and pipelines by the perplexity of a text, with standard errors paired by window
layer_error   recipes by the relative output error of every matmul on the calibration text
alpha_sweep   SmoothQuant's alpha against perplexity
speculation   speculative decoding by tokens a step and speed-up on Spec-Bench, through the engine
salient       what AWQ's 1% of salient channels are worth: kept as they are, or scaled up before rounding

All others run the rewritten graph itself, in memory, without engine and artifact. Each prints a table, and writes
`--json=FILE` and `--plot=FILE.svg`.
"""
