"""What the native kernels promise beyond their equations: one order of summation, in every company."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxserve.pallas_kernels import QuantFormat, paged_attention, quantize_rtn, quantized_matmul
from jaxserve.pallas_kernels._native import describe, is_available
from jaxserve.pallas_kernels._native.profile import profiled
from jaxserve.pallas_kernels.quantized_matmul import layout
from tests.pallas_kernels.harness import F32, dtypes, normal

# Those of SmolLM2's file and its head first; 12 inputs do not fill the words in which AVX-512 reads codes.
FORMATS = (
    QuantFormat(4, 32, "minimum", "float16"),
    QuantFormat(8, 32, "none", "float16"),
    QuantFormat(4, 64, "zero", "bfloat16"),
    QuantFormat(4, None, "none", "float32"),
    QuantFormat(8, None, "minimum", "float32"),
    QuantFormat(8, 12, "zero", "float16"),
)
CALLS = (
    *((format, None) for format in FORMATS),
    (QuantFormat(8, None, "none", "float32"), "int8"),
    (QuantFormat(4, 32, "zero", "float32", level2="channel"), "int8"),
)

pytestmark = pytest.mark.skipif(not is_available(), reason=describe())


@dtypes
@pytest.mark.parametrize(("format", "activation"), CALLS, ids=str)
@pytest.mark.parametrize("panels", [False, True], ids=["rows", "panels"])
def test_a_row_has_the_same_bytes_alone_and_among_others(format, activation, dtype, panels):
    outputs, inputs = (208, 176) if panels else (200, 172)  # 200 outputs leave a panel half empty
    if panels and (reason := layout.refusal(format, outputs, inputs)):
        pytest.skip(reason)
    tensor = quantize_rtn(normal(0, outputs, inputs), format)
    arrays = [layout.pack(name, array) if panels else array for name, array in tensor.arrays.items()]
    x = normal(1, 67, inputs, dtype=dtype)
    options = {"format": format, "shape": tensor.shape, "out_dtype": F32, "activation": activation}
    options["layout"] = "panels" if panels else None
    together = np.asarray(quantized_matmul(x, *arrays, **options))
    for rows in (1, 2, 5, 15, 32):
        some = np.asarray(quantized_matmul(x[-rows:], *arrays, **options))
        assert some.tobytes() == together[-rows:].tobytes()


def test_a_token_has_the_same_bytes_however_its_prompt_is_cut():
    rng = np.random.default_rng(2)
    keys, values = normal(3, 8, 16, 2, 16), normal(4, 8, 16, 2, 16)
    table, q = rng.permutation(8).astype(np.int32)[None], normal(5, 100, 6, 16)
    int32 = lambda *numbers: np.array(numbers, np.int32)  # noqa: E731
    whole = np.asarray(paged_attention(q, keys, values, table, int32(0, 100), int32(100), scale=0.25))
    for first, last in ((0, 1), (0, 37), (37, 90), (99, 100)):
        part = paged_attention(q[first:last], keys, values, table, int32(0, last - first), int32(last), scale=0.25)
        assert np.asarray(part).tobytes() == whole[first:last].tobytes()


def test_operands_that_do_not_fit_are_an_error_and_no_crash():
    keys, table = normal(0, 2, 4, 1, 16), np.array([[7]], np.int32)
    starts, lens = np.array([0, 1], np.int32), np.array([1], np.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="outside the pool"):
        jax.block_until_ready(paged_attention(normal(1, 1, 1, 16), keys, keys, table, starts, lens, scale=1.0))


def test_a_profile_counts_the_calls_of_each_shape():
    tensor = quantize_rtn(normal(0, 32, 64), FORMATS[0])
    options = {"format": FORMATS[0], "shape": tensor.shape}
    call = lambda: jax.block_until_ready(quantized_matmul(normal(1, 3, 64), *tensor.arrays.values(), **options))  # noqa: E731
    call()
    with profiled() as profile:
        call()
        call()
        (found,) = profile.calls()
    assert (found.name, found.count) == ("quantized_matmul int4 [32, 64]", 2) and found.seconds > 0
    with profiled() as profile:
        assert profile.calls() == []


def test_another_build_that_is_not_there_is_an_error(tmp_path):
    environment = os.environ | {"JAXSERVE_CPU_LIBRARY": str(tmp_path / "kernels.so")}
    command = [sys.executable, "-c", "import jaxserve.pallas_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"JAXSERVE_CPU_LIBRARY names '{tmp_path / 'kernels.so'}', and there is no such file" in done.stderr


@pytest.mark.parametrize(("isa", "threads"), [("avx2", "1"), ("generic", "2")])
def test_every_instruction_set_and_team(isa, threads):
    """The same tests in a process that may use less of the machine."""
    files = [f"tests/pallas_kernels/test_{name}.py" for name in ("matmul", "kv_write", "paged_attention")]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-k",
        "native and (Quantized or Kv or Paged)",
        "-p",
        "no:cacheprovider",
        *files,
    ]
    environment = os.environ | {"JAXSERVE_CPU_ISA": isa, "JAXSERVE_CPU_THREADS": threads}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
