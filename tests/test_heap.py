"""Memory that was freed: kept for the next step while serving, and given back when asked to."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")

FAULTS = """
import resource, sys
from jaxserve.heap import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
import jax, jax.numpy as jnp

def step(x):
    parts = jax.lax.optimization_barrier([jnp.tanh(x + i) for i in range(8)])
    return sum(part.sum() for part in jax.lax.optimization_barrier([jnp.sin(part) for part in parts]))

x = jnp.ones((32, 49152))
program = jax.jit(step).lower(x).compile()
assert program.memory_analysis().temp_size_in_bytes > 40e6
for i in range(30):
    if i == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    program(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_freed_memory_is_kept_for_the_next_step():
    """Counts first touches of pages while a program with large temporaries runs twenty times."""
    faults = {
        mode: int(
            subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, check=True, text=True).stdout
        )
        for mode in ("keep", "drop")
    }
    assert faults["keep"] < faults["drop"] / 4, faults  # the heap may still grow by a step or two


RESIDENT = """
import os
from jaxserve.heap import give_back_free_memory, keep_freed_memory
assert keep_freed_memory()

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

blocks = [bytes([n]) * 10**6 for n in range(100)]
del blocks
full = resident()
give_back_free_memory()
print(full - resident())
"""


def test_free_memory_is_given_back_when_asked():
    """Of 100 MB that were freed and kept."""
    said = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, check=True, text=True).stdout
    assert int(said) > 90e6


LARGE = """
import ctypes, mmap
from jaxserve.heap import use_large_pages

size = 16 << 20
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, size, 4096):
    memory[at] = at // 4096 % 251
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert not use_large_pages(address, 4096)  # fills no such page
moved = use_large_pages(address, size)
assert all(memory[at] == at // 4096 % 251 for at in range(0, size, 4096))
with open("/proc/self/smaps_rollup") as file:
    large = next(int(line.split()[1]) for line in file if line.startswith("AnonHugePages"))
print(moved, large)
"""


def test_memory_in_use_moves_into_large_pages_as_it_is():
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, check=True, text=True)
    moved, large = done.stdout.split()
    if moved == "False":
        pytest.skip("the system gives no large pages")
    assert int(large) >= 14 << 10
