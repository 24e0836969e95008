"""Weights of an artifact, as orbax checkpoints.

A folder holds `part-00000`, `part-00001`, ...: each a plain orbax checkpoint of a nested dict, so that any orbax reads
it. Parts keep writing and loading within a part's memory whatever the model's size. They are not compressed: loading
a 270 MB model took 0.33 s against 0.8 to 1.2 s with orbax's default, for a quarter more on disk.
"""

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxserve.artifact import Artifact
from jaxserve.manifest import ArraySpec, ArtifactError

PART_BYTES = 1 << 30
"""A part is closed when it holds this much; one array is never split, so a part may be larger by one array."""


def save_weights(
    directory: pathlib.Path, arrays: Iterable[tuple[str, Any]], *, part_bytes: int = PART_BYTES
) -> tuple[ArraySpec, ...]:
    """Write arrays, given one by one as (path, array), to `directory`; returns their specs in the given order.

    Paths are nested by "/". Arrays may be numpy or JAX arrays of any dtype that fills whole bytes. No more than
    a part of them is held at once.

    Raises:
        ValueError: when a path comes twice, is empty, or leads through another array, or an array has no elements.
    """
    specs: dict[str, ArraySpec] = {}
    part: dict[str, np.ndarray] = {}
    number = held = 0
    for path, array in arrays:
        if path in specs:
            raise ValueError(f"weight {path!r} is given twice")
        value = np.ascontiguousarray(array).reshape(np.shape(array))
        if not value.size:
            raise ValueError(f"weight {path!r} has shape {value.shape}; orbax keeps no arrays without elements")
        specs[path] = ArraySpec(name=path, shape=value.shape, dtype=value.dtype.name)
        part[path] = value
        held += value.nbytes
        if held >= part_bytes:
            _save_part(directory, number, part)
            number, held, part = number + 1, 0, {}
    if part:
        _save_part(directory, number, part)
    return tuple(specs.values())


def load_weights(artifact: Artifact) -> dict[str, jax.Array]:
    """The weights on the default device, in the order of the manifest's `params`.

    Raises:
        ArtifactError: when a weight is missing, not listed, or of another shape or dtype than the manifest says.
    """
    loaded: dict[str, jax.Array] = {}
    for part in sorted(artifact.weights.glob("part-*")):
        loaded |= {path: jax.device_put(value) for path, value in _load_part(part).items()}
    specs = artifact.manifest.params
    for spec in specs:
        value = loaded.get(spec.name)
        if value is None:
            raise ArtifactError(f"{artifact.root}: weight {spec.name} is missing; compile the model again")
        if (value.shape, value.dtype.name) != (spec.shape, spec.dtype):
            raise ArtifactError(
                f"{artifact.root}: weight {spec.name} is {value.dtype.name}{list(value.shape)}, and the manifest says "
                f"{spec.dtype}{list(spec.shape)}; compile the model again"
            )
    if extra := loaded.keys() - {spec.name for spec in specs}:
        raise ArtifactError(f"{artifact.root}: weight {min(extra)} is not in the manifest; compile the model again")
    return {spec.name: loaded[spec.name] for spec in specs}


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=False))


def _save_part(directory: pathlib.Path, number: int, arrays: Mapping[str, np.ndarray]) -> None:
    with _checkpointer() as checkpointer:
        path = directory.resolve() / f"part-{number:05d}"
        checkpointer.save(path, args=ocp.args.PyTreeSave(_nested(arrays)))


def _load_part(path: pathlib.Path) -> dict[str, np.ndarray]:
    try:
        with _checkpointer() as checkpointer:
            tree = checkpointer.restore(path.resolve(), args=ocp.args.PyTreeRestore())
    except (ValueError, OSError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise ArtifactError(f"{path} cannot be read: {reason}; compile the model again") from error
    return _flat(tree)


def _nested(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """{"a/b": x} as {"a": {"b": x}}."""
    root: dict[str, Any] = {}
    for path, value in arrays.items():
        *folders, leaf = path.split("/")
        node: Any = root
        for folder in folders:
            node = node.setdefault(folder, {})
            if not isinstance(node, dict):
                raise ValueError(f"weight {path!r} leads through another weight")
        if not leaf or leaf in node:
            raise ValueError(f"weight {path!r} has no name or leads through another weight")
        node[leaf] = value
    return root


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    flat: dict[str, np.ndarray] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}/") if isinstance(value, Mapping) else {prefix + name: value}
    return flat
