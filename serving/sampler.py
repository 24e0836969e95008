"""Choosing the next tokens on the device.

Every row is computed by itself from its own logits, key and position, so that a result does not depend on what it is
batched with. What a row asks for beside a draw (bias, penalties, stop ids held back) changes its logits before it.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxserve.pallas_kernels import sample_logits
from jaxserve.serving.request import Limits
from jaxserve.serving.state import State, select_options


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
    vocab = limits.vocab_size
    rows = _neutral_where(~active, select_options(state, slots, limits))
    penalized = (rows["presence"] != 0) | (rows["frequency"] != 0) | (rows["repetition"] != 1)
    too_short = (positions < rows["min_length"]) & (rows["stop_ids"][:, 0] >= 0)
    biased = rows["bias_ids"][:, 0] >= 0

    def draw(logits):
        options = (rows[name] for name in ("temperature", "top_k", "top_p", "min_p"))
        return tuple(sample_logits(logits, rows["key"], positions, *options, vocab=vocab))

    def adjust(logits):
        logits = lax.cond(jnp.any(biased), lambda x: _add_bias(x, rows), lambda x: x, logits)
        logits = lax.cond(jnp.any(penalized), lambda x: _penalize(x, rows, state, slots, earlier), lambda x: x, logits)
        return lax.cond(jnp.any(too_short), lambda x: _ban_stops(x, rows, too_short), lambda x: x, logits)

    def adjust_and_draw(logits):
        logits = logits[:, :vocab]
        tokens, _ = draw(adjust(logits))
        return tokens, jnp.all(jnp.isfinite(logits), axis=1)

    # Steps in which no row changes its logits pass them through no conditional that would copy them.
    tokens, finite = lax.cond(jnp.any(biased | penalized | too_short), adjust_and_draw, draw, logits)
    tokens = jnp.where(finite, tokens, 0)
    return Samples(tokens, *_logprobs(logits, tokens, rows["num_logprobs"], limits), finite)


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


def _logprobs(logits: Array, tokens: Array, wanted: Array, limits: Limits) -> tuple[Array, Array, Array]:
    seqs, vocab = logits.shape[0], limits.vocab_size
    width = min(limits.max_logprobs, vocab)
    no_top = jnp.zeros((seqs, width), jnp.int32), jnp.zeros((seqs, width), jnp.float32)

    def chosen_only(logits):
        logits = logits[:, :vocab]
        highest, log_total = _log_total(logits)
        return (_chosen(logits, tokens) - highest - log_total, *no_top)

    def with_top(logits):
        return score(logits[:, :vocab], tokens, limits.max_logprobs)

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
