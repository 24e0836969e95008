"""How the paged cache stores keys and values in fewer bits: `KvFormat`, and the way there (`encode`) and back."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels._axes import Axes
from jaxserve.pallas_kernels._op import Operand

NUMBERS = "float16"
"""Dtype of scales and minimums. float32 takes 6% more of an int8 cache (heads of 64), 11% of int4, and moves SmolLM2's
perplexity by 0.014% and 0.005%."""

Cache = Operand | tuple[Operand, ...]
"""The keys, or the values, of a layer or of several: an array, or the arrays of a `KvFormat` in their order."""


@dataclasses.dataclass(frozen=True)
class KvFormat:
    """Keys or values of a layer as codes q and, for each token and head, numbers that say what they stand for.

    - int8, int4: x = scale * q + minimum with q from 0 to `largest`, scale = (max x - min x) / largest and
      minimum = min x over the head's H components; the asymmetric form of QServe (arXiv:2405.04532). int4 codes are
      [pages, B, K, H/2]: component 2i in the low half of byte i and 2i + 1 in the high one.
    - fp8: x = scale * q with q float8_e4m3fn and scale = max |x| / largest.

    Numbers are rounded before the codes are chosen, so codes fit what is stored. What is stored for a token depends on
    that token alone: it is the same bytes whatever batch, chunk or page the token is in. Codes are kept as uint8, those
    of fp8 too: XLA on CPU would turn a whole float8 array into another dtype and back to write one row of it.

    `error` bounds ||decode(encode(x)) - x|| / ||x|| of normal numbers, and with a margin of two what attention makes
    of such keys and values.
    """

    name: str
    element: str  # dtype of a code
    largest: int
    numbers: tuple[str, ...]
    error: float
    per_byte: int = 1

    def __str__(self) -> str:
        return self.name

    @property
    def arrays(self) -> dict[str, tuple[str, str]]:
        """Axes and dtype of every array of a cache, in the order in which the ops take them; codes have no name."""
        codes = "pages B K H" if self.per_byte == 1 else f"pages B K H/{self.per_byte}"
        return {"": (codes, "uint8"), **{name: ("pages B K", NUMBERS) for name in self.numbers}}


KV_FORMATS = {
    form.name: form
    for form in (
        KvFormat("int8", "uint8", 255, ("scale", "minimum"), error=0.008),
        KvFormat("int4", "uint8", 15, ("scale", "minimum"), error=0.12, per_byte=2),
        KvFormat("fp8", "float8_e4m3fn", 448, ("scale",), error=0.04),
    )
}


def cache_layout(
    format: KvFormat | None, dtype: Any, pages: int, page_size: int, kv_heads: int, head_dim: int, layers: int = 0
) -> dict[str, tuple[str, jax.ShapeDtypeStruct]]:
    """Axes, shape and dtype of the arrays of a cache [pages, B, K, H] by name; `dtype` is for one without a format.

    With `layers`, of the caches of so many layers in one: [L, pages, B, K, H].
    """
    arrays = format.arrays if format else {"": ("pages B K H", dtype)}
    sizes = {"L": layers, "pages": pages, "B": page_size, "K": kv_heads, "H": head_dim, "H/2": head_dim // 2}
    stack = "L " if layers else ""
    return {
        name: (stack + axes, jax.ShapeDtypeStruct(tuple(sizes[letter] for letter in (stack + axes).split()), dtype))
        for name, (axes, dtype) in arrays.items()
    }


def encode(x: Any, format: KvFormat | None, dtype: Any) -> tuple[Any, ...]:
    """Keys or values [..., K, H] as the arrays of `format`; without one, rounded to `dtype`.

    A number too large for float16 is stored as infinity and comes back as NaN: loud rather than wrong.
    """
    if format is None:
        return (x.astype(dtype),)
    x = x.astype(jnp.float32)
    if "minimum" in format.numbers:
        low = x.min(axis=-1)
        scale, minimum = _stored((x.max(axis=-1) - low) / format.largest), _stored(low)
        codes = jnp.round((x - _wide(minimum)) / _divisor(scale))
        return _to_bytes(jnp.clip(codes, 0, format.largest), format), scale, minimum
    scale = _stored(jnp.abs(x).max(axis=-1) / format.largest)
    codes = jnp.clip(x / _divisor(scale), -format.largest, format.largest)
    return _to_bytes(codes, format), scale


def decode(arrays: Sequence[Any], format: KvFormat | None) -> Any:
    """What the arrays of a cache, or of some of its rows, stand for: float32 [..., K, H]."""
    if format is None:
        return arrays[0].astype(jnp.float32)
    codes, scale, *minimum = arrays
    x = _from_bytes(codes, format).astype(jnp.float32) * _wide(scale)
    return x + _wide(minimum[0]) if minimum else x


def halves(arrays: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """The arrays of the keys and those of the values, as the ops take them one after the other."""
    return arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]


def match_cache(
    axes: Axes, name: str, arrays: Sequence[Any], format: KvFormat | None, plain: Sequence, layer: int | None
) -> None:
    """Checks the arrays of a cache against its format, or its one array against the dtypes `plain`. With a `layer` they
    are those of several layers.

    TypeError names what does not fit.
    """
    stack = "" if layer is None else "L "
    expected = format.arrays if format else {"": ("pages B K H", "")}
    if len(arrays) != len(expected):
        raise axes.fail(f"{name} has {len(arrays)} arrays, expected {len(expected)} in {format or 'a plain dtype'}")
    for (array, (letters, dtype)), operand in zip(expected.items(), arrays, strict=True):
        axes.match(f"{name} {array}".rstrip(), operand, stack + letters, (dtype,) if dtype else plain)
    layers = arrays[0].shape[0]
    if layer is not None and not 0 <= layer < layers:
        raise axes.fail(f"layer must be from 0 to {layers - 1}, got {layer}")


def _stored(numbers: Any) -> Any:
    return numbers.astype(NUMBERS)


def _wide(numbers: Any) -> Any:
    """Stored numbers [..., K] as float32 [..., K, 1]."""
    return numbers.astype(jnp.float32)[..., None]


def _divisor(scale: Any) -> Any:
    """The scale, or 1 where a row has no extent that float16 can tell from 0."""
    wide = _wide(scale)
    return jnp.where(wide == 0, 1.0, wide)


def _to_bytes(codes: Any, format: KvFormat) -> Any:
    codes = codes.astype(format.element)
    if format.per_byte == 2:
        return codes[..., 0::2] | (codes[..., 1::2] << 4)
    return jax.lax.bitcast_convert_type(codes, jnp.uint8)


def _from_bytes(codes: Any, format: KvFormat) -> Any:
    if format.per_byte == 2:
        return jnp.stack([codes & 0x0F, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    return jax.lax.bitcast_convert_type(codes, format.element)
