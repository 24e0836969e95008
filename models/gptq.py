"""GPTQ checkpoints as GPTQModel, AutoGPTQ and transformers write them: https://arxiv.org/abs/2210.17323."""

import dataclasses

import numpy as np

from jaxserve.models.config import Fields
from jaxserve.models.packed import (
    FLOAT_SCALES,
    Described,
    Parts,
    check_symmetric,
    field_of_codes,
    kept_bits,
    storage_order,
    unpack_words,
    words_for,
)
from jaxserve.pallas_kernels import QuantFormat, QuantizedTensor

BITS = (2, 3, 4, 8)
VERSIONS = ("gptq", "gptq_v2")


@dataclasses.dataclass(frozen=True)
class GPTQLayout:
    """w[o, i] = scales[g, o] * (q[o, i] - z[g, o]) with g = g_idx[i].

    qweight int32 [I*bits/32, O] packs codes along the inputs, qzeros int32 [G, O*bits/32] zero points along the
    outputs; scales [G, O] are floats, g_idx int32 [I]. Version `gptq` stores z - 1, `gptq_v2` z itself. Without `group`
    a layer has one group. Symmetric layers have z = 2^(bits-1) everywhere, which makes codes signed and needs no zero
    points here.
    """

    bits: int
    group: int | None
    symmetric: bool
    version: str
    name: str = "GPTQ"
    mark: str = "qweight"
    parts: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")

    @classmethod
    def from_config(cls, fields: Fields) -> "GPTQLayout":
        """From `quantization_config` or AutoGPTQ's quantize_config.json; CheckpointError for what is not supported."""
        bits = fields.integer("bits", high=8)
        if bits not in BITS:
            fields.fail("bits", f"is {bits}; supported: {', '.join(map(str, BITS))}")
        name = "checkpoint_format" if fields.get("checkpoint_format") is not None else "format"
        version = fields.text(name, "gptq")
        if version not in VERSIONS:
            fields.fail(name, f"is '{version}'; supported: {', '.join(VERSIONS)}")
        group = fields.integer("group_size", low=-1, high=2**20)
        if group == 0:
            fields.fail("group_size", "is 0; it must be a number of inputs, or -1 for all of them")
        return cls(bits, None if group == -1 else group, fields.flag("sym", True), version)

    def describe(self, parts: Parts) -> Described:
        words, outputs = parts.matrix("qweight", "I32")
        inputs = words * 32 // self.bits
        group = min(self.group or inputs, inputs)
        groups = -(-inputs // group)
        why = f"{self.bits}-bit codes in groups of {group}, {outputs} outputs and {inputs} inputs"
        scales = parts.check("scales", (groups, outputs), why, *FLOAT_SCALES)
        parts.check("qzeros", (groups, words_for(outputs, self.bits)), why, "I32")
        parts.check("g_idx", (inputs,), why, "I32")
        format = QuantFormat(
            bits=kept_bits(self.bits),
            group=self.group,
            offset="none" if self.symmetric else "zero",
            scale_dtype=FLOAT_SCALES[scales.stored],
            ordered=storage_order(parts, "g_idx", group, groups) is not None,
        )
        return Described((outputs, inputs), format)

    def decode(self, parts: Parts, described: Described) -> QuantizedTensor:
        (outputs, inputs), format = described.shape, described.format
        codes = unpack_words(parts.read("qweight").T, self.bits, inputs)
        zeros = self._zeros(parts, outputs)
        arrays = {"scale": np.ascontiguousarray(parts.read("scales").T)}
        if self.symmetric:
            check_symmetric(parts, "qzeros", zeros, self.bits)
        else:
            arrays["zero"] = np.ascontiguousarray(zeros.T)
        if format.ordered:
            order = storage_order(parts, "g_idx", format.group_size(inputs), zeros.shape[0])
            assert order is not None
            codes, arrays["order"] = codes[:, order], order
        arrays["codes"] = field_of_codes(codes, self.bits, format)
        return QuantizedTensor(format, described.shape, {name: arrays[name] for name in format.fields})

    def _zeros(self, parts: Parts, outputs: int) -> np.ndarray:
        """Zero points [G, O] uint8."""
        zeros = unpack_words(parts.read("qzeros"), self.bits, outputs)
        if self.version == "gptq_v2":
            return zeros
        if zeros.max(initial=0) == (1 << self.bits) - 1:
            # 0 - 1 wraps around: GPTQModel borrows from the neighbour, AutoGPTQ does not, and kernels read 2^bits.
            parts.fail("qzeros", "holds a zero point of 0, which the tools read in different ways; save it as gptq_v2")
        return zeros + np.uint8(1)
