"""sample_logits in plain JAX.

Nothing sorts the vocabulary. Each filter keeps the tokens at or above a threshold of its own, and the thresholds of
top-k and top-p are found by bisection over integers, which ends at the exact value.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Shaped

_INT_MIN, _INT_MAX = np.iinfo(np.int32).min, np.iinfo(np.int32).max
_MASS_BITS = 30  # probabilities become integers whose sum is between 2**29 and 2**30 (and a rounding error)
_FOLD = 8
_MIN_TEMPERATURE = 1e-20  # below it the quotient would overflow to NaN, far below it only the maximum survives anyway


def reference(
    logits: Array,
    key: Array,
    positions: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    *,
    vocab: int,
) -> tuple[Array, Array]:
    logits = logits[:, :vocab]
    greedy = (temperature == 0) | (top_k == 1)
    # Greedy rows among others take the same road without filters and noise.
    filters = [
        jnp.where(greedy, off, values)
        for off, values in ((1.0, jnp.maximum(temperature, _MIN_TEMPERATURE)), (0, top_k), (1.0, top_p), (0.0, min_p))
    ]

    def draw(logits: Array) -> Array:
        return _draw(logits, key, positions, greedy, *filters)

    return lax.cond(jnp.all(greedy), _argmax, draw, logits), jnp.all(jnp.isfinite(logits), axis=1)


def _draw(
    logits: Array,
    key: Array,
    positions: Array,
    greedy: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
) -> Int32[Array, " S"]:
    scaled = (logits - jnp.max(logits, axis=1, keepdims=True)) / temperature[:, None]
    # The barriers keep both from being computed a second time, inside the second reduction.
    noise = lax.optimization_barrier(exponential_noise(key, positions, logits.shape[1]))
    drawn = jnp.where(greedy[:, None], scaled, jnp.exp(scaled) / noise)
    kept = keep_filtered(logits, scaled, top_k, top_p, min_p)
    return _argmax(lax.optimization_barrier(jnp.where(kept, drawn, -jnp.inf)))


def exponential_noise(keys: Array, positions: Array, vocab: int) -> Float[Array, "S V"]:
    """Exponential noise -log u of the ids 0..V-1, from each row's key folded by its position.

    The fold is threefry's. Its two words k, l are hashed with every id, u = h(h(k + id) ^ l), where h mixes 32 bits
    with hardly a bias (Wellons' lowbias32). Threefry for every id takes about twice as long.
    """

    def words(key, position):
        return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position))

    found = jax.vmap(words)(keys, positions)
    ids = lax.iota(jnp.uint32, vocab)
    bits = _mix(_mix(found[:, :1] + ids) ^ found[:, 1:]) >> 9  # as many as a float32 holds with half a step more
    return -jnp.log((bits.astype(jnp.float32) + 0.5) * 2.0**-23)


def _mix(x: Array) -> Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0x735A2D97)
    return x ^ (x >> 15)


def keep_filtered(
    logits: Float[Array, "S V"],
    scaled: Float[Array, "S V"],
    top_k: Int32[Array, " S"],
    top_p: Float[Array, " S"],
    min_p: Float[Array, " S"],
) -> Bool[Array, "S V"]:
    """Which tokens the filters leave. scaled = (logits - max) / temperature; top_k 0, top_p 1 and min_p 0 are off.

    top_k: not below the k-th largest logit. top_p: the tokens likelier than it hold less than top_p of the probability
    that top_k left, where probabilities are rounded to 2**-30 (a filter that is on also drops tokens rounded to
    nothing). min_p: at least min_p times the largest probability. The likeliest token is always kept.
    """
    vocab = logits.shape[1]
    top_k = jnp.where(top_k == 0, vocab, jnp.minimum(top_k, vocab))
    least = lax.cond(
        jnp.any(top_k < vocab), _kth_largest, lambda values, k: jnp.full_like(k, -jnp.inf, values.dtype), logits, top_k
    )
    kept = logits >= least[:, None]
    in_nucleus = lax.cond(jnp.any(top_p < 1), _in_nucleus, lambda scaled, kept, top_p: kept, scaled, kept, top_p)
    return in_nucleus & (scaled >= jnp.log(min_p)[:, None])


def _kth_largest(values: Float[Array, "S V"], k: Int32[Array, " S"]) -> Float[Array, " S"]:
    """Exactly: bisects over integers that are in the order of the floats."""
    bits = jnp.where(values == 0, 0, lax.bitcast_convert_type(values, jnp.int32))  # -0 and 0 are equal
    order = _fold(jnp.where(bits < 0, bits ^ _INT_MAX, bits), _INT_MIN)

    def too_few(value):
        return _reduce(jnp.sum, (order >= value[:, None, None]).astype(jnp.int32)) < k

    kth, _ = _bisect(too_few, jnp.full_like(k, _INT_MIN), jnp.full_like(k, _INT_MAX), 32)
    return lax.bitcast_convert_type(jnp.where(kth < 0, kth ^ _INT_MAX, kth), jnp.float32)


def _in_nucleus(scaled: Array, candidates: Array, top_p: Array) -> Bool[Array, "S V"]:
    weights = jnp.where(candidates, jnp.exp(scaled), 0)
    # A power of two as scale makes each mass a function of its own logit alone, and integer sums are exact in any
    # order.
    exponent = (lax.bitcast_convert_type(jnp.sum(weights, axis=1), jnp.int32) >> 23) - 127
    scale = lax.bitcast_convert_type((127 + _MASS_BITS - 1 - exponent) << 23, jnp.float32)
    mass = jnp.round(weights * scale[:, None]).astype(jnp.int32)
    target = jnp.ceil(top_p * jnp.sum(mass, axis=1).astype(jnp.float32)).astype(jnp.int32)
    target = jnp.where(top_p < 1, jnp.maximum(target, 1), _INT_MAX)

    folded = _fold(mass, 0)

    def outside_is_small(value):
        return _reduce(jnp.sum, jnp.where(folded > value[:, None, None], folded, 0)) < target

    low = jnp.full_like(target, -1)
    _, threshold = _bisect(outside_is_small, low, jnp.max(mass, axis=1), _MASS_BITS + 1)
    return candidates & (mass >= threshold[:, None])


def _bisect(holds: Callable[[Array], Array], low: Array, high: Array, steps: int) -> tuple[Array, Array]:
    """(last value where `holds` is false, first where it is true), for `holds` that is false at low and true at high.

    `steps` must be at least log2(high - low); the whole range of int32 takes 32.
    """

    def body(_, bounds):
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        true = holds(middle)
        return jnp.where(true, low, middle), jnp.where(true, middle, high)

    return lax.fori_loop(0, steps, body, (low, high))


def _argmax(values: Float[Array, "S V"]) -> Int32[Array, " S"]:
    """First index of each row's maximum. Two plain reductions: several times faster on CPU than XLA's argmax."""
    vocab = values.shape[1]
    ids = _fold(lax.broadcasted_iota(jnp.int32, values.shape, 1), vocab - 1)
    folded = _fold(values, -jnp.inf)
    return _reduce(jnp.min, jnp.where(folded == _reduce(jnp.max, folded)[:, None, None], ids, vocab - 1))


def _fold(values: Shaped[Array, "S V"], padding: Any) -> Shaped[Array, "S _FOLD M"]:
    """Each row as _FOLD rows, padded at its end to a multiple of _FOLD**2."""
    seqs, vocab = values.shape
    missing = -vocab % _FOLD**2
    if missing:
        values = jnp.pad(values, ((0, 0), (0, missing)), constant_values=padding)
    return values.reshape(seqs, _FOLD, -1)


def _reduce(reduce: Callable[..., Array], folded: Shaped[Array, "S _FOLD M"]) -> Shaped[Array, " S"]:
    """Reduces each folded row, outer axes first: their inner loops run along memory and vectorise.

    XLA:CPU turns a reduction of a whole row into windows instead, whose operand it writes to memory first, and would
    merge these steps into that again but for the barriers: two to three times slower.
    """
    columns = lax.optimization_barrier(reduce(folded, axis=1))
    columns = lax.optimization_barrier(reduce(columns.reshape(len(columns), _FOLD, -1), axis=1))
    return reduce(columns, axis=1)
