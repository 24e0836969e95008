"""Which tool quantized a Hugging Face directory, and how it laid the weights out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxserve.errors import UserError
from jaxserve.models.awq import AWQLayout
from jaxserve.models.compressed_tensors import compressed_layout
from jaxserve.models.config import Fields
from jaxserve.models.gptq import GPTQLayout
from jaxserve.models.json_file import read_json
from jaxserve.models.packed import Layout

LAYOUTS: dict[str, Callable[[Fields], Layout]] = {
    "awq": AWQLayout.from_config,
    "gptq": GPTQLayout.from_config,
    "compressed-tensors": compressed_layout,
}
"""By `quant_method`."""

# What tools wrote beside config.json before they wrote into it.
_OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


def quantized_layout(folder: Path, config: dict[str, Any]) -> Layout | None:
    """The layout of quantized weights in a directory, from `quantization_config` in its config.json or from a file of
    its own; None if nothing is quantized.

    UserError for a method that is not read, CheckpointError for details of one that are not supported.
    """
    section = Fields(config, str(folder / "config.json")).section("quantization_config")
    if section is not None:
        return _layout(section, section.text("quant_method"))
    for name, method in _OLD_FILES.items():
        if (folder / name).exists():
            fields = Fields(read_json(folder / name), str(folder / name))
            return _layout(fields, fields.text("quant_method", method))
    return None


def _layout(fields: Fields, method: str) -> Layout:
    if method not in LAYOUTS:
        raise UserError(
            f"{fields.source}: quant_method is '{method}', which is not supported; supported: {', '.join(LAYOUTS)}"
        )
    return LAYOUTS[method](fields)
