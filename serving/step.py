"""The step: from what the host sends, one call of the model, and new device state.

The host sends slots, counts, prompt chunks and block tables; lengths and last tokens are on the device, so that a step
can be dispatched before the tokens of the one before it are known.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxserve.serving.request import Limits
from jaxserve.serving.sampler import Samples, sample, score
from jaxserve.serving.state import State
from jaxserve.serving.verify import accept, count_accepted, earlier_proposals, logit_rows, proposals

Arrays = dict[str, Array]
Forward = Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]
LookAhead = Callable[[Arrays, Array, Array], tuple[Array, Array]]
Heads = Mapping[int, LookAhead]  # by the number of rows that they are made for
Step = Callable[[Arrays, Arrays, State, Array], tuple[Arrays, State, Arrays]]

COPY_PAGES = 8  # page copies in one call of the copy program
LAST_TOKEN, FORESEEN = -1, -2  # tokens that only the device knows
FORWARD_ARGS = (
    "tokens",
    "positions",
    "segments",
    "logit_rows",
    "kv_slots",
    "block_tables",
    "query_starts",
    "context_lens",
)


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """The static size of a step program: at most `tokens` tokens of at most `seqs` sequences.

    A step chooses at most `seqs` tokens: one a sequence, or more for those that bring proposals. In a decode bucket
    (tokens == seqs) that is one for every token. A 'score' bucket has one row and yields log-probabilities of given
    targets at every token instead of a new token.
    """

    kind: Literal["step", "score"]
    tokens: int
    seqs: int

    @property
    def decode(self) -> bool:
        return self.tokens == self.seqs

    @property
    def logit_rows(self) -> int:
        """R: rows of logits that forward must return."""
        return self.tokens if self.kind == "score" else self.seqs

    @property
    def look_ahead_rows(self) -> tuple[int, ...]:
        """What a look-ahead head must be made for: a lone sequence should not pay for those that are not there."""
        return tuple(sorted({1, self.seqs}))

    def fits(self, kind: str, tokens: int, seqs: int, samples: int) -> bool:
        """Whether a plan of `seqs` rows and `tokens` tokens, which chooses `samples` tokens, can run in this bucket."""
        return kind == self.kind and tokens <= self.tokens and max(seqs, samples) <= self.seqs


def default_buckets(limits: Limits) -> tuple[Bucket, ...]:
    """Decode buckets of limits.row_sizes, mixed buckets at the powers of two from 32 tokens, one score bucket.

    Some bucket fits every plan within the limits. Small mixed buckets have few rows: a lone short prompt should not pay
    for the logits of max_num_seqs rows.
    """
    most, budget = limits.row_sizes[-1], limits.token_budget
    steps = {Bucket("step", size, size) for size in limits.row_sizes}
    *small, largest = _powers(2, 32, budget)
    steps |= {Bucket("step", tokens, min(most, tokens // 4)) for tokens in small}
    steps.add(Bucket("step", largest, most))
    return (*sorted(steps), Bucket("score", limits.score_budget, 1))


def _powers(base: int, first: int, last: int) -> list[int]:
    """first, first * base, first * base^2, ... as far as they are below last, and last."""
    return [*itertools.takewhile(lambda size: size < last, (first * base**n for n in itertools.count())), last]


def input_specs(bucket: Bucket, limits: Limits) -> dict[str, jax.ShapeDtypeStruct]:
    """What the host sends with each step, all int32, in one array: see InputLayout.

    tokens [T]: rows packed one after the other; LAST_TOKEN and, with limits.look_ahead, FORESEEN are those of the row's
    slot. slots [S]: unused rows come
    last and point at the scratch slot max_num_seqs. query_counts [S]: tokens of each row. block_tables [S, P]. Step
    buckets: samples [S]: at how many of the row's last positions a next token is to be chosen, at most R in all; the
    tokens there are proposals but for the first of them; with limits.look_ahead also look_ahead [1], after how
    many of the first rows the head is to run. Score buckets: targets [T].
    """
    shapes = {
        "tokens": (bucket.tokens,),
        "slots": (bucket.seqs,),
        "query_counts": (bucket.seqs,),
        "block_tables": (bucket.seqs, limits.pages_per_seq),
    }
    shapes |= {"targets": (bucket.tokens,)} if bucket.kind == "score" else {"samples": (bucket.seqs,)}
    if limits.look_ahead and bucket.kind == "step":
        shapes["look_ahead"] = (1,)
    return {name: jax.ShapeDtypeStruct(shape, np.int32) for name, shape in shapes.items()}


@dataclasses.dataclass(frozen=True)
class InputLayout:
    """How the inputs of a step lie in one int32 array of `size`, one after the other: name, start, end and shape."""

    fields: tuple[tuple[str, int, int, tuple[int, ...]], ...]
    size: int

    @classmethod
    def of(cls, bucket: Bucket, limits: Limits) -> "InputLayout":
        fields, start = [], 0
        for name, spec in input_specs(bucket, limits).items():
            fields.append((name, start, start + spec.size, spec.shape))
            start += spec.size
        return cls(tuple(fields), start)

    @property
    def spec(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.size,), np.int32)

    def unpack(self, packed: Any) -> dict[str, Any]:
        """The inputs by name from the array that holds them; of a numpy array they are views, to be filled in."""
        return {name: packed[start:end].reshape(shape) for name, start, end, shape in self.fields}


def forward_specs(bucket: Bucket, limits: Limits) -> dict[str, jax.ShapeDtypeStruct]:
    """What forward is given, beside parameters and caches, by the names in FORWARD_ARGS.

    tokens, positions, kv_slots (page * B + offset, -1 for padding) [T]; segments [T]: the token's row, S for padding;
    logit_rows [R]: the tokens whose logits are wanted; block_tables [S, P]; query_starts [S+1]; context_lens [S]:
    length of each row's sequence with this step's tokens. All int32.
    """
    tokens, seqs = bucket.tokens, bucket.seqs
    shapes = {name: (tokens,) for name in ("tokens", "positions", "segments", "kv_slots")} | {
        "logit_rows": (bucket.logit_rows,),
        "block_tables": (seqs, limits.pages_per_seq),
        "query_starts": (seqs + 1,),
        "context_lens": (seqs,),
    }
    return {name: jax.ShapeDtypeStruct(shapes[name], np.int32) for name in FORWARD_ARGS}


def step_function(forward: Forward, bucket: Bucket, limits: Limits, heads: Heads | None = None) -> Step:
    """step(params, caches, state, packed) -> (caches, state, outputs); jit it with caches and state donated.

    forward(params, caches, args) -> (caches, outputs), with args as in forward_specs; of the outputs `logits` are
    [R, padded vocab] float32, and `hidden` [R, D] is what they are made of, where limits.look_ahead promises
    `heads`, which are asked what comes after the last token of each sequence. The one of n rows is
    (params, hidden [n, D], tokens [n]) -> (token [n] int32, rate [n] float32), the one after each and how likely; n is
    each of bucket.look_ahead_rows.
    packed: the inputs, as InputLayout unpacks them.
    outputs: the samples of the R rows, or the scores of the T targets, as pack_outputs packs them.
    """

    layout = InputLayout.of(bucket, limits)

    def step(params: Arrays, caches: Arrays, state: State, packed: Array) -> tuple[Arrays, State, Arrays]:
        inputs = layout.unpack(packed)
        args = expand_inputs(inputs, state, bucket, limits)
        caches, results = forward(params, caches, args)
        logits = results["logits"]
        if bucket.kind == "score":
            state = state | {"length": state["length"].at[inputs["slots"]].add(inputs["query_counts"])}
            scores = _scores(logits[:, : limits.vocab_size], inputs["targets"], limits)
            return caches, state, pack_outputs(scores, jnp.ones_like(scores.finite))
        chosen = _choose(logits, inputs, args, state, limits)
        if not heads:
            return caches, _next_state(state, inputs, chosen), pack_outputs(chosen.samples, chosen.accepted)
        foreseen = _foresee(heads, params, results["hidden"], chosen, inputs["look_ahead"][0])
        state = _next_state(state, inputs, chosen, foreseen[0])
        rows = [_at_rows(values, chosen) for values in foreseen]
        return caches, state, pack_outputs(chosen.samples, chosen.accepted, rows)

    return step


class _Chosen(NamedTuple):
    """The samples of the R rows, which of them are accepted, and the slots of the rows; of each of S sequences how many
    tokens it generated, and the row of the last, anything if there is none."""

    samples: Samples
    accepted: Array
    slots: Array
    generated: Array
    newest: Array


def _choose(logits: Array, inputs: Arrays, args: Arrays, state: State, limits: Limits) -> _Chosen:
    slots, wanted = inputs["slots"], inputs["samples"]
    rows = logit_rows(wanted, args["query_starts"][1:], logits.shape[0])
    row_slots = slots.at[rows.sequence].get(mode="fill", fill_value=limits.max_num_seqs)
    positions = args["positions"][rows.token] + 1
    proposed = proposals(args["tokens"], rows)
    earlier = earlier_proposals(proposed, rows)
    samples = sample(logits, state, row_slots, positions, rows.used, limits, earlier)
    accepted = accept(samples.tokens, proposed, rows)
    generated = count_accepted(accepted, rows, slots.shape[0])
    return _Chosen(samples, accepted, row_slots, generated, jnp.cumsum(wanted) - wanted + generated - 1)


def _next_state(state: State, inputs: Arrays, chosen: _Chosen, foreseen: Array | None = None) -> State:
    """The state after the accepted ones of the samples, and with what is foreseen after each sequence's last [S]."""
    slots, tokens = inputs["slots"], chosen.samples.tokens

    def updated(name: str, values: Array) -> Array:
        # Rows that do not sample write back what is there: all padding rows share the scratch slot.
        kept = jnp.take(state[name], slots, mode="clip")
        return state[name].at[slots].set(jnp.where(chosen.generated > 0, values, kept))

    after = {} if foreseen is None else {"foreseen": updated("foreseen", foreseen)}
    return (
        state
        | after
        | {
            # What rejected proposals wrote to the cache lies past the length, and is written over.
            "length": state["length"].at[slots].add(inputs["query_counts"] - inputs["samples"] + chosen.generated),
            "last_token": updated("last_token", jnp.take(tokens, chosen.newest, mode="clip")),
            "counts": state["counts"].at[chosen.slots, tokens].add(chosen.accepted.astype(jnp.int32)),
        }
    )


def _foresee(heads: Heads, params: Arrays, hidden: Array, chosen: _Chosen, wanted: Array) -> tuple[Array, Array]:
    """What the head says comes after the last token of each of S sequences, and how likely it is. A rate of 0: it was
    not asked, which it is for the first `wanted` at least."""
    seqs = chosen.newest.shape[0]

    def asked(count: int) -> tuple[Array, Array]:
        newest = chosen.newest[:count]
        inputs = (jnp.take(values, newest, axis=0, mode="clip") for values in (hidden, chosen.samples.tokens))
        token, rate = heads[count](params, *inputs) if count else (jnp.zeros(0, jnp.int32), jnp.zeros(0))
        return jnp.pad(token, (0, seqs - count)), jnp.pad(rate, (0, seqs - count))

    counts = (0, *sorted(heads))
    return jax.lax.switch(jnp.sum(wanted > jnp.array(counts[:-1])), [partial(asked, count) for count in counts])


def _at_rows(values: Array, chosen: _Chosen) -> Array:
    """Those of S sequences at the rows of their last tokens, 0 at the others: [R]."""
    rows = chosen.samples.tokens.shape[0]
    places = jnp.where(chosen.generated > 0, chosen.newest, rows)
    return jnp.zeros(rows, values.dtype).at[places].set(values, mode="drop")


def pack_outputs(samples: Samples, accepted: Array, foreseen: Sequence[Array] = ()) -> Arrays:
    """The samples of n rows in two int32 arrays, since reading back costs by the array: `rows` [3, n] holds tokens, the
    bits of logprob, and finite + 2 accepted, and with what is foreseen [5, n] its tokens and the bits of their rates;
    `top` [2, n, top] holds top_ids and the bits of top_logprobs."""
    bits = partial(jax.lax.bitcast_convert_type, new_dtype=jnp.int32)
    after = (foreseen[0], bits(foreseen[1])) if foreseen else ()
    return {
        "rows": jnp.stack([samples.tokens, bits(samples.logprob), samples.finite + 2 * accepted, *after]),
        "top": jnp.stack([samples.top_ids, bits(samples.top_logprobs)]),
    }


def unpack_rows(rows: np.ndarray) -> tuple[np.ndarray, ...]:
    """tokens int32, logprob float32, finite and accepted bool, each [n], from `rows` [3, n] of pack_outputs; of [5, n]
    also the foreseen tokens int32 and their rates float32."""
    after = (rows[3], rows[4].view(np.float32)) if len(rows) > 3 else ()
    return rows[0], rows[1].view(np.float32), (rows[2] & 1).astype(np.bool_), (rows[2] >> 1).astype(np.bool_), *after


def unpack_top(top: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """top_ids int32 and top_logprobs float32, both [n, top], from `top` [2, n, top] of pack_outputs."""
    return top[0], top[1].view(np.float32)


def expand_inputs(inputs: Arrays, state: State, bucket: Bucket, limits: Limits) -> Arrays:
    """forward's arguments from the step's inputs and the state before it."""
    tokens, slots, counts = inputs["tokens"], inputs["slots"], inputs["query_counts"]
    rows = {name: jnp.take(state[name], slots, mode="clip") for name in ("length", "last_token")}
    ends = jnp.cumsum(counts)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    index = jnp.arange(bucket.tokens, dtype=jnp.int32)
    segments = jnp.sum(index[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)  # rows that end at or before the token
    real = index < ends[-1]
    row = jnp.minimum(segments, bucket.seqs - 1)
    positions = jnp.where(real, rows["length"][row] + index - starts[row], 0)
    score = bucket.kind == "score"
    tokens = jnp.where(tokens == LAST_TOKEN, rows["last_token"][row], tokens)
    if limits.look_ahead:
        foreseen = jnp.take(state["foreseen"], slots, mode="clip")
        tokens = jnp.where(tokens == FORESEEN, foreseen[row], tokens)
    return {
        "tokens": tokens,
        "positions": positions,
        "segments": jnp.where(real, segments, bucket.seqs),
        "logit_rows": index if score else logit_rows(inputs["samples"], ends, bucket.logit_rows).token,
        "kv_slots": jnp.where(real, _kv_slots(inputs["block_tables"], row, positions, limits), -1),
        "block_tables": inputs["block_tables"],
        "query_starts": starts,
        "context_lens": rows["length"] + counts,
    }


def _kv_slots(tables: Int32[Array, "S P"], row: Array, positions: Array, limits: Limits) -> Int32[Array, " T"]:
    """page * B + offset of each position, -1 past the end of the table."""
    column, offset = positions // limits.page_size, positions % limits.page_size
    page = tables.at[row, column].get(mode="fill", fill_value=-1)
    return jnp.where(page < 0, -1, page * limits.page_size + offset)


def _scores(logits: Array, targets: Array, limits: Limits) -> Samples:
    """The targets as if they had been sampled."""
    logprob, ids, top = score(logits, targets, limits.max_logprobs)
    return Samples(targets, logprob, ids, top, finite=jnp.all(jnp.isfinite(logits), axis=1))


def copy_specs() -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Of copy_pages' second and third argument: sources and destinations [C] int32, destination -1 where unused."""
    spec = jax.ShapeDtypeStruct((COPY_PAGES,), np.int32)
    return spec, spec


def copy_pages(caches: Arrays, sources: Int32[Array, " C"], destinations: Int32[Array, " C"]) -> Arrays:
    """The caches, each [L, pages, ...], with page destinations[i] of every layer set to page sources[i]; jit it with
    caches donated."""

    def copy(cache: Array) -> Array:
        pages = jnp.take(cache, sources, axis=1, mode="clip")
        return cache.at[:, jnp.where(destinations < 0, cache.shape[1], destinations)].set(pages, mode="drop")

    return {name: copy(cache) for name, cache in caches.items()}
