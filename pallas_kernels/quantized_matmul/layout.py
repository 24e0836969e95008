"""Layouts: orders in which a kernel may want the arrays of a quantized weight, chosen once, when a model is compiled.

| layout | codes | scale, zero, minimum |
| --- | --- | --- |
| None | [O, I], [O, I/2] | [O, G] |
| `panels` | [O/16, C, 16, 4] | [O/16, G, 16] |

A panel holds sixteen outputs, so that a vector of sixteen lanes adds up one output a lane. A column is four bytes of
codes of each: C is I/8 of 4-bit codes, I/4 of 8-bit ones. The other fields keep their shapes, and all keep their bytes.
Several layers' arrays have a leading axis L in front.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels.quantized_matmul.format import QuantFormat

LAYOUTS = (None, "panels")
OUTPUTS, BYTES = 16, 4
"""Outputs of a panel, and bytes of codes of one of them in a column."""
_PACKED = ("codes", "scale", "zero", "minimum")

Specs = dict[str, tuple[tuple[int, ...], np.dtype]]


def refusal(format: QuantFormat, outputs: int, inputs: int) -> str | None:
    """Why a weight [outputs, inputs] cannot lie in panels, or None if it can."""
    each = BYTES * 8 // (4 if format.packed else 8)  # inputs of a column
    group = format.group_size(inputs)
    if outputs % OUTPUTS:
        return f"{outputs} outputs are no multiple of {OUTPUTS}"
    if inputs % each or (group < inputs and group % each):
        return f"{inputs} inputs in groups of {group} do not fill columns of {each}"
    return None


def specs(format: QuantFormat, outputs: int, inputs: int, layout: str | None) -> Specs:
    """`QuantFormat.specs` of a weight in a layout; ValueError if the layout cannot hold it."""
    found = format.specs(outputs, inputs)
    if layout is None:
        return found
    if reason := refusal(format, outputs, inputs):
        raise ValueError(reason)
    return {name: (_panel_shape(name, shape), dtype) for name, (shape, dtype) in found.items()}


def _panel_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if name not in _PACKED:
        return shape
    outputs, width = shape
    if name == "codes":
        return outputs // OUTPUTS, width // BYTES, OUTPUTS, BYTES
    return outputs // OUTPUTS, width, OUTPUTS


def pack(name: str, array: np.ndarray) -> np.ndarray:
    """A field [O, W] of a weight as `panels` has it."""
    shape = _panel_shape(name, array.shape)
    if len(shape) == array.ndim:
        return array
    parts = array.reshape(shape[0], OUTPUTS, shape[1], *shape[3:])
    return np.ascontiguousarray(np.swapaxes(parts, 1, 2))


def rows(name: str, array: Any, first: Any, count: int, layout: str | None) -> Any:
    """Rows [count, W] from `first` on of a field in a layout; those of `panels` from a panel's first on, and all."""
    if layout is None or name not in _PACKED:
        return jax.lax.dynamic_slice_in_dim(array, first, count)
    part = jax.lax.dynamic_slice_in_dim(array, first // OUTPUTS, count // OUTPUTS)
    return part.swapaxes(1, 2).reshape(count, -1)


def take(name: str, array: Any, ids: Any, layout: str | None) -> Any:
    """Rows [T, W] of a field in a layout; ids outside it give its first or last row."""
    if layout is None or name not in _PACKED:
        return jnp.take(array, ids, axis=0, mode="clip")
    ids = jnp.clip(ids, 0, array.shape[0] * OUTPUTS - 1)
    found = array.at[ids // OUTPUTS, :, ids % OUTPUTS].get(mode="promise_in_bounds")
    return found.reshape(len(ids), -1)
