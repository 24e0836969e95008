"""compressed-tensors checkpoints as llm-compressor writes them: one scheme for all quantized layers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxserve.models.config import Fields
from jaxserve.models.packed import (
    FLOAT_SCALES,
    INPUT_SCALE,
    Described,
    Layout,
    Parts,
    field_of_codes,
    kept_bits,
    storage_order,
    unpack_words,
    words_for,
)
from jaxserve.pallas_kernels import QuantFormat, QuantizedTensor

STRATEGIES = ("tensor", "channel", "group")
PLAIN = ("int-quantized", "float-quantized", "naive-quantized")
ELEMENTS = {"int": "int", "float": "e4m3"}
# What `quantized_matmul` calls activations of (type, dynamic, strategy), all of 8 bits and without zero points.
ACTIVATIONS = {
    ("int", True, "token"): "int8",
    ("int", False, "tensor"): "int8-static",
    ("float", True, "token"): "e4m3",
}


@dataclasses.dataclass(frozen=True)
class Weights:
    """How weights are quantized: w = scale * (q - z), z = 0 if symmetric, both signed; one scale for the whole matrix
    (`tensor`), an output (`channel`) or `group` inputs of one. Elements are whole numbers or e4m3 ones."""

    element: str
    bits: int
    strategy: str
    group: int | None
    symmetric: bool

    @classmethod
    def from_config(cls, fields: Fields) -> "Weights":
        bits, kind = fields.integer("num_bits", 8, high=64), fields.text("type", "int")
        if kind not in ELEMENTS:
            fields.fail("type", f"is '{kind}'; supported: {', '.join(ELEMENTS)}")
        if not (2 if kind == "int" else 8) <= bits <= 8:
            fields.fail("num_bits", f"is {bits} of type '{kind}'; supported: int of 2 to 8 bits, float of 8")
        symmetric = fields.flag("symmetric", True)
        if kind == "float" and not symmetric:
            fields.fail("symmetric", "is false; weights of type 'float' are supported without zero points only")
        if fields.get("dynamic", False) is not False:
            fields.fail("dynamic", "is set; weights are supported with stored scales only")
        group = fields.integer("group_size", None, low=-1, high=2**20)
        strategy = fields.text("strategy", "tensor" if group is None else "channel" if group == -1 else "group")
        if strategy not in STRATEGIES:
            fields.fail("strategy", f"is '{strategy}'; supported: {', '.join(STRATEGIES)}")
        if strategy == "group" and (group or 0) < 1:
            fields.fail("group_size", f"is {group}; strategy 'group' needs a number of inputs")
        return cls(ELEMENTS[kind], bits, strategy, group if strategy == "group" else None, symmetric)

    def describe(self, parts: Parts, outputs: int, inputs: int, activation: str | None) -> Described:
        """The weight [O, I] that these parts are; checks scales, zero points and order."""
        group = min(self.group or inputs, inputs)
        groups = -(-inputs // group)
        why = f"{self.bits} bits by {self.strategy}, {outputs} outputs and {inputs} inputs"
        shape = (1,) if self.strategy == "tensor" else (outputs, groups)
        scale = parts.check("weight_scale", shape, why, *FLOAT_SCALES)
        if not self.symmetric:
            self._check_zeros(parts, shape, why)
        if activation == "int8-static":
            parts.check(INPUT_SCALE, (1,), "static activations", *FLOAT_SCALES)
        ordered = False
        if "weight_g_idx" in parts:
            parts.check("weight_g_idx", (inputs,), why, "I32", "I64")
            ordered = storage_order(parts, "weight_g_idx", group, groups) is not None
        format = QuantFormat(
            bits=kept_bits(self.bits),
            group=self.group,
            offset="none" if self.symmetric else "zero",
            scale_dtype=FLOAT_SCALES[scale.stored],
            element=self.element,
            ordered=ordered,
        )
        return Described((outputs, inputs), format, activation)

    def _check_zeros(self, parts: Parts, shape: tuple[int, ...], why: str) -> None:
        """Packed along the outputs; int8 in plain layouts, and in packed ones before compressed-tensors 0.10."""
        packed = parts.spec("weight_zero_point", "I8", "I32").stored == "I32"
        words = (words_for(shape[0], self.bits), *shape[1:])
        parts.check("weight_zero_point", words if packed else shape, why, "I32" if packed else "I8")

    def tensor(self, parts: Parts, described: Described, codes: np.ndarray) -> QuantizedTensor:
        """The weight with these codes [O, I]: e4m3, or unsigned, as 2^(bits-1) has been added to them."""
        (outputs, inputs), format = described.shape, described.format
        scale = parts.read("weight_scale")
        groups = 1 if scale.ndim == 1 else scale.shape[1]
        arrays = {"scale": np.ascontiguousarray(np.broadcast_to(scale, (outputs, groups)))}
        if not format.signed:
            zeros = self._zeros(parts, outputs)
            arrays["zero"] = np.ascontiguousarray(np.broadcast_to(zeros, (outputs, groups)))
        if format.ordered:
            order = storage_order(parts, "weight_g_idx", format.group_size(inputs), groups)
            assert order is not None
            codes, arrays["order"] = codes[:, order], order
        arrays["codes"] = field_of_codes(codes, self.bits, format)
        return QuantizedTensor(format, described.shape, {name: arrays[name] for name in format.fields})

    def _zeros(self, parts: Parts, outputs: int) -> np.ndarray:
        zeros = parts.read("weight_zero_point")
        if zeros.dtype == np.int8:
            return self.unsigned(zeros)
        return unpack_words(zeros.T, self.bits, outputs).T

    def unsigned(self, codes: np.ndarray) -> np.ndarray:
        """Signed int8 codes with 2^(bits-1) added, as uint8."""
        return codes.view(np.uint8) + np.uint8(1 << (self.bits - 1))


@dataclasses.dataclass(frozen=True)
class PackQuantized:
    """weight_packed int32 [O, I*bits/32]: q + 2^(bits-1), packed along the inputs; weight_shape int64 [2] = O, I.

    weight_zero_point is packed the same way along the outputs. weight_g_idx int32 [I], if there is one, is the group of
    every input (`actorder: group`, which llm-compressor wrote until 2026).
    """

    weights: Weights
    activation: str | None
    name: str = "pack-quantized"
    mark: str = "weight_packed"
    parts: tuple[str, ...] = (
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        INPUT_SCALE,
    )

    def describe(self, parts: Parts) -> Described:
        outputs, words = parts.matrix("weight_packed", "I32")
        parts.check("weight_shape", (2,), "two axes", "I64", "I32")
        rows, inputs = map(int, parts.read("weight_shape"))
        if rows != outputs or inputs < 1 or words_for(inputs, self.weights.bits) != words:
            parts.fail("weight_packed", f"has shape [{outputs}, {words}]; weight_shape says [{rows}, {inputs}]")
        return self.weights.describe(parts, outputs, inputs, self.activation)

    def decode(self, parts: Parts, described: Described) -> QuantizedTensor:
        codes = unpack_words(parts.read("weight_packed"), self.weights.bits, described.shape[1])
        return self.weights.tensor(parts, described, codes)


@dataclasses.dataclass(frozen=True)
class PlainQuantized:
    """weight [O, I] holds q, one to a byte, int8 or e4m3; zero points are int8. input_scale [1] is for static ones."""

    weights: Weights
    activation: str | None
    name: str
    mark: str = "weight_scale"
    parts: tuple[str, ...] = ("weight", "weight_scale", "weight_zero_point", INPUT_SCALE)

    def describe(self, parts: Parts) -> Described:
        stored = "I8" if self.weights.element == "int" else "F8_E4M3"
        return self.weights.describe(parts, *parts.matrix("weight", stored), self.activation)

    def decode(self, parts: Parts, described: Described) -> QuantizedTensor:
        codes = parts.read("weight")
        return self.weights.tensor(
            parts, described, self.weights.unsigned(codes) if self.weights.element == "int" else codes
        )


def compressed_layout(fields: Fields) -> Layout:
    """The layout of a `quantization_config`; CheckpointError for what is not supported."""
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if fields.get(name):
            fields.fail(name, "is set, which is not supported")
    groups: Mapping[str, Any] = fields.get("config_groups", {})
    named = fields.section("config_groups")
    if named is None or len(groups) != 1:
        fields.fail("config_groups", f"must hold one group, which all quantized layers share; it holds {len(groups)}")
    scheme = named.section(next(iter(groups)))
    section = None if scheme is None else scheme.section("weights")
    if scheme is None or section is None:
        fields.fail("config_groups", "holds a group that does not quantize weights, which is not supported")
    if scheme.get("output_activations"):
        scheme.fail("output_activations", "is set, which is not supported")
    where = scheme if scheme.get("format") is not None else fields
    name, weights = where.text("format"), Weights.from_config(section)
    activation = _activation(scheme)
    if name == "pack-quantized" and weights.element == "int":
        return PackQuantized(weights, activation)
    if name in PLAIN:
        return PlainQuantized(weights, activation, name)
    where.fail("format", f"is '{name}'; supported: pack-quantized, {', '.join(PLAIN)}")


def _activation(scheme: Fields) -> str | None:
    """How activations are quantized, in the words of `quantized_matmul`."""
    inputs = scheme.section("input_activations")
    if inputs is None:
        return None
    bits, kind = inputs.integer("num_bits", 8, high=64), inputs.text("type", "int")
    dynamic, strategy = inputs.flag("dynamic", False), inputs.text("strategy", "tensor")
    if not inputs.flag("symmetric", True):
        inputs.fail("symmetric", "is false; activations are supported without zero points only")
    found = kind, dynamic, strategy
    if bits != 8 or found not in ACTIVATIONS:
        known = "; ".join(f"8 {_words(*choice)}" for choice in ACTIVATIONS)
        scheme.fail("input_activations", f"are {bits} {_words(*found)}; supported: {known}")
    return ACTIVATIONS[found]


def _words(kind: str, dynamic: bool, strategy: str) -> str:
    return f"bits {kind}, {'dynamic' if dynamic else 'static'} by {strategy}"
