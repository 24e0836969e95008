"""What the `bench.py` of every op shares: median time, share of the measured ceiling, one JSON line a shape."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels._op import Op
from jaxserve.pallas_kernels._shapes import Case

# Operands are copied until they fill this much, and the copies used in turn, so that no cache holds them all.
WORKING_SET = 128 << 20
MOST_COPIES = 32


def median_seconds(run: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a call that returns arrays, after two calls to warm up."""
    for _ in range(2):
        jax.block_until_ready(run())
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure_ceilings(dtype: Any, repeats: int) -> tuple[float, float]:
    """Bytes a second of reading and writing memory, and FLOPs a second of a large matrix product of `dtype`."""
    memory = [jnp.ones(WORKING_SET // 4, jnp.float32)]
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)  # in place: fresh pages would cost more than the traffic

    def stream() -> jax.Array:
        memory[0] = increment(memory[0])
        return memory[0]

    square = jnp.ones((2048, 2048), dtype)
    multiply = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    seconds = median_seconds(stream, repeats), median_seconds(lambda: multiply(square), repeats)
    return 2 * WORKING_SET / seconds[0], 2 * 2048**3 / seconds[1]


def operand_sets(case: Case) -> list[tuple[jax.Array, ...]]:
    """Copies of one call's operands, enough to outgrow the caches."""
    operands = case.fill(np.random.default_rng(0))
    copies = min(MOST_COPIES, max(1, WORKING_SET // sum(operand.nbytes for operand in operands)))
    return [tuple(jnp.array(operand) for operand in operands) for _ in range(copies)]


def pure_call(op: Op, case: Case) -> Callable[[], Any]:
    """A call of the op on the next set of operands."""
    call = jax.jit(lambda *operands: op(*operands, **case.params))
    turn = _cycle(operand_sets(case))
    return lambda: call(*next(turn))


def donating_call(op: Op, case: Case) -> Callable[[], Any]:
    """A call that updates operands in place."""
    donated = case.updated
    call = jax.jit(lambda *operands: op(*operands, **case.params), donate_argnums=tuple(range(donated)))
    operands = list(operand_sets(case)[0])

    def run() -> Any:
        operands[:donated] = call(*operands)
        return operands[:donated]

    return run


def main(
    op: Op, cases: Callable[[Any], list[Case]], build: Callable[[Op, Case], Callable[[], Any]] = pure_call
) -> None:
    """Command line of a `bench.py`: measures the op's shapes on the default device and prints a JSON line each."""
    parser = argparse.ArgumentParser(description=f"Time {op.name} on shapes of real models.")
    parser.add_argument("--shape", default="", help="only shapes whose name contains this")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="dtype of the activations")
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()

    dtype = jnp.dtype(arguments.dtype)
    chosen = [case for case in cases(dtype) if arguments.shape in case.name]
    if not chosen:
        parser.error(f"no shape of {op.name} is named like {arguments.shape!r}")
    device = jax.devices()[0]
    bytes_ceiling, flops_ceiling = measure_ceilings(dtype, arguments.repeats)
    for case in chosen:
        platform = "cuda" if device.platform == "gpu" else device.platform
        implementation = op.choose(platform, *case.specs, **case.params).name
        seconds = median_seconds(build(op, case), arguments.repeats)
        ideal = max(case.bytes / bytes_ceiling, case.flops / flops_ceiling)
        line = {
            "op": op.name,
            "shape": case.name,
            "dtype": dtype.name,
            "implementation": implementation,
            "device": device.device_kind,
            "median_us": round(seconds * 1e6, 2),
            "bytes": case.bytes,
            "flops": case.flops,
            "gbytes_per_s": round(case.bytes / seconds / 1e9, 3),
            "gflops_per_s": round(case.flops / seconds / 1e9, 3),
            "ceiling_gbytes_per_s": round(bytes_ceiling / 1e9, 2),
            "ceiling_gflops_per_s": round(flops_ceiling / 1e9, 2),
            "percent_of_ceiling": round(100 * ideal / seconds, 2),
        }
        print(json.dumps(line), flush=True)


def _cycle(sets: list[tuple[jax.Array, ...]]) -> Iterator[tuple[jax.Array, ...]]:
    while True:
        yield from sets
