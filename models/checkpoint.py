"""A model on disk: what it is, and its parameters, read one at a time by path."""

import abc
import copy
import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from jaxserve.models.config import Fields, ModelConfig
from jaxserve.models.errors import CheckpointError
from jaxserve.models.family import Source, Sources, param_specs
from jaxserve.models.finite import first_not_finite
from jaxserve.models.registry import make_module
from jaxserve.models.store import StoredTensor, TensorStore
from jaxserve.pallas_kernels import QuantFormat, QuantizedTensor

__all__ = ["Checkpoint", "CheckpointError", "GenerationDefaults", "TensorSpec"]


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """What a checkpoint says about generating: ids that end a text, the id that begins one, sampling if it has an
    opinion (None where it has none)."""

    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None

    @classmethod
    def from_fields(
        cls, fields: Fields, vocab: int, fallback: "GenerationDefaults | None" = None
    ) -> "GenerationDefaults":
        """The fields of a generation_config.json or config.json; `fallback` supplies the ids that are not there."""
        fallback = fallback or cls()
        ids = fields.get("eos_token_id", list(fallback.eos_ids))
        ids = tuple(dict.fromkeys(ids if isinstance(ids, list) else [ids]))
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                fields.fail("eos_token_id", f"must hold token ids from 0 to {vocab - 1}, got {token!r:.80}")
        return cls(
            eos_ids=ids,
            bos_id=fields.integer("bos_token_id", fallback.bos_id, low=0, high=vocab - 1),
            temperature=fields.number("temperature", None, zero=True),
            top_p=fields.number("top_p", None),
            top_k=fields.integer("top_k", None, low=0, high=2**31 - 1),
            repetition_penalty=fields.number("repetition_penalty", None),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**dataclasses.asdict(self), "eos_ids": list(self.eos_ids)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "GenerationDefaults":
        """The inverse of `to_json`."""
        return cls(**{**values, "eos_ids": tuple(values["eos_ids"])})


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A parameter as it can be read: shape, dtype of `read`, the quantized form nearest to how it is stored, if it is
    quantized, and what the file calls its type (`BF16`, `Q4_K`). `exact` says that this form holds it bit for bit, and
    that `read_native` gives it; `activation` what its activations are to be quantized to (see `quantized_matmul`)."""

    shape: tuple[int, ...]
    dtype: str
    format: QuantFormat | None
    stored: str
    exact: bool = True
    activation: str | None = None


class Checkpoint(abc.ABC):
    """A checkpoint that has been opened and checked: every parameter of its model is there with the right shape.

    Only headers have been read. `config` is the model's; `origin` says to people where it came from; `native` is true
    when some parameters can be kept quantized exactly as they are stored; `stored_bytes` is what the parameters take
    there; `unused` names the stored tensors that no parameter needs.
    """

    def __init__(
        self,
        config: ModelConfig,
        store: TensorStore,
        sources: Sources,
        *,
        origin: str,
        generation: GenerationDefaults,
        ignored: Iterable[str] = (),
    ) -> None:
        self.config = config
        self.origin = origin
        self.generation = generation
        self._store = store
        self._specs = check_tensors(config, store.tensors, sources, origin)
        sources = {**sources, **_input_scales(self._specs, sources)}
        self._sources = sources
        self.native = any(spec.format is not None and spec.exact for spec in self._specs.values())
        used = {source.name for source in sources.values()}
        self.stored_bytes = sum(store.tensors[name].nbytes for name in used)
        skip = re.compile("|".join(f"(?:{pattern})" for pattern in ignored) or r"(?!)")
        unused = [name for name in store.tensors if name not in used and not skip.fullmatch(name)]
        self.unused = tuple(name for name in unused if not self._is_zero_bias(name, used))

    def _is_zero_bias(self, name: str, used: set[str]) -> bool:
        """Whether a tensor adds nothing to a layer that has no bias here: quantizers gave one to every layer. A bias
        that adds something is an error, as the model would not be the one that is stored."""
        layer, _, kind = name.rpartition(".")
        if kind != "bias" or f"{layer}.weight" not in used or self._store.tensors[name].dtype is None:
            return False
        if self._store.read(name).any():
            raise CheckpointError(
                f"{self._store.tensors[name].file}: tensor '{name}' is not zero, but this {self.config.family} model"
                " has no bias there"
            )
        return True

    def specs(self) -> dict[str, TensorSpec]:
        """Every parameter by path."""
        return dict(self._specs)

    def first_layers(self, count: int) -> Self:
        """The model cut to its first `count` layers, after which its last norm and its head follow: an early exit.

        ValueError when it has fewer.
        """
        if not 1 <= count <= self.config.layers:
            raise ValueError(f"{count} layers of a model of {self.config.layers}")
        cut = copy.copy(self)
        cut.config = self.config.with_layers(count)
        kept = param_specs(make_module(cut.config, jnp.dtype("float32")))
        cut._specs = {path: self._specs[path] for path in kept}
        cut.stored_bytes = sum(self._store.tensors[name].nbytes for name in {self._sources[path].name for path in kept})
        return cut

    def read(self, path: str) -> np.ndarray:
        """One parameter: float32 if it is stored quantized, else float32, float16 or bfloat16 as stored.

        Read from the file at every call, so keep no more of them than you need. KeyError for a path that is not in
        `specs()`; CheckpointError if the file has changed since it was opened, or the tensor holds a NaN or infinity.
        """
        source = self._sources[path]
        array = self._store.read(source.name)
        self._check_finite(source.name, array)
        order = source.row_order(array.shape)
        return array if order is None else array[order]

    def read_native(self, path: str) -> QuantizedTensor | np.ndarray:
        """One parameter in the quantized form it is stored in, bit for bit, where `specs()` gives an exact format;
        else as `read`.

        PATH/input_scale is the static scale, float32 [], of what the weight at PATH multiplies, where its activation is
        `int8-static`.
        """
        source = self._sources[path]
        tensor = self._store.read_native(source.name)
        if isinstance(tensor, QuantizedTensor):
            for field, array in tensor.arrays.items():
                self._check_finite(source.name, array, f" of its {field}")
        else:
            self._check_finite(source.name, tensor)
        order = source.row_order(tensor.shape)
        if order is None:
            return tensor
        return tensor.take_rows(order) if isinstance(tensor, QuantizedTensor) else tensor[order]

    def _check_finite(self, name: str, array: np.ndarray, where: str = "") -> None:
        if (place := first_not_finite(array)) is not None:
            raise CheckpointError(
                f"{self._store.tensors[name].file}: tensor '{name}' holds {array[place]} at {list(place)}{where}; "
                "weights must be finite numbers"
            )

    @abc.abstractmethod
    def write_tokenizer(self, folder: Path) -> None:
        """Write the checkpoint's tokenizer and chat template into a folder that exists."""


def _input_scales(specs: Mapping[str, TensorSpec], sources: Sources) -> Sources:
    """Where the static scales of activations are."""
    return {
        f"{path}/input_scale": Source(f"{sources[path].name.removesuffix('weight')}input_scale")
        for path, spec in specs.items()
        if spec.activation == "int8-static"
    }


def check_tensors(
    config: ModelConfig, tensors: Mapping[str, StoredTensor], sources: Sources, origin: str
) -> dict[str, TensorSpec]:
    """What each parameter can be read as; CheckpointError if one is missing or has the wrong shape or type."""
    missing = [source.name for source in sources.values() if source.name not in tensors]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{origin}: tensor '{missing[0]}'{more} is missing, which this {config.family} model needs"
        )
    specs = {}
    for path, expected in param_specs(make_module(config, jnp.dtype("float32"))).items():
        name = sources[path].name
        stored = tensors[name]
        if stored.shape != expected.shape:
            raise CheckpointError(
                f"{stored.file}: tensor '{name}' has shape {list(stored.shape)}, config needs {list(expected.shape)}"
            )
        if stored.dtype is None:
            raise CheckpointError(
                f"{stored.file}: tensor '{name}' is stored as {stored.stored}, which is not supported"
            )
        specs[path] = TensorSpec(
            stored.shape, stored.dtype, stored.format, stored.stored, stored.exact, stored.activation
        )
    return specs
