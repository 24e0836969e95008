"""Which GPU kernels are being chosen for: programs are compiled for cards that this machine does not have."""

import contextlib
import contextvars
from collections.abc import Iterator

from jaxserve.targets import Target

_TARGET: contextvars.ContextVar[Target | None] = contextvars.ContextVar("target", default=None)


@contextlib.contextmanager
def compiling_for(target: Target) -> Iterator[None]:
    """Kernels chosen in the block are for `target`."""
    token = _TARGET.set(target)
    try:
        yield
    finally:
        _TARGET.reset(token)


def not_hopper() -> str:
    """Why a kernel for Hopper cannot be used here, or an empty text if it can."""
    target = _TARGET.get()
    if target is None:
        return "no target is named (compiling_for)"
    return "" if "sm_90a" in target.features else f"it needs sm_90a, and {target.name} is {', '.join(target.features)}"
