"""AWQ checkpoints as AutoAWQ and GPTQModel write them: https://arxiv.org/abs/2306.00978."""

import dataclasses

import numpy as np

from jaxserve.models.config import Fields
from jaxserve.models.packed import FLOAT_SCALES, Described, Parts, check_symmetric, field_of_codes, unpack_words
from jaxserve.pallas_kernels import QuantFormat, QuantizedTensor

# Nibble k of a word, the lowest first, holds the output 8 * word + _OUTPUTS[k].
_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACES = np.argsort(_OUTPUTS)


@dataclasses.dataclass(frozen=True)
class AWQLayout:
    """w[o, i] = scales[g, o] * (q[o, i] - z[g, o]) with g = i // group, 4 bits (`version: gemm`).

    qweight int32 [I, O/8] and qzeros int32 [G, O/8] both pack along the outputs, eight to a word in the order
    0 2 4 6 1 3 5 7 from the lowest bits on; scales [G, O] are floats. Symmetric layers (`zero_point: false`) have z = 8
    everywhere, which makes codes signed and needs no zero points here.
    """

    group: int | None
    symmetric: bool
    name: str = "AWQ"
    mark: str = "qweight"
    parts: tuple[str, ...] = ("qweight", "qzeros", "scales")

    @classmethod
    def from_config(cls, fields: Fields) -> "AWQLayout":
        """From `quantization_config` or AutoAWQ's quant_config.json; CheckpointError for what is not supported."""
        bits = "bits" if fields.get("bits") is not None else "w_bit"
        if fields.integer(bits, high=8) != 4:
            fields.fail(bits, f"is {fields.get(bits)}; AWQ is supported with 4 bits")
        name = next((name for name in ("version", "checkpoint_format") if fields.get(name) is not None), "format")
        if fields.text(name, "gemm").lower() != "gemm":
            fields.fail(name, f"is '{fields.get(name)}'; of AWQ's layouts gemm is supported")
        size = "group_size" if fields.get("group_size") is not None else "q_group_size"
        group = fields.integer(size, low=-1, high=2**20)
        if group == 0:
            fields.fail(size, "is 0; it must be a number of inputs, or -1 for all of them")
        return cls(None if group == -1 else group, not fields.flag("zero_point", True))

    def describe(self, parts: Parts) -> Described:
        inputs, words = parts.matrix("qweight", "I32")
        outputs, group = words * 8, min(self.group or inputs, inputs)
        groups = -(-inputs // group)
        why = f"groups of {group}, {outputs} outputs and {inputs} inputs"
        scales = parts.check("scales", (groups, outputs), why, *FLOAT_SCALES)
        parts.check("qzeros", (groups, words), why, "I32")
        offset = "none" if self.symmetric else "zero"
        format = QuantFormat(bits=4, group=self.group, offset=offset, scale_dtype=FLOAT_SCALES[scales.stored])
        return Described((outputs, inputs), format)

    def decode(self, parts: Parts, described: Described) -> QuantizedTensor:
        zeros = _unpack(parts.read("qzeros"))
        arrays = {"codes": field_of_codes(_unpack(parts.read("qweight")).T, 4, described.format)}
        arrays["scale"] = np.ascontiguousarray(parts.read("scales").T)
        if self.symmetric:
            check_symmetric(parts, "qzeros", zeros, 4)
        else:
            arrays["zero"] = np.ascontiguousarray(zeros.T)
        return QuantizedTensor(described.format, described.shape, arrays)


def _unpack(words: np.ndarray) -> np.ndarray:
    """Codes [n, O] uint8 of words [n, O/8]."""
    rows, outputs = words.shape[0], words.shape[1] * 8
    return unpack_words(words, 4, outputs).reshape(rows, -1, 8)[..., _PLACES].reshape(rows, outputs)
