"""GGUF files: config from the metadata, weights dequantized or kept in the blocks they are stored in."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from jaxserve.models.checkpoint import Checkpoint, GenerationDefaults
from jaxserve.models.config import Fields, ModelConfig
from jaxserve.models.errors import CheckpointError
from jaxserve.models.gguf_blocks import KEPT, REQUANTIZED, ROUNDED, unpack_blocks
from jaxserve.models.gguf_config import with_rope_factors
from jaxserve.models.gguf_header import GGUFTensor, read_header
from jaxserve.models.registry import GGUF_ARCHITECTURES
from jaxserve.models.store import StoredTensor
from jaxserve.models.tensor_file import read_array
from jaxserve.pallas_kernels import QuantizedTensor
from jaxserve.text import gguf_tokenizer, save_tokenizer

Type = GGMLQuantizationType

_FLOATS = {Type.F32: np.dtype(np.float32), Type.F16: np.dtype(np.float16), Type.BF16: np.dtype(ml_dtypes.bfloat16)}
_ROPE_FACTORS = "rope_freqs.weight"


class GGUFStore:
    """The tensors of one GGUF file: the header is validated at once, data is read on demand."""

    def __init__(self, path: Path) -> None:
        self.header = read_header(path)
        self._file = str(path)
        self.tensors: Mapping[str, StoredTensor] = {
            tensor.name: _describe(tensor, path) for tensor in self.header.tensors.values()
        }

    @np.errstate(over="ignore", invalid="ignore")  # `Checkpoint` refuses what is not finite, by name
    def read(self, name: str) -> np.ndarray:
        """The tensor in its stored float dtype, or dequantized to float32."""
        tensor = self.header.tensors[name]
        if tensor.type in _FLOATS:
            return read_array(self._file, tensor.start, _FLOATS[tensor.type], tensor.shape)
        return dequantize(self._bytes(tensor), tensor.type)

    @np.errstate(over="ignore", invalid="ignore")
    def read_native(self, name: str) -> QuantizedTensor | np.ndarray:
        """The blocks of a quantized matrix, bit for bit, where a format holds them; anything else as `read`."""
        tensor, spec = self.header.tensors[name], self.tensors[name]
        if spec.format is None or not spec.exact:
            return self.read(name)
        return unpack_blocks(self._bytes(tensor), tensor.type, tensor.shape[-1])

    def _bytes(self, tensor: GGUFTensor) -> np.ndarray:
        """The tensor's blocks as bytes, one row of the matrix a row."""
        rows = math.prod(tensor.shape[:-1])
        return read_array(self._file, tensor.start, np.dtype(np.uint8), (rows, tensor.nbytes // rows))


def _describe(tensor: GGUFTensor, path: Path) -> StoredTensor:
    kind = tensor.type
    if kind in _FLOATS:
        dtype, format = _FLOATS[kind].name, None
    elif kind in KEPT or kind in ROUNDED:
        dtype, format = "float32", KEPT[kind].format if kind in KEPT else REQUANTIZED
    else:
        dtype, format = None, None
    if len(tensor.shape) != 2:
        format = None
    return StoredTensor(tensor.shape, kind.name, dtype, format, str(path), tensor.nbytes, exact=kind not in ROUNDED)


class GGUFCheckpoint(Checkpoint):
    """A GGUF file that holds a whole model."""

    def __init__(self, path: Path, origin: str | None = None) -> None:
        """Open and check a file; `origin` replaces its path where people read where the model came from."""
        store = GGUFStore(path)
        self._metadata = store.header.metadata
        fields = Fields(self._metadata, str(path))
        if fields.integer("split.count", 0, low=0, high=2**16 - 1) > 1:
            raise CheckpointError(f"{path}: is one part of a split GGUF; merge the parts first (gguf-split --merge)")
        shapes = {name: tensor.shape for name, tensor in store.tensors.items()}
        config = ModelConfig.from_gguf(self._metadata, shapes, str(path))
        if _ROPE_FACTORS in store.tensors:
            config = with_rope_factors(config, store.tensors[_ROPE_FACTORS], store.read(_ROPE_FACTORS))
        architecture = GGUF_ARCHITECTURES[self._metadata["general.architecture"]]
        super().__init__(
            config,
            store,
            architecture.sources(config),
            origin=origin or str(path),
            generation=_generation(fields, config.vocab),
            ignored=(_ROPE_FACTORS,),
        )

    def write_tokenizer(self, folder: Path) -> None:
        """Rebuild the tokenizer from the metadata and write it as files."""
        save_tokenizer(gguf_tokenizer(self._metadata), folder)


def _generation(fields: Fields, vocab: int) -> GenerationDefaults:
    """Besides the end of text, models for chat have an id that ends a turn: both end an answer."""
    ids: dict[str, Any] = {}
    names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    found = [fields.integer(name, None, low=0, high=vocab - 1) for name in names]
    ids["eos_token_id"] = [token for token in found if token is not None]
    ids["bos_token_id"] = fields.get("tokenizer.ggml.bos_token_id")
    return GenerationDefaults.from_fields(Fields(ids, fields.source), vocab)
