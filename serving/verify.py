"""Checking proposed tokens on the device.

A sequence that brings its last token and K proposals gets K+1 rows of logits. Every row samples as plain decoding
would at its position, from the same key and the same noise, and a proposal holds while it is the token that was sampled
before it. So what comes out is what plain decoding gives, token for token (docs/decisions/007-speculation.md).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


class LogitRows(NamedTuple):
    """Where the R rows of logits of a step come from.

    Row r is of token `token[r]` of sequence `sequence[r]`, whose first row is `first[r]`. Of an unused row the token is
    0, the sequence S and the first row R.
    """

    sequence: Int32[Array, " R"]
    token: Int32[Array, " R"]
    first: Int32[Array, " R"]

    @property
    def used(self) -> Bool[Array, " R"]:
        return self.first <= jnp.arange(self.first.shape[0])


def logit_rows(samples: Int32[Array, " S"], query_ends: Int32[Array, " S"], rows: int) -> LogitRows:
    """Rows for the last samples[s] tokens of each sequence s, whose tokens end before query_ends[s], packed."""
    ends = jnp.cumsum(samples)
    index = jnp.arange(rows, dtype=jnp.int32)
    sequence = jnp.sum(index[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    used, s = index < ends[-1], jnp.minimum(sequence, samples.shape[0] - 1)
    token = jnp.where(used, query_ends[s] - ends[s] + index, 0)
    return LogitRows(sequence, token, jnp.where(used, ends[s] - samples[s], rows))


def proposals(tokens: Int32[Array, " T"], rows: LogitRows) -> Int32[Array, " R"]:
    """The proposal that each row stands on, -1 for a sequence's first row, which stands on a known token."""
    return jnp.where(rows.first < jnp.arange(rows.first.shape[0]), tokens[rows.token], -1)


def earlier_proposals(proposed: Int32[Array, " R"], rows: LogitRows) -> Int32[Array, "R R"]:
    """For each row the proposals of its sequence up to it, which it takes as generated; -1 elsewhere."""
    index = jnp.arange(proposed.shape[0])
    before = (index[None, :] <= index[:, None]) & (index[None, :] >= rows.first[:, None])
    return jnp.where(before, proposed[None, :], -1)


def accept(chosen: Int32[Array, " R"], proposed: Int32[Array, " R"], rows: LogitRows) -> Bool[Array, " R"]:
    """Which of the chosen tokens are generated: those after proposals which were all chosen themselves."""
    missed = (proposed >= 0) & (proposed != jnp.roll(chosen, 1))
    misses = jnp.cumsum(missed)
    return rows.used & (misses == jnp.take(misses, rows.first, mode="clip"))


def count_accepted(accepted: Bool[Array, " R"], rows: LogitRows, seqs: int) -> Int32[Array, " S"]:
    """How many tokens each sequence generated."""
    return jnp.sum(accepted & (rows.sequence == jnp.arange(seqs)[:, None]), axis=1, dtype=jnp.int32)
