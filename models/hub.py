"""Checkpoints from the Hugging Face Hub, into its own cache."""

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]  # that of the HTTP library which the package uses
    RepositoryNotFoundError,
)

from jaxserve.errors import UserError

# What a checkpoint needs, and not the copies in other formats that repositories also carry.
PATTERNS = [
    "config.json",
    "generation_config.json",
    "quantize_config.json",
    "quant_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
]
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def is_hub_id(name: str) -> bool:
    """Whether a name has the form `org/name`."""
    return _ID.fullmatch(name) is not None


def fetch_snapshot(
    repo: str, *, revision: str | None = None, endpoint: str | None = None, cache: Path | None = None
) -> Path:
    """The folder of a repository's model files, downloaded unless the cache has them.

    `endpoint` and `cache` default to what HF_ENDPOINT and HF_HOME say. UserError, naming the reason, if that fails.
    """
    try:
        found = snapshot_download(
            repo, revision=revision, allow_patterns=PATTERNS, endpoint=endpoint, cache_dir=cache, etag_timeout=10
        )
    except GatedRepoError as error:
        raise UserError(f"Hub repository '{repo}' is gated: accept its terms on the Hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise UserError(f"there is no Hub repository '{repo}', or it is private (then set HF_TOKEN)") from error
    except (HTTPError, HFValidationError, OSError) as error:
        raise UserError(f"cannot download '{repo}' from the Hub: {_first_line(error)}") from error
    folder = Path(str(found))
    if not (folder / "config.json").is_file():
        raise UserError(
            f"Hub repository '{repo}' has no config.json, so no model in Hugging Face format;"
            " of a repository of GGUF files download one and give its path"
        )
    return folder


def _first_line(error: Exception) -> str:
    """The reason in one line; the package explains over several and puts the cause first."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
