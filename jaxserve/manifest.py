"""The manifest of an artifact: what was compiled, from what, how, and which files make it up.

The manifest is the one file that says what the others are. It is written last, and its major version is the promise
that a reader understands it: unknown majors are refused, unknown fields of a known major are ignored.
"""

import json
from collections.abc import Mapping
from typing import Any

import pydantic
from pydantic.dataclasses import dataclass

from jaxserve.errors import UserError

SCHEMA = "5.0"
"""`major.minor` of the manifests that this version writes; another major is refused. 3: a step
may choose several tokens of a sequence, which brings proposals."""


class ArtifactError(UserError):
    """An artifact cannot be written or used; the message names the file or field and what to do."""


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Where the model came from; `config` is the model's own configuration, for people."""

    family: str
    name: str
    origin: str
    config: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StaticLimits:
    """What the step functions were compiled for. Serving may use less and never more. `look_ahead`: steps can also
    foresee the token after the one that they choose."""

    max_num_seqs: int
    max_model_len: int
    kv_tokens: int
    page_size: int
    num_pages: int
    vocab_size: int
    look_ahead: bool = False


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """One array of a program: its name (the parameter's path, for weights), shape and dtype name."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class PassRecord:
    """What one pass did: how often it matched, and how often it refused for each reason."""

    name: str
    matches: int
    refused: dict[str, int] = pydantic.Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CalibrationRecord:
    """On what text the passes were calibrated: its name and hash, and how many rows of how many tokens of it."""

    text: str
    sha256: str
    sequences: int
    length: int

    def __str__(self) -> str:
        return f"{self.sequences} sequences of {self.length} tokens of {self.text}"


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers whose KV cache has the same geometry and shares one block table.

    `bytes_per_token` counts every array of all these layers; `format` is what keys and values are stored as.
    """

    layers: tuple[int, ...]
    kind: str
    window: int | None
    bytes_per_token: int
    format: str = ""


@dataclass(frozen=True, kw_only=True)
class CachedExecutable:
    """Machine code of a program: the file, and the key that says where it may run."""

    key: dict[str, str]
    file: str


@dataclass(frozen=True, kw_only=True)
class Program:
    """One compiled function: a step bucket (`tokens` T and `seqs` S) or a helper such as admitting a sequence.

    `inputs` are the host's inputs, which lie one after the other in one array. `donate` are the positions of the
    donated arguments, which an export does not remember. `export` is the file of the StableHLO, the truth;
    `executables` cache what it compiles to.
    """

    name: str
    kind: str
    export: str
    tokens: int = 0
    seqs: int = 0
    donate: tuple[int, ...] = ()
    inputs: tuple[ArraySpec, ...] = ()
    compiler_options: dict[str, str | bool | int | float] = pydantic.Field(default_factory=dict)
    executables: tuple[CachedExecutable, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of the weights as the checkpoint stored them and as the artifact keeps them in memory."""

    checkpoint_bytes: int
    weight_bytes: int


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size and content hash of one file."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All of manifest.json. `params` are in the order that programs take them; `files` maps relative paths."""

    schema: str = SCHEMA
    model: ModelInfo
    recipe: str
    activations: str
    target: str
    mesh: int = 1
    versions: dict[str, str]
    limits: StaticLimits
    pass_spec: str
    passes: tuple[PassRecord, ...] = ()
    calibration: CalibrationRecord | None = None
    params: tuple[ArraySpec, ...]
    caches: tuple[ArraySpec, ...]
    state: tuple[ArraySpec, ...] = ()
    cache_groups: tuple[CacheGroup, ...] = ()
    programs: tuple[Program, ...] = ()
    tokenizer: dict[str, Any] = pydantic.Field(default_factory=dict)
    generation: dict[str, Any] = pydantic.Field(default_factory=dict)
    sizes: Sizes
    files: dict[str, FileEntry] = pydantic.Field(default_factory=dict)

    def program(self, name: str) -> Program:
        """The program called `name`; raises `ArtifactError` when there is none."""
        for program in self.programs:
            if program.name == name:
                return program
        known = ", ".join(program.name for program in self.programs)
        raise ArtifactError(f"the artifact has no program {name!r}; it has: {known}")


_ADAPTER = pydantic.TypeAdapter(Manifest)


def to_json(manifest: Manifest) -> str:
    """The manifest as indented JSON."""
    return _ADAPTER.dump_json(manifest, indent=1).decode() + "\n"


def from_json(text: str | bytes, source: str) -> Manifest:
    """The manifest that `to_json` wrote; `source` names the file in messages.

    Raises:
        ArtifactError: when the text is not JSON, its major version is unknown, or a field is missing or wrong.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ArtifactError(f"{source} is not JSON: {error}; compile the model again") from error
    _check_version(data, source)
    try:
        return _ADAPTER.validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ArtifactError(f"{source}: field {field}: {first['msg']}; compile the model again") from error


def _check_version(data: object, source: str) -> None:
    schema = data.get("schema") if isinstance(data, Mapping) else None
    if not isinstance(schema, str):
        raise ArtifactError(f"{source} has no schema version; it is not the manifest of a jaxserve artifact")
    if schema.partition(".")[0] != SCHEMA.partition(".")[0]:
        raise ArtifactError(
            f"{source} has schema {schema}, and this version of jaxserve reads {SCHEMA}; "
            "compile the model again, or serve it with the version that compiled it"
        )
