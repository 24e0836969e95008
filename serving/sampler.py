"""Choosing the next tokens on the device.

Nothing sorts the vocabulary. Each filter keeps the tokens at or above a threshold of its own, and the thresholds of
top-k and top-p are found by bisection over integers, which ends at the exact value. Every row is computed by itself
from its own logits, key and position, so that a result does not depend on what it is batched with.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Shaped

from jaxserve.serving.request import Limits
from jaxserve.serving.state import State, select_options

_INT_MIN, _INT_MAX = np.iinfo(np.int32).min, np.iinfo(np.int32).max
_MASS_BITS = 30  # probabilities become integers whose sum is between 2**29 and 2**30 (and a rounding error)
_FOLD = 8
_MIN_TEMPERATURE = 1e-20  # below it the quotient would overflow to NaN, far below it only the maximum survives anyway


class Samples(NamedTuple):
    """logprob and top_* are of the raw distribution, before any sampling option; zeros when nobody wants them.

    finite: the row's logits hold neither NaN nor infinity. If not, its token is 0 and its log-probabilities mean
    nothing.
    """

    tokens: Int32[Array, " S"]
    logprob: Float[Array, " S"]
    top_ids: Int32[Array, "S top"]
    top_logprobs: Float[Array, "S top"]
    finite: Bool[Array, " S"]


def sample(
    logits: Float[Array, "S padded"],
    state: State,
    slots: Int32[Array, " S"],
    positions: Int32[Array, " S"],
    active: Bool[Array, " S"],
    limits: Limits,
    earlier: Int32[Array, "S E"] | None = None,
) -> Samples:
    """The next token of each row: slot slots[s], whose new token will stand at absolute position positions[s].

    earlier: tokens that penalties take as generated beside those that the state counts, -1 where unused.

    In this order: logit bias; repetition penalty over prompt and output (l > 0 ? l / r : l * r); presence and frequency
    penalties over the output (l - presence * [n > 0] - frequency * n); before min_length no stop id; then argmax when
    temperature is 0 or top_k is 1, else temperature, top_k, top_p of what top_k left, min_p relative to the likeliest
    token, and a draw by the Gumbel-max rule with the slot's key folded by the position.

    Ties at a threshold are all kept. Columns past the vocabulary are padding and never chosen. Rows that
    are not active get their greedy token, and cost nothing.
    """
    logits = logits[:, : limits.vocab_size]
    rows = _neutral_where(~active, select_options(state, slots, limits))
    finite = jnp.all(jnp.isfinite(logits), axis=1)
    penalized = (rows["presence"] != 0) | (rows["frequency"] != 0) | (rows["repetition"] != 1)
    too_short = (positions < rows["min_length"]) & (rows["stop_ids"][:, 0] >= 0)
    biased = rows["bias_ids"][:, 0] >= 0
    greedy = (rows["temperature"] == 0) | (rows["top_k"] == 1)

    def adjust(logits):
        logits = lax.cond(jnp.any(biased), lambda x: _add_bias(x, rows), lambda x: x, logits)
        logits = lax.cond(jnp.any(penalized), lambda x: _penalize(x, rows, state, slots, earlier), lambda x: x, logits)
        return lax.cond(jnp.any(too_short), lambda x: _ban_stops(x, rows, too_short), lambda x: x, logits)

    def choose(logits):
        logits = lax.cond(jnp.any(biased | penalized | too_short), adjust, lambda x: x, logits)
        return lax.cond(jnp.all(greedy), _argmax, lambda x: _draw(x, rows, positions, greedy), logits)

    # One branch for the usual greedy step, so that it passes the logits through no conditional that would copy them.
    plain = jnp.all(greedy & ~biased & ~penalized & ~too_short)
    tokens = jnp.where(finite, lax.cond(plain, _argmax, choose, logits), 0)
    return Samples(tokens, *_logprobs(logits, tokens, rows["num_logprobs"], limits.max_logprobs), finite)


def score(
    logits: Float[Array, "T V"], targets: Int32[Array, " T"], max_logprobs: int
) -> tuple[Float[Array, " T"], Int32[Array, "T top"], Float[Array, "T top"]]:
    """log p(targets[t]) under row t, and the max_logprobs likeliest tokens with theirs."""
    top, ids = lax.top_k(logits, min(max_logprobs, logits.shape[1]))
    highest, log_total = _log_total(logits)
    return _chosen(logits, targets) - highest - log_total, ids, top - highest[:, None] - log_total[:, None]


def _log_total(logits: Array) -> tuple[Array, Array]:
    """Each row's maximum m and log sum exp(l - m). Apart, because l - m is exact where the sum of both would round."""
    highest = jnp.max(logits, axis=1)
    return highest, jnp.log(jnp.sum(jnp.exp(logits - highest[:, None]), axis=1))


def _chosen(logits: Array, ids: Array) -> Array:
    return jnp.take_along_axis(logits, ids[:, None], axis=1, mode="clip")[:, 0]


def _neutral_where(idle: Bool[Array, " S"], rows: dict[str, Array]) -> dict[str, Array]:
    neutral = {"temperature": 0, "presence": 0, "frequency": 0, "repetition": 1, "min_length": 0, "num_logprobs": -1}
    masked = {
        name: jnp.where(idle, jnp.asarray(value, rows[name].dtype), rows[name]) for name, value in neutral.items()
    }
    return rows | masked | {"bias_ids": jnp.where(idle[:, None], -1, rows["bias_ids"])}


def _logprobs(logits: Array, tokens: Array, wanted: Array, max_logprobs: int) -> tuple[Array, Array, Array]:
    seqs, vocab = logits.shape
    width = min(max_logprobs, vocab)
    no_top = jnp.zeros((seqs, width), jnp.int32), jnp.zeros((seqs, width), jnp.float32)

    def chosen_only(logits):
        highest, log_total = _log_total(logits)
        return (_chosen(logits, tokens) - highest - log_total, *no_top)

    def with_top(logits):
        return score(logits, tokens, max_logprobs)

    def nothing(logits):
        return (jnp.zeros(seqs, jnp.float32), *no_top)

    most = jnp.max(wanted)
    return lax.switch(jnp.where(most > 0, 2, jnp.where(most == 0, 1, 0)), (nothing, chosen_only, with_top), logits)


def _add_bias(logits: Array, rows: dict[str, Array]) -> Array:
    return _at_ids(logits, rows["bias_ids"]).add(rows["bias_values"], mode="drop")


def _ban_stops(logits: Array, rows: dict[str, Array], too_short: Array) -> Array:
    return _at_ids(logits, jnp.where(too_short[:, None], rows["stop_ids"], -1)).set(-jnp.inf, mode="drop")


def _at_ids(logits: Array, ids: Array) -> Any:
    """Indexer of logits[s, ids[s, :]]; negative ids point past the end, where updates are dropped."""
    return logits.at[jnp.arange(logits.shape[0])[:, None], jnp.where(ids < 0, logits.shape[1], ids)]


def _penalize(logits: Array, rows: dict[str, Array], state: State, slots: Array, earlier: Array | None) -> Array:
    counts = jnp.take(state["counts"], slots, axis=0, mode="clip")
    if earlier is not None:
        counts = _at_ids(counts, earlier).add(1, mode="drop")
    in_prompt = jnp.take(state["prompt_mask"], slots, axis=0, mode="clip")
    repetition = rows["repetition"][:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where((counts > 0) | in_prompt, repeated, logits)
    return logits - rows["frequency"][:, None] * counts - rows["presence"][:, None] * (counts > 0)


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


def _draw(logits: Array, rows: dict[str, Array], positions: Array, greedy: Array) -> Int32[Array, " S"]:
    """Draws by argmax(p / e), e exponentially distributed. Greedy rows take the same road without filters and noise.

    This is the Gumbel-max rule, argmax(log p - log e), with a logarithm less for every id.
    """
    temperature = jnp.where(greedy, 1, jnp.maximum(rows["temperature"], _MIN_TEMPERATURE))
    scaled = (logits - jnp.max(logits, axis=1, keepdims=True)) / temperature[:, None]
    top_k, top_p, min_p = (
        jnp.where(greedy, off, rows[name]) for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
    )
    # The barriers keep both from being computed a second time, inside the second reduction.
    noise = lax.optimization_barrier(exponential_noise(rows["key"], positions, logits.shape[1]))
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
