"""What a model is made of: one frozen description that every checkpoint format is translated into."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, NoReturn, Self

from jaxserve.models.errors import CheckpointError
from jaxserve.pallas_kernels import RopeSpec

# Sizes past these belong to no model; a file that claims more is damaged, and is refused before anything is allocated.
MAX_VOCAB = 2**22
MAX_WIDTH = 2**18
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 4096
MAX_MLP = 2**20
MAX_POSITIONS = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer: V = vocab, D = width, L = layers, N = heads, K = kv_heads, H = head_dim, F = mlp.

    `windows` has one entry a layer: None attends to everything before, W to the last W positions, the token itself
    included. `tied` says that the logits are computed with the embedding table. `qk_norm` normalises every head of q
    and k (over H) before the rotation.
    """

    family: str
    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    norm_eps: float
    rope: RopeSpec
    tied: bool
    max_positions: int
    windows: tuple[int | None, ...]
    activation: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if len(self.windows) != self.layers:
            raise ValueError(f"windows has {len(self.windows)} entries for {self.layers} layers")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot be divided among {self.kv_heads} key/value heads")

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], source: str = "config.json") -> "ModelConfig":
        """The config of a Hugging Face `config.json`, in the spelling of transformers 4 or 5.

        `source` names the file in error messages. Raises UserError for a family we do not have, CheckpointError for a
        missing, malformed or contradictory field.
        """
        from jaxserve.models.registry import config_from_hf  # families import this module

        return config_from_hf(Fields(values, source))

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], source: str = "GGUF"
    ) -> "ModelConfig":
        """The config of a GGUF file: its metadata, and the shapes of its tensors by name (they tell what is tied or
        biased). Raises like `from_hf`."""
        from jaxserve.models.registry import config_from_gguf

        return config_from_gguf(Fields(metadata, source), tensors)

    def with_layers(self, layers: int) -> Self:
        """The same model cut to its first `layers` layers, for checks on a shrunk model."""
        return dataclasses.replace(self, layers=layers, windows=self.windows[:layers])

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, for people and for a manifest."""
        return dataclasses.asdict(self)


_REQUIRED: Any = object()


class Fields:
    """Checked access to the fields of a config; every complaint names the file, the field and the value.

    A field that is null counts as absent.
    """

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{source}: expected an object with named fields, got {type(values).__name__}")
        self.source = source
        self._values = values
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def fail(self, name: str, problem: str) -> NoReturn:
        """Raise a CheckpointError about one field."""
        raise CheckpointError(f"{self.source}: field '{self._prefix}{name}' {problem}")

    def get(self, name: str, default: Any = None) -> Any:
        """The raw value; `default` when absent or null."""
        value = self._values.get(name)
        if value is None:
            if default is _REQUIRED:
                self.fail(name, "is missing")
            return default
        return value

    def integer(self, name: str, default: Any = _REQUIRED, *, low: int = 1, high: int) -> Any:
        """A whole number in [low, high]; None only when that is the default."""
        value = self.get(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(name, f"must be a whole number, got {value!r:.80}")
        if not low <= value <= high:
            self.fail(name, f"is {value}, outside the allowed {low} to {high}")
        return value

    def number(self, name: str, default: Any = _REQUIRED, *, zero: bool = False) -> Any:
        """A finite positive number, zero included if asked, as a float; None only when that is the default."""
        value = self.get(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(name, f"must be a number, got {value!r:.80}")
        if not 0 <= value <= sys.float_info.max or (value == 0 and not zero):  # NaN fails the first test
            self.fail(name, f"is {value!r:.80}; it must be finite and {'not negative' if zero else 'greater than 0'}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.fail(name, f"must be true or false, got {value!r:.80}")
        return value

    def text(self, name: str, default: Any = _REQUIRED) -> str:
        """A string."""
        value = self.get(name, default)
        if not isinstance(value, str):
            self.fail(name, f"must be a string, got {value!r:.80}")
        return value

    def section(self, name: str) -> "Fields | None":
        """A nested object, or None when absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.fail(name, f"must be an object, got {value!r:.80}")
        return Fields(value, self.source, f"{self._prefix}{name}.")

    def under(self, prefix: str) -> "Fields":
        """The fields whose names start with `prefix`, which is left out of their names."""
        values = {name.removeprefix(prefix): value for name, value in self._values.items() if name.startswith(prefix)}
        return Fields(values, self.source, prefix)
