"""JSON files of a checkpoint, with errors that name the file."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from jaxserve.models.errors import CheckpointError

MAX_BYTES = 64 * 2**20


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; CheckpointError if it cannot be read, is no JSON, no object, or absurdly large."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path}: is {path.stat().st_size} bytes; at most {MAX_BYTES} are read")
        return parse_object(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def parse_object(text: bytes, source: str) -> dict[str, Any]:
    """The JSON object in `text`; CheckpointError naming `source` for anything else, names given twice included."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise CheckpointError(f"{source}: the name '{twice:.200}' stands there twice")
        return found

    try:
        values = json.loads(text, object_pairs_hook=unique)
    except RecursionError as error:
        raise CheckpointError(f"{source}: is nested too deeply to be a description of a model") from error
    except ValueError as error:  # bad JSON, bad UTF-8, numbers of thousands of digits
        raise CheckpointError(f"{source}: is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{source}: must hold an object with named fields, holds {type(values).__name__}")
    return values
