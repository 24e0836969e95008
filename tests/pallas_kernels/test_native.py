"""What the native kernels promise beyond their equations: one order of summation, in every company."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxserve.pallas_kernels import (
    QuantFormat,
    RopeSpec,
    dense_matmul,
    paged_attention,
    quantize_rtn,
    quantized_matmul,
    rope,
    rope_qkv,
)
from jaxserve.pallas_kernels._native import describe, is_available
from jaxserve.pallas_kernels._native.ceiling import GROUP, int4_product, int4_seconds
from jaxserve.pallas_kernels._native.profile import profiled
from jaxserve.pallas_kernels.kv_write.format import KV_FORMATS, encode
from jaxserve.pallas_kernels.quantized_matmul import layout
from tests.pallas_kernels.harness import BF16, F32, dtypes, normal

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
    *((QuantFormat(8, None, "none", "float32", element="e4m3"), activation) for activation in (None, "e4m3")),
    (QuantFormat(4, 32, "zero", "float32", level2="channel"), "int8"),
)

KERNELS = (  # their files of tests
    *("matmul", "kv_write", "paged_attention", "rms_norm", "gated_activation", "rope", "sample_logits"),
    "native",
)
# Parts of the names of tests in them.
PARTS = "Dense or Quantized or Kv or Paged or Sample or Norm or Gated or Rope or company or bare"

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
    for rows in (*range(1, 9), 15, 16, 32):
        some = np.asarray(quantized_matmul(x[-rows:], *arrays, **options))
        assert some.tobytes() == together[-rows:].tobytes()


@dtypes
@pytest.mark.parametrize("out_dtype", [F32, BF16], ids=["to_f32", "to_bf16"])
@pytest.mark.parametrize(("outputs", "inputs"), [(208, 176), (133, 1601)])  # one chunk; several, and an odd rest
def test_a_dense_row_has_the_same_bytes_alone_and_among_others(dtype, out_dtype, outputs, inputs):
    x, w = normal(1, 67, inputs, dtype=dtype), normal(2, outputs, inputs, dtype=dtype)
    together = np.asarray(dense_matmul(x, w, out_dtype=out_dtype))
    for rows in (*range(1, 9), 15, 16, 32):
        some = np.asarray(dense_matmul(x[-rows:], w, out_dtype=out_dtype))
        assert some.tobytes() == together[-rows:].tobytes()


@dtypes
@pytest.mark.parametrize("form", ["bfloat16", "float32", *KV_FORMATS])
@pytest.mark.parametrize(("head_dim", "window"), [(64, None), (24, 77)])
def test_a_token_has_the_same_bytes_in_every_company(dtype, form, head_dim, window):
    """Alone, where its blocks are shared out; in chunks and verified rows, which are tiles; and among others."""
    rng, length = np.random.default_rng(2), 300
    format = KV_FORMATS.get(form)
    keys, values = (
        encode(normal(seed, 40, 16, 2, head_dim), format, form if format is None else BF16) for seed in (3, 4)
    )
    pages = -(-length // 16)
    table, q = rng.permutation(40).astype(np.int32)[:pages], normal(5, length, 6, head_dim, dtype=dtype)
    int32 = lambda *numbers: np.array(numbers, np.int32)  # noqa: E731

    def attend(queries, tables, counts, contexts):
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        options = {"scale": 0.25, "window": window, "format": format}
        return np.asarray(paged_attention(queries, keys, values, tables, starts, int32(*contexts), **options))

    whole = attend(q, table[None], [length], [length])
    for first, last in ((0, 1), (0, 37), (37, 90), (130, 138), (255, 257), (299, 300)):
        part = attend(q[first:last], table[None], [last - first], [last])
        assert part.tobytes() == whole[first:last].tobytes()
    rows = [299, 64, 63, 128, 1, 200, 17, 250, 40, 191]
    among = attend(q[rows], np.stack([table] * len(rows)), [1] * len(rows), [row + 1 for row in rows])
    assert among.tobytes() == whole[rows].tobytes()


@dtypes
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_token_is_turned_to_the_same_bytes_in_every_company(dtype, interleaved):
    """70 tokens of 12 heads are more than one thread's."""
    spec, x = RopeSpec(64, 5e5, interleaved=interleaved), normal(0, 70, 12 * 64, dtype=dtype)
    positions = np.random.default_rng(1).permutation(131072)[:70].astype(np.int32)
    biases = [normal(seed, heads * 64, dtype=dtype) for seed, heads in ((1, 6), (2, 3), (3, 3))]

    def turn(rows):
        parts = rope_qkv(x[rows], positions[rows], *biases, spec=spec, heads=6, kv_heads=3)
        return np.concatenate([np.asarray(part) for part in (*parts, rope(parts[2], positions[rows], spec=spec))], 1)

    together = turn(np.arange(70))
    for rows in ([0], [69], [3, 41], [50, 49, 7, 7, 20], range(16, 49)):
        assert turn(np.array(rows)).tobytes() == together[np.array(rows)].tobytes()


def test_operands_that_do_not_fit_are_an_error_and_no_crash():
    keys, table = normal(0, 2, 4, 1, 16), np.array([[7]], np.int32)
    starts, lens = np.array([0, 1], np.int32), np.array([1], np.int32)
    for operands, message in (
        ((table, starts, lens), "a block table names a page outside the pool"),
        ((table, starts, 4 + lens), "a context is longer than its block table"),
        ((table, starts, 0 * lens), "a context is shorter than its tokens"),
        ((table, 2 * starts, lens), "query_starts names a token outside the step"),
        ((table, -starts, lens), "query_starts descends"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(paged_attention(normal(1, 1, 1, 16), keys, keys, *operands, scale=1.0))


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


def test_the_bare_product_that_bounds_a_step_computes_what_it_says():
    """Else it would be no ceiling. 9 blocks are more than one thread's share."""
    rng = np.random.default_rng(0)
    codes, scale = rng.integers(0, 16, (9 * 64, 3 * 128)), rng.normal(size=(9 * 64, 3)).astype(np.float32)
    x = rng.integers(-128, 128, 3 * 128).astype(np.int8)
    halves = codes.reshape(9, 64, 3, 16, 2, 4).transpose(0, 2, 3, 1, 5, 4)  # [block, group, column, output, byte, half]
    packed = np.empty((9, 3), GROUP)
    packed["codes"] = halves[..., 0] | halves[..., 1] << 4
    packed["scale"] = scale.reshape(9, 64, 3).swapaxes(1, 2)
    y = int4_product(packed, x)
    if y is None:
        assert "avx512" not in describe() and int4_seconds(1) is None
        return
    dots = ((codes - 8) * x.astype(np.int64)).reshape(9 * 64, 3, 128).sum(axis=-1)
    np.testing.assert_allclose(y, (dots * scale).sum(axis=-1), rtol=1e-6, atol=1e-2)


def test_another_build_that_is_not_there_is_an_error(tmp_path):
    environment = os.environ | {"JAXSERVE_CPU_LIBRARY": str(tmp_path / "kernels.so")}
    command = [sys.executable, "-c", "import jaxserve.pallas_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"JAXSERVE_CPU_LIBRARY names '{tmp_path / 'kernels.so'}', and there is no such file" in done.stderr


@pytest.mark.parametrize(("isa", "threads"), [("avx2", "1"), ("generic", "2")])
def test_every_instruction_set_and_team(isa, threads):
    """The same tests in a process that may use less of the machine."""
    files = [f"tests/pallas_kernels/test_{name}.py" for name in KERNELS]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-k",
        f"(native and ({PARTS})) or (every_company and (bfloat16 or int8))",
        "-p",
        "no:cacheprovider",
        *files,
    ]
    environment = os.environ | {"JAXSERVE_CPU_ISA": isa, "JAXSERVE_CPU_THREADS": threads}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
