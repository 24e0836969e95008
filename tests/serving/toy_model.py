"""A model whose every logit depends on the sequence's whole context, read through the paged cache, and is easy to
predict.

The checksum of tokens t_0 ... t_p is sum (t_j + 1) (j + 1) mod V. The logits of a position are 10 at its checksum, 5 at
the token after that and 0 elsewhere.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.serving import state as st
from jaxserve.serving.plan import Row, StepPlan
from jaxserve.serving.request import GenerationRequest, Limits, SamplingParams, Sequence
from jaxserve.serving.runner import Runner
from jaxserve.serving.step import InputLayout, copy_pages, copy_specs, default_buckets, step_function

VOCAB = 101
LIMITS = Limits(
    max_num_seqs=5, max_model_len=64, page_size=4, num_pages=40, vocab_size=VOCAB, token_budget=40, score_budget=8
)


def toy_forward(params, caches, args):
    size = caches["k"].size
    index = jnp.where(args["kv_slots"] < 0, size, args["kv_slots"])
    value = (args["tokens"] + 1) * (args["positions"] + 1)
    caches = {
        name: cache.reshape(-1).at[index].set(value, mode="drop").reshape(cache.shape) for name, cache in caches.items()
    }
    row = args["segments"][args["logit_rows"]]
    pages = jnp.take(caches["k"][0], jnp.take(args["block_tables"], row, axis=0, mode="clip"), axis=0, mode="clip")
    values = pages.reshape(len(row), -1)
    seen = jnp.arange(values.shape[1]) <= args["positions"][args["logit_rows"]][:, None]
    checksum = jnp.sum(jnp.where(seen, values, 0), axis=1) % VOCAB
    padded = VOCAB + 3
    logits = 10 * jax.nn.one_hot(checksum, padded) + 5 * jax.nn.one_hot((checksum + 1) % VOCAB, padded)
    # Padding beats everything, and poisoned parameters reach every logit.
    return caches, {"logits": jnp.where(jnp.arange(padded) < VOCAB, logits, 1e9) + params["offset"]}


def checksum(tokens):
    return sum((token + 1) * (j + 1) for j, token in enumerate(tokens)) % VOCAB


def generate(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(checksum(tokens))
    return tokens[len(prompt) :]


LOG_TOTAL = np.log(np.exp(10) + np.exp(5) + VOCAB - 2)


def logprob_of(token, tokens):
    """log p(token) after `tokens`."""
    best = checksum(tokens)
    return (10 if token == best else 5 if token == (best + 1) % VOCAB else 0) - LOG_TOTAL


def memory_of(function, *specs, donate: int | tuple[int, ...] = 0):
    """Memory analysis of the compiled function."""
    analysis = jax.jit(function, donate_argnums=donate).lower(*specs).compile().memory_analysis()
    assert analysis is not None
    return analysis


def cache_specs(limits=LIMITS):
    pages = jax.ShapeDtypeStruct((1, limits.num_pages, limits.page_size), np.int32)
    return {"k": pages, "v": pages}


def new_caches(limits=LIMITS):
    """Pages full of nonsense."""
    return {name: jax.device_put(np.full(spec.shape, 12345, np.int32)) for name, spec in cache_specs(limits).items()}


PARAMS = {"offset": jax.ShapeDtypeStruct((), np.float32)}


def step_specs(bucket, limits=LIMITS):
    return PARAMS, cache_specs(limits), st.state_specs(limits), InputLayout.of(bucket, limits).spec


def compile_step(bucket, limits=LIMITS, forward=toy_forward):
    step = step_function(forward, bucket, limits)
    return jax.jit(step, donate_argnums=(1, 2)).lower(*step_specs(bucket, limits)).compile()


def compile_others(limits=LIMITS):
    """admit, load_penalties, copy_pages."""
    state = st.state_specs(limits)
    return (
        jax.jit(st.admit, donate_argnums=0).lower(state, *st.admit_specs(limits)).compile(),
        jax.jit(st.load_penalties, donate_argnums=0).lower(state, *st.load_penalties_specs(limits)).compile(),
        jax.jit(copy_pages, donate_argnums=0).lower(cache_specs(limits), *copy_specs()).compile(),
    )


def make_runner(programs, others, limits=LIMITS, **options):
    params = {"offset": jax.device_put(np.float32(0))}
    admit, load_penalties, copy = others
    caches, state = new_caches(limits), st.init_state(limits)
    return Runner(programs, admit, load_penalties, copy, params, caches, state, limits, **options)


def compile_all(limits=LIMITS, forward=toy_forward):
    programs = {bucket: compile_step(bucket, limits, forward) for bucket in default_buckets(limits)}
    return programs, compile_others(limits)


def make_sequence(name, prompt, slot, blocks, limits=LIMITS, **params):
    params = {"max_tokens": 20, "temperature": 0.0} | params
    seq = Sequence.create(GenerationRequest(name, tuple(prompt), SamplingParams(**params)), limits)
    seq.slot, seq.blocks = slot, list(blocks)
    return seq


def make_row(seq, start, count, samples=1, from_state=False, pages_from=0):
    tokens = () if from_state else tuple(seq.tokens[start : start + count])
    return Row(seq, seq.slot, start, count, tokens, samples, pages_from)


def step(*rows, kind: Literal["step", "score"] = "step"):
    return StepPlan(kind, list(rows), [], [])
