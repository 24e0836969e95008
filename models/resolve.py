"""From what a user calls a model to an opened checkpoint."""

from pathlib import Path

from jaxserve.errors import UserError
from jaxserve.models.checkpoint import Checkpoint
from jaxserve.models.errors import CheckpointError
from jaxserve.models.gguf_reader import GGUFCheckpoint
from jaxserve.models.hub import fetch_snapshot, is_hub_id
from jaxserve.models.safetensors_reader import HFCheckpoint
from jaxserve.models.sample import SAMPLES, fetch_sample


def resolve(name: str | Path) -> Checkpoint:
    """Open a model given as a directory, a .gguf file, the name of a sample model, or a Hub id `org/name`.

    They are tried in this order, so that what is on disk wins.

    UserError, saying what was tried, if it is none of them or cannot be fetched; CheckpointError if it is damaged.
    """
    path = Path(name).expanduser()
    name = str(name)
    if path.is_dir():
        return _open_directory(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise UserError(f"{path}: is neither a directory nor a .gguf file; of safetensors give the directory")
        return GGUFCheckpoint(path)
    if name in SAMPLES:
        return GGUFCheckpoint(fetch_sample(name), origin=name)
    if is_hub_id(name) and path.suffix != ".gguf":
        try:
            return HFCheckpoint(fetch_snapshot(name), origin=name)
        except CheckpointError:
            raise
        except UserError as error:
            raise UserError(f"there is no file or directory '{name}' here, and {error}") from error
    raise UserError(
        f"no model '{name}': tried it as a directory and a .gguf file (nothing is there), as a sample model"
        f" ({', '.join(SAMPLES)}) and as a Hub id (org/name)"
    )


def _open_directory(folder: Path) -> Checkpoint:
    """A Hugging Face directory, or one that holds a single GGUF file."""
    if (folder / "config.json").exists():
        return HFCheckpoint(folder)
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return GGUFCheckpoint(files[0])
    if files:
        raise UserError(f"{folder}: holds {len(files)} .gguf files; give one of them: {files[0].name}, ...")
    raise UserError(f"{folder}: has neither a config.json nor a .gguf file")
