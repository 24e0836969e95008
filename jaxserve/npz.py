"""Archives of arrays that others may have made: read whole, or refused in a line."""

import zipfile
import zlib
from pathlib import Path

import numpy as np

from jaxserve.errors import UserError

_MOST_PACKED = 100  # times the file's own size: more is no archive of ours
# What numpy and zipfile raise for bytes that are no such file; RuntimeError where they seem to be encrypted, or packed
# in a way that is not known, MemoryError where they promise too much, AttributeError for one array that is in none.
_UNREADABLE = (
    *(OSError, TypeError, ValueError, KeyError, EOFError, RuntimeError, MemoryError, AttributeError),
    *(zipfile.BadZipFile, zlib.error),
)


def read_npz(file: Path, what: str) -> dict[str, np.ndarray]:
    """The arrays of an archive by name; UserError, which calls it `what`, when it is damaged or none of ours."""
    try:
        with file.open("rb") as opened, zipfile.ZipFile(opened) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        if unpacked > _MOST_PACKED * file.stat().st_size:
            raise ValueError(f"it would unpack to {unpacked} bytes")
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as data:
            return {name: data[name] for name in data.files}
    except _UNREADABLE as error:
        raise UserError(f"{file}: no {what}, or a damaged one ({error}); make it again") from error
