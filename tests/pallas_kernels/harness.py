"""Runs one op call under a named implementation, so that one test class serves the reference and every kernel."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxserve._compat import trace
from jaxserve.pallas_kernels import OPS, Refusal
from jaxserve.pallas_kernels._native import describe, is_available

# A kernel is named "platform/kernel", as it was registered.
IMPLEMENTATIONS = ("reference",)
NATIVE = (*IMPLEMENTATIONS, pytest.param("cpu/native", marks=pytest.mark.skipif(not is_available(), reason=describe())))

F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)

implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
native_implementations = pytest.mark.parametrize("implementation", NATIVE)
dtypes = pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])


def compute(implementation: str, function: Callable[..., Any], *operands: Any, **options: Any) -> Any:
    """What the implementation makes of `function(*operands, **options)`, a call of one op, as float32 numpy.

    Operands may be tuples of arrays, as caches are; all results of the op come one after the other.
    """
    (eqn,) = trace(function, *operands, **options).eqns
    op, params = OPS[eqn.primitive.name], eqn.params
    if implementation == "reference":
        chosen = functools.partial(op.reference, **params)
    else:
        platform, name = implementation.split("/")
        chosen = op.kernel(platform, name)(*(var.aval for var in eqn.invars), **params)
        if isinstance(chosen, Refusal):
            pytest.skip(f"{name} refuses: {chosen.reason}")
    return jax.tree.map(lambda array: np.asarray(array, np.float32), jax.jit(chosen)(*jax.tree.leaves(operands)))


def normal(seed: int, *shape: int, dtype: Any = F32) -> np.ndarray:
    """Standard normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def wide(array: np.ndarray) -> np.ndarray:
    """The same numbers as float64, for oracles."""
    return np.asarray(array).astype(np.float64)


def assert_close(found: Any, expected: np.ndarray, dtype: np.dtype, *, f32: float = 2e-6, roundings: int = 1) -> None:
    """Checks a result of `dtype` against float64.

    Within `f32`, relative to the largest value expected since sums cancel; bf16 may be off by `roundings` units more.
    """
    scale = max(float(np.abs(expected).max(initial=0.0)), 1e-30)
    relative = 0.0 if dtype == F32 else roundings * 2.0**-8
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=relative, atol=f32 * scale)
