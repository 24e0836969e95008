"""The kernels for Hopper in Mosaic's interpreter, which looks for races, against the references.

Where a kernel keeps a left operand of wgmma in registers, the interpreter runs the variant that keeps it in shared
memory; the rest of the kernel is shared. `make gpu-compile-test` compiles all of them for the card.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels import QuantFormat, Refusal, quantize_rtn
from jaxserve.pallas_kernels._mosaic import Blocks
from jaxserve.pallas_kernels._target import compiling_for
from jaxserve.pallas_kernels.add_rms_norm.op import OP as ADD_RMS_NORM
from jaxserve.pallas_kernels.dense_matmul import mosaic_gpu as dense
from jaxserve.pallas_kernels.dense_matmul.op import OP as DENSE
from jaxserve.pallas_kernels.kv_write import mosaic_gpu as kv_write
from jaxserve.pallas_kernels.kv_write.format import KV_FORMATS, cache_layout
from jaxserve.pallas_kernels.kv_write.op import OP as KV_WRITE
from jaxserve.pallas_kernels.quantized_matmul import mosaic_gpu as quantized
from jaxserve.pallas_kernels.quantized_matmul import mosaic_w4a8 as w4a8
from jaxserve.pallas_kernels.quantized_matmul.op import OP as QUANTIZED
from jaxserve.pallas_kernels.quantized_norm.op import OP as QUANTIZED_NORM
from jaxserve.pallas_kernels.rms_norm import mosaic_gpu as norm
from jaxserve.pallas_kernels.rms_norm.op import OP as RMS_NORM
from jaxserve.targets import GPUS, H100_SXM
from tests.pallas_kernels.harness import BF16, F32, normal


@pytest.fixture(autouse=True)
def hopper() -> Iterator[None]:
    """Kernels are chosen for an H100 and interpreted; a race is an error."""
    with (
        compiling_for(H100_SXM),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
    ):
        yield


def check(kernel: Callable[..., Any] | Refusal, reference: Callable[..., Any], *operands: Any, rtol: float) -> None:
    """Compares a kernel with what it stands in for, relative to the largest number."""
    assert not isinstance(kernel, Refusal), kernel
    expected = np.asarray(reference(*operands), np.float32)
    found = np.asarray(kernel(*operands), np.float32)
    np.testing.assert_allclose(found, expected, rtol=0, atol=rtol * np.abs(expected).max())


def stacked(tensor: Any, layer: int | None) -> list[np.ndarray]:
    """The arrays of a weight, as those of layer 1 of two if there is a layer."""
    return [array if layer is None else np.stack([array[::-1], array]) for array in tensor.arrays.values()]


@pytest.mark.parametrize(("rows", "outputs", "dtype"), [(3, 64, BF16), (70, 128, np.dtype(np.float16))])
def test_dense_matmul(rows, outputs, dtype):
    x, w = normal(0, rows, 1024, dtype=dtype), normal(1, outputs, 1024, dtype=dtype)
    check(dense.kernel(x, w, out_dtype="float32"), lambda *a: DENSE.reference(*a, out_dtype="float32"), x, w, rtol=2e-6)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "format", "layer"),
    [
        (1, 64, 2048, QuantFormat(4, 64, "minimum", "float16"), None),  # two splits, a block each
        (70, 128, 1024, QuantFormat(8, 32, "zero", "float32"), 1),  # two splits in one block, two warpgroups
        (9, 64, 1024, QuantFormat(4, 128, "none", "bfloat16"), None),
        (3, 64, 256, QuantFormat(4, None, "zero", "float32"), 1),
        (3, 64, 256, QuantFormat(8, None, "none", "float16"), None),
    ],
    ids=lambda value: str(value).replace(" ", "-"),
)
def test_weights_of_few_bits(rows, outputs, inputs, format, layer):
    arrays = stacked(quantize_rtn(normal(1, outputs, inputs), format), layer)
    options = {
        "format": format,
        "shape": (outputs, inputs),
        "out_dtype": "float32",
        "activation": None,
        "layer": layer,
        "layout": None,
    }
    x = normal(0, rows, inputs, dtype=BF16)
    kernel = quantized.kernel(x, *arrays, **options, stage_lhs_in_smem=True)
    check(kernel, lambda *a: QUANTIZED.reference(*a, **options), x, *arrays, rtol=2e-6)


@pytest.mark.parametrize(("element", "activation", "rtol"), [("int", "int8", 0), ("e4m3", "e4m3", 2e-6)])
def test_weights_and_activations_of_eight_bits(element, activation, rtol):
    format = QuantFormat(8, None, "none", "float32", element=element)
    arrays = stacked(quantize_rtn(normal(1, 64, 1024), format), 1)
    options = {
        "format": format,
        "shape": (64, 1024),
        "out_dtype": "float32",
        "activation": activation,
        "layer": 1,
        "layout": None,
    }
    x = normal(0, 2, 3, 1024, dtype=F32)
    kernel = quantized.narrow_kernel(x, *arrays, **options)
    check(kernel, lambda *a: QUANTIZED.reference(*a, **options), x, *arrays, rtol=rtol)


@pytest.mark.parametrize(("rows", "outputs", "inputs", "group"), [(3, 64, 1024, 64), (70, 128, 256, 128)])
def test_weights_of_two_levels(rows, outputs, inputs, group):
    """4-bit codes by int8: sums are exact, whatever their order."""
    format = QuantFormat(4, group, "zero", "float32", level2="channel")
    rng = np.random.default_rng(0)
    fields = {name: shape for name, (shape, _) in format.specs(outputs, inputs).items()}
    arrays = {
        "codes": rng.integers(0, 256, fields["codes"], np.uint8),
        "scale": rng.integers(1, 8, fields["scale"], np.uint8),
        "zero": rng.integers(0, 16, fields["zero"], np.uint8),
        "channel": rng.random(fields["channel"], np.float32),
    }
    given = [np.stack([array[::-1], array]) for array in arrays.values()]
    options = {
        "format": format,
        "shape": (outputs, inputs),
        "out_dtype": "float32",
        "activation": "int8",
        "layer": 1,
        "layout": None,
    }
    x = normal(0, rows, inputs, dtype=BF16)
    kernel = w4a8.kernel(x, *given, **options)
    check(kernel, lambda *a: QUANTIZED.reference(*a, **options), x, *given, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "layer", "plus_one"),
    [(F32, "bfloat16", 1, False), (BF16, None, None, True), (np.dtype(np.float16), None, None, False)],
)
def test_norms(dtype, out_dtype, layer, plus_one):
    """Alone, and of a sum. Statistics are added up in another order, which moves few roundings by one unit."""
    x, y = normal(0, 2, 2, 1024, dtype=dtype), normal(1, 2, 2, 1024, dtype=dtype)
    x[0, 0], y[0, 0] = 0, 0
    weight = normal(2, *(() if layer is None else (2,)), 1024, dtype=BF16)
    options = {"eps": 1e-5, "plus_one": plus_one, "out_dtype": out_dtype, "layer": layer}
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[str(jnp.dtype(out_dtype or dtype))]
    check(norm.kernel(x, weight, **options), lambda *a: RMS_NORM.reference(*a, **options), x, weight, rtol=unit)
    both = norm.add_kernel(x, y, weight, **options)
    assert not isinstance(both, Refusal), both
    for index in range(2):
        check(
            lambda *a, index=index: both(*a)[index],
            lambda *a, index=index: ADD_RMS_NORM.reference(*a, **options)[index],
            *(x, y, weight),
            rtol=unit,
        )


@pytest.mark.parametrize(("activation", "plus_one"), [("int8", False), ("e4m3", True)])
def test_norms_in_codes(activation, plus_one):
    """Of a float32 row, as the compiler has them: the same codes, the scale within the rounding of another sum."""
    x, weight = normal(0, 2, 2, 1024), normal(2, 2, 1024, dtype=BF16)
    x[0, 0] = 0
    options = {"activation": activation, "eps": 1e-5, "plus_one": plus_one, "out_dtype": None, "layer": 1}
    kernel = norm.quantized_kernel(x, weight, **options)
    assert not isinstance(kernel, Refusal), kernel
    codes, scale = kernel(x, weight)
    expected, expected_scale = QUANTIZED_NORM.reference(x, weight, **options)
    np.testing.assert_array_equal(codes, expected)
    np.testing.assert_allclose(scale, expected_scale, rtol=1e-6)
    assert codes.dtype == expected.dtype and scale.shape == (2, 2, 1)


def test_a_norm_does_not_depend_on_the_other_rows():
    x, weight = normal(0, 3, 512, dtype=BF16), normal(1, 512, dtype=BF16)
    options = {"eps": 1e-5, "plus_one": False, "out_dtype": "float32", "layer": None}
    found = []
    for rows in (x, x[1:2]):
        kernel = norm.kernel(rows, weight, **options)
        assert not isinstance(kernel, Refusal), kernel
        found.append(kernel(rows, weight))
    np.testing.assert_array_equal(found[0][1:2], found[1])


@pytest.mark.parametrize(
    ("name", "tokens", "heads", "dim", "dtype", "layer"),
    [("int8", 5, 8, 128, F32, 1), ("int4", 9, 8, 64, BF16, None), ("fp8", 3, 24, 64, F32, None)],
)
def test_cache_writes(name, tokens, heads, dim, dtype, layer):
    """The same bytes as the reference's; a row of zeros has no extent, and slots outside the pool write nothing."""
    format, rng, pages = KV_FORMATS[name], np.random.default_rng(0), 3
    layout = cache_layout(format, F32, pages, 16, heads, dim, 0 if layer is None else 2).values()
    caches = [jnp.asarray(rng.integers(0, 9, spec.shape), spec.dtype) for _, spec in [*layout] * 2]
    k, v = (normal(seed, tokens, heads, dim, dtype=dtype) for seed in range(2))
    k[0, 0] = 0
    slots = rng.permutation(pages * 16)[:tokens].astype(np.int32)
    slots[1:3] = -1, pages * 16
    options = {"format": format, "layer": layer}
    kernel = kv_write.kernel(*caches, k, v, slots, **options)
    assert not isinstance(kernel, Refusal), kernel
    expected = KV_WRITE.reference(*caches, jnp.asarray(k), jnp.asarray(v), slots, **options)
    for found, array in zip(kernel(*caches, k, v, slots), expected, strict=True):
        np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize(("outputs", "inputs", "splits"), [(4096, 4096, 4), (28672, 4096, 1), (4096, 14336, 4)])
def test_the_order_of_adding_up_depends_on_the_weight_alone(outputs, inputs, splits):
    for tokens in (1, 16, 64, 65, 512):
        blocks = Blocks.of(tokens, outputs, inputs, codes_per_byte=2)
        assert (blocks.splits, blocks.step) == (splits, 256)
        assert blocks.steps * blocks.step * splits == inputs
        assert blocks.tokens >= tokens and blocks.tokens % blocks.columns == 0


def test_refusals_say_why():
    x, w = jax.ShapeDtypeStruct((4, 256), F32), jax.ShapeDtypeStruct((64, 256), F32)
    assert "it knows bfloat16" in dense.kernel(x, w, out_dtype="float32").reason
    x, w = jax.ShapeDtypeStruct((4, 576), BF16), jax.ShapeDtypeStruct((64, 576), BF16)
    assert "multiple of 64 and inputs one of 128" in dense.kernel(x, w, out_dtype="float32").reason
    narrow, weight = jax.ShapeDtypeStruct((4, 576), BF16), jax.ShapeDtypeStruct((576,), BF16)
    options = {"eps": 1e-5, "plus_one": False, "out_dtype": None, "layer": None}
    assert "4 rows of 576; it knows multiples of 512" in norm.kernel(narrow, weight, **options).reason
    cache, rows = jax.ShapeDtypeStruct((4, 16, 4, 64), BF16), jax.ShapeDtypeStruct((3, 4, 64), F32)
    refused = kv_write.kernel(cache, cache, rows, rows, None, format=None, layer=None)
    assert isinstance(refused, Refusal) and "the cache is bfloat16; XLA needs no more kernels" in refused.reason
    few = kv_write.kernel(cache, rows, rows, None, format=KV_FORMATS["int8"], layer=None)
    assert isinstance(few, Refusal) and "scales of 4 KV heads" in few.reason
    with compiling_for(GPUS["a100"]):
        choice = DENSE.choose("cuda", x, w, out_dtype="float32")
    assert choice.name == "reference"
    assert choice.refusals == (("mosaic", "it needs sm_90a, and a100 is sm_80"),)
    assert DENSE.choose("cpu", x, w, out_dtype="float32").refusals == ()


def test_codes_of_every_byte():
    """Each part of a byte is a code, shifted and multiplied as it says."""
    stored = jnp.arange(256, dtype=jnp.uint8).astype(jnp.int8)
    nibbles = np.stack([np.arange(256) & 15, np.arange(256) >> 4])
    for format in (QuantFormat(4, 64, "zero", "float32"), QuantFormat(4, 64, "none", "float32")):
        codes = (nibbles ^ 8) - 8 if format.signed else nibbles
        for part, code in zip(quantized.parts(format), codes, strict=True):
            np.testing.assert_array_equal(part.codes(stored).astype(np.float32) / part.divisor + part.shift, code)
