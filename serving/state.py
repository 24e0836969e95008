"""The per-slot device state: what a step needs to know of a running sequence without asking the host.

A dict of arrays with N = max_num_seqs rows, and one more: padding rows of a step point at the last, the scratch row,
which always holds neutral values. The dict is donated to every program that updates it. What only admitting changes is
packed into the one array `options`, because every array that a program takes costs the host some microseconds a step.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32

from jaxserve.serving.request import Limits, Sequence

State = dict[str, Array]

ADMIT_ROWS = 8  # sequences one call of the admit program loads


def row_layout(limits: Limits) -> np.dtype:
    """The fields that admitting a sequence loads, each made of 4-byte words; the name, type and shape of one slot's
    part. The first two change with every step and are arrays of their own, the others words of `options`.

    length counts the positions whose K and V are computed. min_length is the absolute position before which none of
    stop_ids may be generated. num_logprobs is -1 when none are wanted. Unused entries of bias_ids and stop_ids are -1.
    """
    stops = len(limits.eos_ids) + limits.max_stop_ids
    return np.dtype(
        [
            ("last_token", np.int32),
            ("length", np.int32),
            ("key", np.uint32, (2,)),
            ("temperature", np.float32),
            ("top_k", np.int32),
            ("top_p", np.float32),
            ("min_p", np.float32),
            ("presence", np.float32),
            ("frequency", np.float32),
            ("repetition", np.float32),
            ("min_length", np.int32),
            ("num_logprobs", np.int32),
            ("bias_ids", np.int32, (limits.max_bias,)),
            ("bias_values", np.float32, (limits.max_bias,)),
            ("stop_ids", np.int32, (stops,)),
        ]
    )


def neutral_rows(count: int, limits: Limits) -> np.ndarray:
    """`count` rows of row_layout that ask for nothing: greedy, no filter, no penalty, no bias."""
    rows = np.zeros(count, row_layout(limits))
    for name, value in (("top_p", 1), ("repetition", 1), ("num_logprobs", -1), ("bias_ids", -1), ("stop_ids", -1)):
        rows[name] = value
    return rows


def state_specs(limits: Limits) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and types of the state, all with N+1 rows.

    last_token, length [N+1] int32; with limits.look_ahead also foreseen [N+1] int32: what the head said comes after
    last_token, 0 if it was not asked; options [N+1, W] int32: rows of row_layout, whose first two words are stale;
    counts [N+1, V] int32: how often the slot's sequence generated each token; prompt_mask [N+1, V] bool: which tokens
    its prompt holds. counts and prompt_mask mean something only while penalties are in use.
    """
    shapes = {"last_token": (), "length": (), "options": (_words(limits),), "counts": (limits.vocab_size,)}
    if limits.look_ahead:
        shapes["foreseen"] = ()
    rows = limits.max_num_seqs + 1
    specs = {name: jax.ShapeDtypeStruct((rows, *shape), np.int32) for name, shape in shapes.items()}
    return specs | {"prompt_mask": jax.ShapeDtypeStruct((rows, limits.vocab_size), np.bool_)}


def init_state(limits: Limits) -> State:
    """A state of neutral rows. Compiles nothing."""
    arrays: dict[str, np.ndarray] = {
        name: np.zeros(spec.shape, spec.dtype) for name, spec in state_specs(limits).items()
    }
    arrays["options"] = neutral_rows(limits.max_num_seqs + 1, limits).view(np.int32).reshape(arrays["options"].shape)
    return {name: jax.device_put(array, may_alias=False) for name, array in arrays.items()}


def pack_row(seq: Sequence, limits: Limits) -> np.ndarray:
    """The state of seq's slot as it must be before its next step, int32 words [W] (see row_layout)."""
    params, packed = seq.params, neutral_rows(1, limits)
    row = packed[0]
    row["last_token"] = seq.tokens[-1]
    row["length"] = seq.num_admitted
    row["key"] = seq.seed
    row["temperature"] = params.temperature
    row["top_k"] = params.top_k
    row["top_p"] = params.top_p
    row["min_p"] = params.min_p
    row["presence"] = params.presence_penalty
    row["frequency"] = params.frequency_penalty
    row["repetition"] = params.repetition_penalty
    row["min_length"] = seq.prompt_len + params.min_tokens
    row["num_logprobs"] = -1 if params.logprobs is None else params.logprobs
    if params.logit_bias:
        ids, values = zip(*params.logit_bias, strict=True)
        row["bias_ids"][: len(ids)] = ids
        row["bias_values"][: len(ids)] = values
    if params.min_tokens:
        row["stop_ids"][: len(seq.stop_ids)] = sorted(seq.stop_ids)
    return packed.view(np.int32)


def admit_specs(limits: Limits) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Of admit's second and third argument: slots [A] int32, rows [A, W] int32."""
    return jax.ShapeDtypeStruct((ADMIT_ROWS,), np.int32), jax.ShapeDtypeStruct((ADMIT_ROWS, _words(limits)), np.int32)


def _words(limits: Limits) -> int:
    return row_layout(limits).itemsize // 4


def admit(state: State, slots: Int32[Array, " A"], rows: Int32[Array, "A W"]) -> State:
    """The state with rows[i] loaded into slots[i]; jit it with the state donated.

    Unused entries point at the scratch row and hold neutral_rows.
    """
    loaded = {"last_token": rows[:, 0], "length": rows[:, 1], "options": rows}
    return state | {name: state[name].at[slots].set(values) for name, values in loaded.items()}


def penalty_rows(seq: Sequence, limits: Limits) -> tuple[np.ndarray, np.ndarray]:
    """counts [V] int32 of the outputs known so far and prompt_mask [V] bool, for load_penalties."""
    counts = np.bincount(seq.output_ids, minlength=limits.vocab_size).astype(np.int32)
    mask = np.zeros(limits.vocab_size, np.bool_)
    mask[seq.prompt_ids] = True
    return counts, mask


def load_penalties_specs(limits: Limits) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of load_penalties' second to fourth argument: slot int32, counts [V] int32, prompt_mask [V] bool."""
    vocab = (limits.vocab_size,)
    return (
        jax.ShapeDtypeStruct((), np.int32),
        jax.ShapeDtypeStruct(vocab, np.int32),
        jax.ShapeDtypeStruct(vocab, np.bool_),
    )


def load_penalties(state: State, slot: Array, counts: Array, prompt_mask: Array) -> State:
    """The state with slot's rows of counts and prompt_mask set; jit it with the state donated."""
    return state | {
        "counts": lax.dynamic_update_index_in_dim(state["counts"], counts, slot, 0),
        "prompt_mask": lax.dynamic_update_index_in_dim(state["prompt_mask"], prompt_mask, slot, 0),
    }


def select_options(state: State, slots: Int32[Array, " S"], limits: Limits) -> dict[str, Array]:
    """The options of rows `slots`, by the names of row_layout, each [S, ...]."""
    rows, layout = jnp.take(state["options"], slots, axis=0, mode="clip"), row_layout(limits)

    def unpack(field: np.dtype, offset: int) -> Array:
        words = rows[:, offset // 4 : (offset + field.itemsize) // 4]
        return lax.bitcast_convert_type(words.reshape(-1, *field.shape), field.base)

    fields = {name: unpack(field, offset) for name, (field, offset, *_) in (layout.fields or {}).items()}
    return {name: value for name, value in fields.items() if name not in ("last_token", "length")}
