"""What is sampled while proposals are checked has the distribution of the model, as an enumeration gives it."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from jaxserve.serving import state as st
from jaxserve.serving import step as steps
from jaxserve.serving.request import Limits
from jaxserve.serving.step import Bucket, InputLayout, input_specs, unpack_rows

VOCAB, LENGTH, BATCH, DRAWS = 5, 3, 125, 50_000
LIMITS = Limits(BATCH, 64, 16, BATCH, vocab_size=VOCAB, token_budget=LENGTH * BATCH)
BUCKET = Bucket("step", LENGTH * BATCH, LENGTH * BATCH)
TABLE = np.random.default_rng(5).normal(0, 1.5, (VOCAB, VOCAB)).astype(np.float32)  # logits after each token
LAST, PROMPT_HAS = 2, (2, 4)  # the last token of every prompt, and which tokens prompts hold
OPTIONS = {"temperature": 0.9, "top_p": 0.93, "presence": 0.5, "frequency": 0.4, "repetition": 1.3}


def forward(params, caches, args):
    return caches, {"logits": params["table"][args["tokens"][args["logit_rows"]]]}


def probabilities(before):
    """p(next token) after the prompt and the tokens `before`, in float64, by sorting."""
    counts = np.bincount(before, minlength=VOCAB)
    logits = TABLE[before[-1] if before else LAST].astype(np.float64)
    seen = (counts > 0) | np.isin(np.arange(VOCAB), PROMPT_HAS)
    r = OPTIONS["repetition"]
    logits = np.where(seen, np.where(logits > 0, logits / r, logits * r), logits)
    logits = (logits - OPTIONS["frequency"] * counts - OPTIONS["presence"] * (counts > 0)) / OPTIONS["temperature"]
    p = np.exp(logits - logits.max())
    p /= p.sum()
    order = np.argsort(-p)
    above = np.cumsum(p[order]) - p[order]
    p[order[above >= OPTIONS["top_p"]]] = 0
    return p / p.sum()


def expected():
    """Probability of every continuation."""
    return {
        tokens: math.prod(probabilities(list(tokens[:i]))[token] for i, token in enumerate(tokens))
        for tokens in itertools.product(range(VOCAB), repeat=LENGTH)
    }


def initial_state(rng):
    state = {name: np.array(array) for name, array in st.init_state(LIMITS).items()}
    options = st.neutral_rows(BATCH + 1, LIMITS)
    for name, value in OPTIONS.items():
        options[name][:BATCH] = value
    options["key"] = rng.integers(0, 2**32, options["key"].shape, dtype=np.uint32)
    state["options"] = options.view(np.int32).reshape(BATCH + 1, -1)
    state["last_token"][:BATCH] = LAST
    state["length"][:BATCH] = 7
    state["prompt_mask"][:BATCH, PROMPT_HAS] = True
    return state


def inputs_with(proposed):
    """One row a slot: its last token and proposals [BATCH, K]."""
    inputs = {name: np.zeros(spec.shape, spec.dtype) for name, spec in input_specs(BUCKET, LIMITS).items()}
    tokens = np.concatenate([np.full((BATCH, 1), -1), proposed], axis=1)
    inputs["tokens"][: tokens.size] = tokens.ravel()
    inputs["slots"][:] = BATCH
    inputs["slots"][:BATCH] = np.arange(BATCH)
    inputs["query_counts"][:BATCH] = inputs["samples"][:BATCH] = tokens.shape[1]
    return np.concatenate([array.ravel() for array in inputs.values()])


def propose(last):
    """[BATCH, 2]: the likeliest tokens of the raw table, one after the other, which the penalties often make wrong."""
    best = TABLE.argmax(axis=1)
    return np.stack([best[last], best[best[last]]], axis=1)


def chi_squared():
    """p-value of DRAWS continuations against `expected`; 0 when an impossible one was drawn."""
    assert InputLayout.of(BUCKET, LIMITS).size
    program = jax.jit(steps.step_function(forward, BUCKET, LIMITS))
    params, rng = {"table": jnp.asarray(TABLE)}, np.random.default_rng(11)
    drawn = np.zeros((VOCAB,) * LENGTH)
    for _ in range(DRAWS // BATCH):
        state = initial_state(rng)
        made: list[list[int]] = [[] for _ in range(BATCH)]
        last = np.full(BATCH, LAST)
        while min(map(len, made)) < LENGTH:
            proposed = propose(last)
            _, state, outputs = program(params, {}, state, inputs_with(proposed))
            chosen = unpack_rows(np.asarray(outputs["rows"]))[0][: LENGTH * BATCH].reshape(BATCH, LENGTH)
            last = np.asarray(state["last_token"])[:BATCH]
            generated = np.asarray(state["length"])[:BATCH] - 7 - [len(tokens) for tokens in made]
            for slot in range(BATCH):
                made[slot] += chosen[slot, : generated[slot]].tolist()
        np.add.at(drawn, tuple(np.array([tokens[:LENGTH] for tokens in made]).T), 1)
    wanted = np.zeros_like(drawn)
    for tokens, probability in expected().items():
        wanted[tokens] = DRAWS * probability
    if drawn[wanted == 0].any():
        return 0.0
    rare = wanted < 5
    cells = [*zip(drawn[~rare], wanted[~rare], strict=True), (drawn[rare].sum(), wanted[rare].sum())]
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in cells if mean)
    return float(chi2.sf(statistic, len(cells) - 1))


def test_continuations_have_the_models_distribution():
    assert chi_squared() > 0.001


def accept_always(chosen, proposed, rows):
    return rows.used


def redraw_rejected(*arguments):
    """Where a proposal is rejected, a token of p itself and not of what p leaves without the proposal."""
    *_, earlier = arguments
    logits, state, slots, positions, *rest = arguments
    first, again = SAMPLE(*arguments), SAMPLE(logits, state, slots, positions + 1000, *rest)
    following = jnp.roll(jnp.diag(earlier), -1)
    return first._replace(tokens=jnp.where(first.tokens == following, first.tokens, again.tokens))


SAMPLE = steps.sample


@pytest.mark.parametrize(("name", "bug"), [("accept", accept_always), ("sample", redraw_rejected)])
def test_planted_bugs_are_caught(monkeypatch, name, bug):
    monkeypatch.setattr(steps, name, bug)
    assert chi_squared() < 1e-6
