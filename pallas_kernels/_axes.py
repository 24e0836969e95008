"""Shape rules written the way the docstrings write shapes: one letter an axis."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import DTypeLike

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
INT32 = (jnp.int32,)


class Axes:
    """Sizes of the axis letters of one op call, learned operand by operand.

    `axes.match("q", q, "T N H", FLOATS)` checks rank, dtype and every letter already known, and learns the new ones. A
    leading `...` stands for any number of axes, `S+1` is one more than the letter, `H/2` half of it, and a number
    stands for itself.
    """

    def __init__(self, op: str):
        self.op = op
        self._sizes: dict[str, tuple[int, str]] = {}

    def __getitem__(self, letter: str) -> int:
        return self._sizes[letter][0]

    def fail(self, message: str) -> TypeError:
        """An error that names the op, to raise."""
        return TypeError(f"{self.op}: {message}")

    def check_float(self, name: str, dtype: DTypeLike) -> None:
        """TypeError unless the dtype is one that activations may have."""
        if jnp.dtype(dtype) not in [jnp.dtype(each) for each in FLOATS]:
            raise self.fail(f"{name} must be a floating dtype, got {jnp.dtype(dtype).name}")

    def match(self, name: str, aval: Any, spec: str, dtypes: Sequence[DTypeLike]) -> None:
        """Checks one operand; TypeError says which one, its shape and what was expected."""
        if aval.dtype not in [jnp.dtype(dtype) for dtype in dtypes]:
            allowed = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
            raise self.fail(f"{name} has dtype {aval.dtype.name}, expected {allowed}")
        letters, shape = spec.split(), tuple(aval.shape)
        if letters[0] == "...":
            letters = letters[1:]
            shape = shape[max(len(shape) - len(letters), 0) :]
        if len(shape) != len(letters):
            raise self.fail(f"{name} has shape {tuple(aval.shape)}, expected axes [{spec}]")
        for size, letter in zip(shape, letters, strict=True):
            self._learn(name, aval, spec, letter, size)

    def _learn(self, name: str, aval: Any, spec: str, letter: str, size: int) -> None:
        letter, _, more = letter.partition("+")
        letter, _, parts = letter.partition("/")
        size = size * int(parts or 1) - int(more or 0)
        known, source = (int(letter), "") if letter.isdigit() else self._sizes.setdefault(letter, (size, name))
        if size != known:
            reason = f" with {letter} = {known} (from {source})" if source else ""
            raise self.fail(f"{name} has shape {tuple(aval.shape)}, expected axes [{spec}]{reason}")
