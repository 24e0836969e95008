"""dense_matmul: definition, shape rule, XLA reference."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from jaxserve.pallas_kernels._axes import FLOATS, Axes
from jaxserve.pallas_kernels._op import Op, Operand, spec_like


def reference(x: Any, w: Any, *, out_dtype: str) -> Any:
    rows = math.prod(x.shape[:-1])
    if rows == 1 and x.dtype != jnp.float32:
        # For a 16-bit matrix-vector product XLA:CPU takes a path more than 10 times slower than for two rows.
        twice = jnp.broadcast_to(x.reshape(1, -1), (2, x.shape[-1]))
        return reference(twice, w, out_dtype=out_dtype)[:1].reshape(*x.shape[:-1], -1)
    contract_last = (((x.ndim - 1,), (1,)), ((), ()))
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # no TF32 where float32 was asked for
    product = jax.lax.dot_general(x, w, contract_last, precision=exact, preferred_element_type=jnp.float32)
    return product.astype(out_dtype)


def shape_rule(x: Any, w: Any, *, out_dtype: str) -> jax.ShapeDtypeStruct:
    axes = Axes("dense_matmul")
    axes.match("x", x, "... I", FLOATS)
    axes.match("w", w, "O I", (x.dtype,))
    axes.check_float("out_dtype", out_dtype)
    return spec_like(x, shape=(*x.shape[:-1], axes["O"]), dtype=jnp.dtype(out_dtype))


OP = Op("dense_matmul", reference, shape_rule).publish()


def dense_matmul(
    x: Float[Operand, "*rows I"], w: Float[Operand, "O I"], *, out_dtype: DTypeLike | None = None
) -> Float[Array, "*rows O"]:
    """y[..., o] = sum_i x[..., i] w[o, i], accumulated in float32 and rounded once to `out_dtype` (x's dtype if None).

    Raises TypeError when the input widths differ, w's dtype is not x's, or `out_dtype` is not floating.
    """
    return OP(x, w, out_dtype=jnp.dtype(out_dtype or x.dtype).name)
