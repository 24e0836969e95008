import dataclasses

import jax
import numpy as np
import pytest

from jaxserve.pallas_kernels import (
    QuantFormat,
    dense_matmul,
    pack_int4,
    quantize_rtn,
    quantized_matmul,
    quantized_take,
)
from jaxserve.pallas_kernels._native import describe, is_available, native_call
from jaxserve.pallas_kernels.dense_matmul.shapes import cases as dense_cases
from jaxserve.pallas_kernels.quantized_matmul import layout
from jaxserve.pallas_kernels.quantized_matmul.format import E4M3
from jaxserve.pallas_kernels.quantized_matmul.op import quantize_activation
from tests.pallas_kernels import oracles
from tests.pallas_kernels.harness import (
    BF16,
    F32,
    assert_close,
    compute,
    dtypes,
    implementations,
    native_implementations,
    normal,
    wide,
)

FORMATS = [
    QuantFormat(bits, group, offset, scale)
    for bits in (4, 8)
    for group, scale in ((None, "float32"), (32, "float16"), (64, "bfloat16"))
    for offset in ("none", "zero", "minimum")
] + [
    QuantFormat(3, 32, "minimum", "float16"),
    QuantFormat(4, 32, "zero", "float16", level2="channel"),
    QuantFormat(8, None, "none", "float32", element="e4m3"),
    QuantFormat(8, 32, "none", "float16", element="e4m3"),
    QuantFormat(4, 32, "minimum", "float16", ordered=True),
    QuantFormat(4, 32, "zero", "float32", ordered=True, level2="channel"),
]
formats = pytest.mark.parametrize("format", FORMATS, ids=str)


def weight(format, outputs=24, inputs=80):
    """A quantized weight (80 is no multiple of a group of 32 or 64) and what it stands for, float64."""
    tensor = quantize_rtn(normal(7, outputs, inputs), format)
    if format.ordered:
        order = np.random.default_rng(8).permutation(inputs).astype(np.int32)
        tensor = dataclasses.replace(tensor, arrays={**tensor.arrays, "order": order})
    group = format.group_size(inputs)
    return tensor, oracles.dequantize(tensor.codes(), tensor.arrays, format.offset, group)


@native_implementations
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("activation", [None, "int8", "e4m3"])
def test_one_layer_of_several(implementation, format, activation):
    """The same bytes as from that layer's arrays alone; the others hold nothing of use."""
    tensor, _ = weight(format)
    arrays = [tensor.arrays[field] for field in format.fields]
    others = [
        array if name == "order" else np.full_like(array, 1) for name, array in zip(format.fields, arrays, strict=True)
    ]
    stacked = [np.stack([other, array, other]) for other, array in zip(others, arrays, strict=True)]
    x, options = normal(3, 5, 80), {"format": format, "shape": (24, 80), "activation": activation}
    found = compute(implementation, quantized_matmul, x, *stacked, layer=1, **options)
    np.testing.assert_array_equal(found, compute(implementation, quantized_matmul, x, *arrays, **options))


def in_panels(tensor):
    """The arrays of a weight in the layout `panels`."""
    return [layout.pack(name, array) for name, array in tensor.arrays.items()]


PANELS = [format for format in FORMATS if layout.refusal(format, 48, 80) is None]


@native_implementations
class TestQuantizedMatmulOfPanels:
    @pytest.mark.parametrize("format", PANELS, ids=str)
    @pytest.mark.parametrize("activation", [None, "int8", "e4m3"])
    @dtypes
    @pytest.mark.parametrize("rows", [1, 11])
    def test_has_the_bytes_of_row_after_row(self, implementation, format, activation, dtype, rows):
        tensor, _ = weight(format, outputs=48)
        x, options = normal(3, rows, 80, dtype=dtype), {"format": format, "shape": (48, 80), "activation": activation}
        expected = compute(implementation, quantized_matmul, x, *tensor.arrays.values(), **options)
        found = compute(implementation, quantized_matmul, x, *in_panels(tensor), **options, layout="panels")
        np.testing.assert_array_equal(found, expected)

    @pytest.mark.parametrize("format", PANELS, ids=str)
    def test_one_layer_of_several(self, implementation, format):
        tensor, _ = weight(format, outputs=48)
        stacked = [np.stack([np.ones_like(array), array]) for array in in_panels(tensor)]
        x, options = normal(3, 5, 80), {"format": format, "shape": (48, 80), "layout": "panels"}
        if format.ordered:
            stacked[-1][0] = np.arange(80)
        found = compute(implementation, quantized_matmul, x, *stacked, layer=1, **options)
        np.testing.assert_array_equal(
            found, compute(implementation, quantized_matmul, x, *in_panels(tensor), **options)
        )


def test_a_layer_that_is_not_there():
    tensor, _ = weight(FORMATS[0])
    stacked = [array[None] for array in tensor.arrays.values()]
    with pytest.raises(TypeError, match="layer must be from 0 to 0, got 1"):
        quantized_matmul(normal(3, 5, 80), *stacked, format=FORMATS[0], shape=(24, 80), layer=1)
    with pytest.raises(TypeError, match=r"codes is uint8 \[1, 24, 40\], expected uint8 \[24, 40\]"):
        quantized_matmul(normal(3, 5, 80), *stacked, format=FORMATS[0], shape=(24, 80))


@native_implementations
class TestDenseMatmul:
    @dtypes
    @pytest.mark.parametrize("rows", [(1,), (2,), (33,), (2, 3), (1, 1), ()], ids=str)
    def test_matches_the_equation(self, implementation, dtype, rows):
        x, w = normal(0, *rows, 96, dtype=dtype), normal(1, 40, 96, dtype=dtype)
        found = compute(implementation, dense_matmul, x, w)
        assert found.shape == (*rows, 40)
        assert_close(found, wide(x) @ wide(w).T, dtype)

    @pytest.mark.parametrize("rows", [1, 5])
    def test_float32_results_of_bf16_operands_are_not_rounded(self, implementation, rows):
        x, w = normal(0, rows, 512, dtype=BF16), normal(1, 8, 512, dtype=BF16)
        found = compute(implementation, dense_matmul, x, w, out_dtype=F32)
        assert_close(found, wide(x) @ wide(w).T, F32)

    @pytest.mark.parametrize("rows", [1, 5])
    def test_accumulates_in_float32(self, implementation, rows):
        # In bf16, 256 + 1 is 256 again: summing there would lose all the ones.
        x = np.ones((rows, 1025), BF16)
        w = np.ones((1, 1025), BF16)
        w[0, 0] = 1024
        np.testing.assert_array_equal(compute(implementation, dense_matmul, x, w), 2048)

    @dtypes
    @pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 15), (17, 33), (130, 31), (5, 1537), (7, 0)])
    def test_odd_sizes(self, implementation, dtype, outputs, inputs):
        x, w = normal(0, 7, inputs, dtype=dtype), normal(1, outputs, inputs, dtype=dtype)
        assert_close(compute(implementation, dense_matmul, x, w, out_dtype=F32), wide(x) @ wide(w).T, F32)

    @dtypes
    def test_no_rows(self, implementation, dtype):
        found = compute(implementation, dense_matmul, np.zeros((0, 32), dtype), normal(1, 5, 32, dtype=dtype))
        assert found.shape == (0, 5)

    @dtypes
    def test_a_number_that_is_none_spoils_its_row_and_its_output_alone(self, implementation, dtype):
        x, w = normal(0, 9, 40, dtype=dtype), normal(1, 6, 40, dtype=dtype)
        x[4, 39], w[5, 0] = np.nan, np.inf
        found = compute(implementation, dense_matmul, x, w)
        assert np.isnan(found[4]).all() and not np.isfinite(found[:, 5]).any()
        assert np.isfinite(np.delete(found, 4, axis=0)[:, :5]).all()

    @pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
    @pytest.mark.parametrize("step", ["decode b=1", "decode b=32", "prefill 512"])
    def test_shapes_of_a_model(self, implementation, dtype, step):
        cases = [case for case in dense_cases(dtype) if case.name.startswith(f"smollm2-135m {step}")]
        for case in cases[: 4 if step == "prefill 512" else 5]:  # without the logits of 512 rows
            x, w = case.fill(np.random.default_rng(0))
            assert_close(compute(implementation, dense_matmul, x, w, out_dtype=F32), wide(x) @ wide(w).T, F32)


@pytest.mark.skipif(not is_available(), reason=describe())
@pytest.mark.parametrize("wrong", ["inputs", "result", "dtype"])
def test_dense_operands_that_do_not_fit_are_an_error_and_no_crash(wrong):
    x = np.zeros((2, 8), BF16 if wrong == "dtype" else F32)
    w = np.zeros((4, 7 if wrong == "inputs" else 8), F32)
    result = jax.ShapeDtypeStruct((2, 5 if wrong == "result" else 4), F32)
    with pytest.raises(
        (ValueError, jax.errors.JaxRuntimeError), match="dense_matmul: the operands do not fit each other"
    ):
        jax.block_until_ready(native_call("jaxserve_dense_matmul", result, layer=None)(x, w))


@native_implementations
class TestQuantizedMatmul:
    @formats
    @pytest.mark.parametrize("rows", [(1,), (5,), (2, 3)], ids=str)
    def test_matches_the_equation(self, implementation, format, rows):
        tensor, expected = weight(format)
        x = normal(0, *rows, 80)
        found = compute(implementation, quantized_matmul, x, *tensor.arrays.values(), format=format, shape=tensor.shape)
        assert_close(found, wide(x) @ expected.T, F32)

    @formats
    def test_bf16_activations_leave_the_weight_exact(self, implementation, format):
        tensor, expected = weight(format)
        x = normal(0, 5, 80, dtype=BF16)
        found = compute(implementation, quantized_matmul, x, *tensor.arrays.values(), format=format, shape=tensor.shape)
        assert_close(found, wide(x) @ expected.T, BF16, f32=1e-3)

    def test_float32_result_of_bf16_activations(self, implementation):
        tensor, expected = weight(QuantFormat(8, None, "none", "float16"))
        x, options = normal(0, 2, 80, dtype=BF16), {"format": tensor.format, "shape": tensor.shape, "out_dtype": F32}
        found = compute(implementation, quantized_matmul, x, *tensor.arrays.values(), **options)
        assert_close(found, wide(x) @ expected.T, F32, f32=1e-4)
        assert np.any(found != found.astype(BF16).astype(F32))


ACTIVATIONS = {"int8": "int8", "int8-static": "int8", "e4m3": "e4m3"}
STATIC = np.float32(0.0203)  # clips what is beyond 2.6


@native_implementations
class TestQuantizedActivations:
    @pytest.mark.parametrize("format", FORMATS[::3] + FORMATS[-6:], ids=str)
    @pytest.mark.parametrize(
        ("activation", "dtype"), [("int8", F32), ("int8", BF16), ("int8-static", F32), ("e4m3", F32)]
    )
    def test_matches_the_equation(self, implementation, format, activation, dtype):
        tensor, expected = weight(format)
        x, scale = normal(0, 2, 3, 80, dtype=dtype), (STATIC,) if activation == "int8-static" else ()
        x[0, 0], x[1, 1] = 0, x[1, 1] * 1000
        options = {"format": format, "shape": tensor.shape, "activation": activation, "out_dtype": F32}
        found = compute(implementation, quantized_matmul, x, *tensor.arrays.values(), *scale, **options)
        codes, scales = oracles.quantize_activation(wide(x), ACTIVATIONS[activation], *map(float, scale))
        assert_close(found, codes @ expected.T * scales, F32, f32=1e-6)
        assert not found[0, 0].any()
        error = np.abs(found - wide(x) @ expected.T).max(axis=-1)
        assert 0 < error[0, 1] < 1.5  # quantized, and with some sense

    @pytest.mark.parametrize("activation", ["int8", "e4m3"])
    def test_codes_give_the_bytes_of_what_they_are_made_from(self, implementation, activation):
        element = "e4m3" if activation == "e4m3" else "int"
        tensor, _ = weight(QuantFormat(8, None, "none", "float32", element=element))
        x, arrays = normal(0, 2, 3, 80), tensor.arrays.values()
        options = {"format": tensor.format, "shape": tensor.shape, "activation": activation, "out_dtype": F32}
        codes, scale = map(np.asarray, quantize_activation(x, activation))
        found = compute(implementation, quantized_matmul, codes, *arrays, scale, **options)
        np.testing.assert_array_equal(found, compute("reference", quantized_matmul, x, *arrays, **options))

    @pytest.mark.parametrize("activation", [None, "int8", "e4m3"])
    @pytest.mark.parametrize("place", [0, 40, 79])
    @pytest.mark.parametrize("panels", [False, True], ids=["rows", "panels"])
    def test_a_number_that_is_none_spoils_its_row_alone(self, implementation, activation, place, panels):
        element = "e4m3" if activation == "e4m3" else "int"
        tensor, _ = weight(QuantFormat(8, None, "none", "float32", element=element), outputs=48)
        arrays = in_panels(tensor) if panels else tensor.arrays.values()
        x = normal(0, 3, 80)
        x[1, place] = np.nan
        options = {"format": tensor.format, "shape": tensor.shape, "activation": activation}
        found = compute(implementation, quantized_matmul, x, *arrays, **options, layout="panels" if panels else None)
        assert np.isnan(found[1]).all() and np.isfinite(found[[0, 2]]).all()

    @pytest.mark.parametrize("rows", [1, 3])
    @pytest.mark.parametrize(
        "format",
        [
            QuantFormat(8, None, "none", "float32"),
            QuantFormat(8, None, "zero", "float32"),
            QuantFormat(4, None, "none", "float32"),
            QuantFormat(4, None, "zero", "float32"),
            QuantFormat(4, 512, "zero", "float32", level2="channel"),
        ],
        ids=str,
    )
    def test_integers_are_summed_exactly(self, implementation, format, rows):
        # Sums of about 10^8 that float32 would round to multiples of 8, all of whose digits matter after cancelling.
        inputs, rng = 32768, np.random.default_rng(0)
        low, high = (-120, 120) if format.bits == 8 or format.level2 else (-7, 7)
        integers = rng.integers(low, high + 1, (4, inputs))
        specs = format.specs(4, inputs)
        fields = {name: np.ones(shape, dtype) for name, (shape, dtype) in specs.items()}
        if format.level2:  # steps of 8 from -120
            fields["scale"][:], fields["zero"][:] = 8, 15
            codes = rng.integers(0, 16, (4, inputs))
            integers = 8 * (codes - 15)
        elif format.offset == "zero":
            fields["zero"][:] = -low
            codes = integers - low
        else:
            codes = integers
        fields["codes"] = pack_int4(codes) if format.packed else codes.astype(fields["codes"].dtype)
        x = rng.integers(-127, 128, (rows, inputs)).astype(np.float32)
        x[:, 0] = 127
        shape, form = (4, inputs), {"format": format, "shape": (4, inputs), "activation": "int8"}
        assert fields["codes"].shape == format.specs(*shape)["codes"][0]
        found = compute(implementation, quantized_matmul, x, *fields.values(), **form)
        total = x.astype(np.int64) @ integers.T.astype(np.int64)
        np.testing.assert_array_equal(found, total.astype(np.float32))


@native_implementations
@pytest.mark.parametrize("panels", [False, True], ids=["rows", "panels"])
class TestQuantizedE4m3:
    FORMAT = QuantFormat(8, None, "none", "float32", element="e4m3")

    def options(self, codes, panels, activation):
        fields = {"codes": codes, "scale": np.ones((len(codes), 1), F32)}
        arrays = [layout.pack(name, array) if panels else array for name, array in fields.items()]
        place = {"layout": "panels" if panels else None, "activation": activation}
        return arrays, {"format": self.FORMAT, "shape": codes.shape, "out_dtype": F32, **place}

    @dtypes
    @pytest.mark.parametrize("activation", [None, "e4m3"])
    def test_every_code_stands_for_its_number(self, implementation, panels, dtype, activation):
        codes, x = np.zeros((256, 8), E4M3), np.zeros((1, 8), dtype)
        codes[:, 5], x[0, 5] = np.arange(256, dtype=np.uint8).view(E4M3), 1
        arrays, options = self.options(codes, panels, activation)
        found = compute(implementation, quantized_matmul, x, *arrays, **options)
        if activation is None:
            np.testing.assert_array_equal(found[0], codes[:, 5].astype(F32))
        else:  # 448 times 1/448
            np.testing.assert_allclose(found[0], codes[:, 5].astype(F32), rtol=2e-7)

    def test_activations_are_rounded_to_the_nearest_number_and_ties_to_even(self, implementation, panels):
        numbers = np.arange(127, dtype=np.uint8).view(E4M3).astype(F32)
        ties = (numbers[1:] + numbers[:-1]) / 2
        some = np.concatenate([numbers, ties, np.nextafter(ties, F32.type(0)), np.nextafter(ties, F32.type(448))])
        codes, x = np.zeros((16, 12), E4M3), np.zeros((2 * len(some), 12), F32)
        codes[:, 9], x[:, 9], x[:, 2] = 1, np.concatenate([some, -some]), 448  # whose unit is 1
        arrays, options = self.options(codes, panels, "e4m3")
        found = compute(implementation, quantized_matmul, x, *arrays, **options)
        np.testing.assert_array_equal(found[:, 0], x[:, 9].astype(E4M3).astype(F32))


def test_layers_are_not_dequantized_all_at_once():
    """XLA may not hold more float32 weights than one block of one layer."""
    format = QuantFormat(4, 64, "minimum", "float16")
    options = {"format": format, "shape": (1024, 1024)}
    fields = [[jax.ShapeDtypeStruct(*spec) for spec in format.specs(1024, 1024).values()] for _ in range(8)]

    def layers(x, fields):
        for arrays in fields:
            x = quantized_matmul(x, *arrays, **options)
        return x

    compiled = jax.jit(layers).lower(jax.ShapeDtypeStruct((4, 1024), F32), fields).compile()
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 4 * 1024 * 1024  # one layer dequantized


@implementations
class TestQuantizedTake:
    @formats
    @dtypes
    def test_takes_rows(self, implementation, format, dtype):
        tensor, expected = weight(format)
        ids = np.array([3, 0, 23, 3], np.int32)
        options = {"format": format, "shape": tensor.shape, "dtype": dtype}
        found = compute(implementation, quantized_take, ids, *tensor.arrays.values(), **options)
        assert_close(found, expected[ids], dtype, f32=1e-6)

    @pytest.mark.parametrize("format", PANELS, ids=str)
    def test_takes_rows_of_panels(self, implementation, format):
        tensor, _ = weight(format, outputs=48)
        ids = np.array([3, 0, 47, 17, 3], np.int32)
        options = {"format": format, "shape": tensor.shape, "dtype": F32}
        expected = compute(implementation, quantized_take, ids, *tensor.arrays.values(), **options)
        found = compute(implementation, quantized_take, ids, *in_panels(tensor), **options, layout="panels")
        np.testing.assert_array_equal(found, expected)

    @pytest.mark.parametrize("panels", [False, True])
    def test_ids_outside_the_table_are_clipped(self, implementation, panels):
        tensor, expected = weight(QuantFormat(8, None, "none", "float32"), outputs=48)
        options = {"format": tensor.format, "shape": tensor.shape, "dtype": F32, "layout": "panels" if panels else None}
        arrays = in_panels(tensor) if panels else tensor.arrays.values()
        ids = np.array([-1, 48, 10**6], np.int32)
        found = compute(implementation, quantized_take, ids, *arrays, **options)
        assert_close(found, expected[[0, 47, 47]], F32)


def test_wrong_dense_calls_are_refused():
    x, w = np.zeros((2, 8), F32), np.zeros((4, 8), F32)
    with pytest.raises(
        TypeError, match=r"dense_matmul: w has shape \(4, 7\), expected axes \[O I\] with I = 8 \(from x\)"
    ):
        dense_matmul(x, w[:, :7])
    with pytest.raises(TypeError, match="w has dtype bfloat16, expected float32"):
        dense_matmul(x, w.astype(BF16))
    with pytest.raises(TypeError, match="out_dtype must be a floating dtype, got int8"):
        dense_matmul(x, w, out_dtype=np.int8)


def test_wrong_quantized_calls_are_refused():
    format = QuantFormat(4, 32, "minimum", "float16")
    tensor, _ = weight(format)
    codes, scale, minimum = tensor.arrays.values()
    x, options = np.zeros((2, 80), F32), {"format": format, "shape": tensor.shape}
    with pytest.raises(TypeError, match=r"x has shape \(2, 79\), expected axes \[... 80\]"):
        quantized_matmul(x[:, :79], codes, scale, minimum, **options)
    with pytest.raises(TypeError, match="int4 g32 minimum f16 takes the arrays codes, scale, minimum, got 2 arrays"):
        quantized_matmul(x, codes, scale, **options)
    with pytest.raises(
        TypeError, match=r"scale is float32 \[24, 3\], expected float16 \[24, 3\] for a \[24, 80\] weight"
    ):
        quantized_matmul(x, codes, scale.astype(F32), minimum, **options)
    with pytest.raises(TypeError, match="must be even, got 81"):
        quantized_matmul(np.zeros((2, 81), F32), codes, scale, minimum, format=format, shape=(24, 81))
    with pytest.raises(TypeError, match="activation must be one of None, int8, int8-static, e4m3, got 'int4'"):
        quantized_matmul(x, codes, scale, minimum, **options, activation="int4")
    with pytest.raises(TypeError, match="int8-static takes a scale after the 3 arrays of the weight"):
        quantized_matmul(x, codes, scale, minimum, **options, activation="int8-static")
    with pytest.raises(TypeError, match=r"the scale of x is float16 \[\], expected float32 \[\]"):
        quantized_matmul(x, codes, scale, minimum, np.array(1, np.float16), **options, activation="int8-static")
    with pytest.raises(TypeError, match="takes the arrays codes, scale, minimum, got 4 arrays"):
        quantized_matmul(x, codes, scale, minimum, np.array(STATIC), **options, activation="int8")
    narrow, scales = x.astype(np.int8), np.ones((2, 1), F32)
    with pytest.raises(TypeError, match="codes of x take a scale after the 3 arrays of the weight"):
        quantized_matmul(narrow, codes, scale, minimum, **options, activation="int8", out_dtype=F32)
    with pytest.raises(TypeError, match=r"the scale of x is float32 \[2\], expected float32 \[2, 1\]"):
        quantized_matmul(narrow, codes, scale, minimum, scales[:, 0], **options, activation="int8", out_dtype=F32)
    with pytest.raises(TypeError, match="out_dtype must be a floating dtype, got int8"):
        quantized_matmul(narrow, codes, scale, minimum, scales, **options, activation="int8")
    with pytest.raises(TypeError, match="x has dtype int8, expected float32 or"):
        quantized_matmul(narrow, codes, scale, minimum, scales, **options, activation="e4m3", out_dtype=F32)
    with pytest.raises(TypeError, match="layout must be one of None, panels, got 'rows'"):
        quantized_matmul(x, codes, scale, minimum, **options, layout="rows")
    with pytest.raises(TypeError, match="24 outputs are no multiple of 16"):
        quantized_matmul(x, codes, scale, minimum, **options, layout="panels")
    large = {"format": format, "shape": (48, 80), "layout": "panels"}
    with pytest.raises(TypeError, match=r"codes is uint8 \[24, 40\], expected uint8 \[3, 10, 16, 4\] .* and panels"):
        quantized_matmul(x, codes, scale, minimum, **large)
    with pytest.raises(TypeError, match=r"codes is uint8 \[23, 40\]"):
        quantized_take(np.zeros(2, np.int32), codes[:23], scale, minimum, **options, dtype=F32)
    with pytest.raises(TypeError, match="quantized_take: dtype must be a floating dtype, got int32"):
        quantized_take(np.zeros(2, np.int32), codes, scale, minimum, **options, dtype=np.int32)
