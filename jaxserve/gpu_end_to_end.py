"""Steps of whole models on the device at hand, with random weights, and PyTorch's kernels for the same work.

A model is timed at two depths, and what its other layers add is computed from the difference: compiling all of them
takes minutes. Rows say so by `layers`. Launches are counted by the profiler, over calls of one step.
"""

import collections
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.absent import OPTIONS
from jaxserve.gpu_steps import MODELS, RECIPES, Step, make_step, random_arrays
from jaxserve.models.config import ModelConfig
from jaxserve.pallas_kernels._target import compiling_for
from jaxserve.programs import chosen_kernels
from jaxserve.roofline import count, decode_load, prefill_load, roofline
from jaxserve.serving.state import init_state
from jaxserve.sizing import rewritten_graph
from jaxserve.targets import Gpu, Target

DEPTHS = (2, 4)
CALLS = 8
"""Steps that are sent off one after the other for one measurement."""

LAUNCHES = ("cuGraphLaunch", "cuLaunchKernel")
"""What CUDA's calls are named by the profiler: of a whole graph (a command buffer), and of single kernels."""


def measure_model(
    model: str, recipe: str, tokens: int, seqs: int, context: int, target: Target, repeats: int
) -> dict[str, Any]:
    """One row: seconds of a step, measured at two depths, and beside the roofline's where the target has ceilings."""
    seconds, launches = [], []
    for depth in DEPTHS:
        found = time_step(make_step(model, recipe, tokens, seqs, context, target, depth), target, context, repeats)
        seconds.append(found[0])
        launches.append(found[1])
    layers = ModelConfig.from_hf(MODELS[model], model).layers
    step = _at_depth(seconds, layers)
    row: dict[str, Any] = {
        "layers": f"{layers}, from {DEPTHS[0]} and {DEPTHS[1]}",
        "microseconds": step * 1e6,
        "microseconds_measured": [each * 1e6 for each in seconds],
        "tokens_per_second": tokens / step,
        "launches": {
            name: round(_at_depth([each[name] for each in launches], layers), 1)
            for name in sorted(set(launches[0]) | set(launches[1]))
        },
        "kernels": chosen_kernels(make_step(model, recipe, tokens, seqs, context, target, 1).graph, target),
    }
    if isinstance(target, Gpu):
        load = decode_load(seqs, context) if tokens == seqs else prefill_load(tokens)
        costs = count(rewritten_graph(ModelConfig.from_hf(MODELS[model], model), {}, RECIPES[recipe]))
        least = roofline(costs, load, target)
        row |= {"of_roofline": least.seconds / step, "bound": least.bound}
    return row


def _at_depth(measured: list[float], layers: int) -> float:
    """What a number measured at both DEPTHS is for so many layers."""
    a_layer = (measured[1] - measured[0]) / (DEPTHS[1] - DEPTHS[0])
    return measured[0] + a_layer * (layers - DEPTHS[0])


def time_step(step: Step, target: Target, context: int, repeats: int) -> tuple[float, collections.Counter[str]]:
    """Median seconds of a step at the end of contexts of `context` tokens, and its launches by name."""
    options = OPTIONS if target.platform == "cuda" else None
    with compiling_for(target):
        lowered = jax.jit(step.function, donate_argnums=(1, 2)).lower(*step.specs)
        run = lowered.compile(compiler_options=options)
    params, caches, *_ = step.specs
    weights = dict(random_arrays(params))
    arrays = {path: jnp.zeros(spec.shape, spec.dtype) for path, spec in caches.items()}
    state, inputs = init_state(step.limits), jnp.asarray(step.inputs(context))
    each = step.bucket.tokens // step.bucket.seqs
    start = jnp.full_like(state["length"], max(0, context - each))

    def calls(number: int) -> None:
        nonlocal arrays, state
        for _ in range(number):  # always at the same place: the length of a sequence is set back
            arrays, state, outputs = run(weights, arrays, state | {"length": jnp.copy(start)}, inputs)
        jax.block_until_ready(outputs)

    calls(2)
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        calls(CALLS)
        seconds.append((time.perf_counter() - begin) / CALLS)
    return statistics.median(seconds), count_launches(lambda: calls(1))


def count_launches(run: Callable[[], None]) -> collections.Counter[str]:
    """How often `run` launches a CUDA graph or a kernel; nothing on a CPU."""
    found: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory(prefix="jaxserve-") as folder:
        with jax.profiler.trace(folder):
            run()
        for path in pathlib.Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                for line in plane.lines:
                    for event in line.events:
                        found.update(name for name in LAUNCHES if event.name.startswith(name))
    return found


def torch_peers(repeats: int) -> dict[str, dict[str, Any]]:
    """Microseconds of PyTorch's bf16 matmul and attention on Llama-3-8B's shapes, by shape; nothing without it."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}

    def median(run: Callable[[], Any]) -> float:
        for _ in range(3):
            run()
        times = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(CALLS):
                run()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / CALLS)
        return statistics.median(times)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    rows = {}
    for tokens in (1, 32, 512):
        x, weights = random(tokens, 4096), [random(28672, 4096) for _ in range(2)]  # two outgrow the L2
        turn = iter(range(10**9))
        rows[f"torch matmul gate_up b={tokens}"] = {
            "microseconds": median(lambda x=x, w=weights, turn=turn: x @ w[next(turn) % 2].T)
        }
    attend = torch.nn.functional.scaled_dot_product_attention
    for name, sequences, queries, keys in (("decode b=32", 32, 1, 1024), ("prefill 512", 1, 512, 512)):
        q, k, v = random(sequences, 32, queries, 128), random(sequences, 8, keys, 128), random(sequences, 8, keys, 128)
        rows[f"torch attention {name}"] = {
            "microseconds": median(
                lambda q=q, k=k, v=v, causal=queries > 1: attend(q, k, v, is_causal=causal, enable_gqa=True)
            )
        }
    return rows
