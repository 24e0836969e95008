"""Where the threads of the native kernels and those of the host run."""

import json
import os
import subprocess
import sys

import pytest

from jaxserve.pallas_kernels._native.library import is_available

needs_cores = pytest.mark.skipif(
    not is_available() or len(os.sched_getaffinity(0)) < 2, reason="needs the native kernels and two cores"
)

# Prints the callers' core, where this thread may run inside host_threads and after it, and to which cores other threads
# are bound in the end: the team's, which have a moment to get there, and none of those that XLA calls kernels from.
PROGRAM = """
import json, os, time
import jax, numpy as np
from jaxserve.pallas_kernels import dense_matmul
from jaxserve.pallas_kernels._native.cores import host_threads
from jaxserve.pallas_kernels._native.library import native_library
known = set(os.listdir("/proc/self/task"))
core = native_library().jaxserve_callers_core()
with host_threads():
    inside = sorted(os.sched_getaffinity(0))
product = jax.jit(dense_matmul)
for _ in range(50):
    jax.block_until_ready(product(np.ones((64, 256), np.float32), np.ones((512, 256), np.float32)))
deadline, wanted = time.monotonic() + 10, len(os.sched_getaffinity(0)) - 1
alone = []
while core >= 0 and len(alone) < wanted and time.monotonic() < deadline:
    cores = [os.sched_getaffinity(int(task)) for task in set(os.listdir("/proc/self/task")) - known]
    alone = sorted(min(each) for each in cores if len(each) == 1)
print(json.dumps([core, inside, sorted(os.sched_getaffinity(0)), alone]))
"""


def run(**environment: str) -> tuple[int, list[int], list[int], list[int]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    core, inside, after, alone = json.loads(done.stdout)
    return core, inside, after, alone


@needs_cores
def test_a_team_of_all_cores_keeps_its_threads_on_them_and_the_host_off_the_callers():
    usable = sorted(os.sched_getaffinity(0))
    core, inside, after, alone = run(JAXSERVE_CPU_PIN="1", JAXSERVE_CPU_THREADS="0")
    assert core == usable[0]
    assert inside == alone == usable[1:]
    assert after == usable


@needs_cores
@pytest.mark.parametrize("environment", [{"JAXSERVE_CPU_PIN": "0"}, {"JAXSERVE_CPU_THREADS": "1"}], ids=str)
def test_otherwise_threads_are_left_to_the_system(environment):
    usable = sorted(os.sched_getaffinity(0))
    assert run(**environment) == (-1, usable, usable, [])
