"""sample_logits: definition, shape rule."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxserve.pallas_kernels._axes import INT32, Axes
from jaxserve.pallas_kernels._op import Op, Operand
from jaxserve.pallas_kernels.sample_logits.reference import reference

_F32 = (jnp.float32,)


def shape_rule(
    logits: Any, key: Any, positions: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, *, vocab: int
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    axes = Axes("sample_logits")
    axes.match("logits", logits, "S padded", _F32)
    axes.match("key", key, "S 2", (jnp.uint32,))
    axes.match("positions", positions, "S", INT32)
    axes.match("temperature", temperature, "S", _F32)
    axes.match("top_k", top_k, "S", INT32)
    axes.match("top_p", top_p, "S", _F32)
    axes.match("min_p", min_p, "S", _F32)
    if not 0 < vocab <= axes["padded"]:
        raise axes.fail(f"vocab is {vocab}, expected 1 to {axes['padded']}, the columns of logits")
    return jax.ShapeDtypeStruct((axes["S"],), jnp.dtype(jnp.int32)), jax.ShapeDtypeStruct((axes["S"],), jnp.dtype(bool))


OP = Op("sample_logits", reference, shape_rule, multiple_results=True).publish()


def sample_logits(
    logits: Float[Operand, "S padded"],
    key: UInt32[Operand, "S 2"],
    positions: Int32[Operand, " S"],
    temperature: Float[Operand, " S"],
    top_k: Int32[Operand, " S"],
    top_p: Float[Operand, " S"],
    min_p: Float[Operand, " S"],
    *,
    vocab: int,
) -> tuple[Int32[Array, " S"], Bool[Array, " S"]]:
    """A token drawn from each row of logits l, and whether the row is finite (holds neither NaN nor infinity).

    A row whose temperature is 0 or whose top_k is 1 gets argmax(l). Another gets the argmax over the tokens that its
    filters keep of p / e, where p = exp((l - max l) / temperature) and e is exponential noise: the Gumbel-max rule,
    argmax(log p - log e), with a logarithm less for every id. The first of equal ones wins.

    Filters, in this order. top_k: not below the k-th largest logit; 0 is off. top_p: the tokens likelier than it hold
    less than top_p of the probability that top_k left; 1 is off. min_p: at least min_p times the largest p; 0 is off.
    Ties at a threshold are all kept, and the likeliest token always is.

    e = -log u, u = ((h(h(k + id) ^ l) >> 9) + 1/2) / 2**23, where k, l are the words of `key` folded by the position
    (threefry2x32) and h mixes 32 bits with hardly a bias (Wellons' lowbias32).

    Columns from `vocab` on are padding, which nothing reads. A logit of -inf is a token that is not drawn while others
    are finite; a row with NaN or +inf gets some token of the vocabulary.

    Every row is computed by itself, so its token depends on nothing but its own operands. The top_k threshold, ties,
    u and the rule are exact. p and e may be off by some units of the last place, one way in the reference and another
    in a kernel: top_p counts p in whole units of about 2**-30 of their sum, so a token whose threshold lies that close
    may fall on either side, and two tokens that draw with equal p / e to that precision may change places.

    Raises TypeError when shapes, dtypes or `vocab` do not fit.
    """
    return OP(logits, key, positions, temperature, top_k, top_p, min_p, vocab=int(vocab))
