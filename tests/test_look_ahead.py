"""A look-ahead head in an artifact: its graph after the passes against its module, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from jaxserve.look_ahead import PREFIX, head_arrays, head_function, rewrite_head
from jaxserve.models.look_ahead import Head, LookAhead, param_specs
from jaxserve.passes.printer import print_graph

VOCAB = 300


def random_head(known=64, width=128, mlp=64, vocab=VOCAB, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {path: spec.shape for path, spec in param_specs(LookAhead(known, width, mlp)).items()}
    params = {path: rng.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}
    return Head(params, np.sort(rng.choice(vocab, known, replace=False)).astype(np.int32))


@pytest.mark.parametrize("activations", ["f32", "bf16"])
@pytest.mark.parametrize("count", [1, 5])
def test_the_rewritten_head_says_what_its_module_says(activations, count):
    head, rng = random_head(), np.random.default_rng(1)
    hidden = jnp.asarray(rng.normal(size=(count, 128)), jnp.float32)
    unknown = np.setdiff1d(np.arange(VOCAB), head.tokens)[0]
    tokens = np.array([unknown, *head.tokens[: count - 1]], np.int32)
    result = rewrite_head(head, count, VOCAB, activations, "cpu")
    params = {path: jnp.asarray(value) for path, value in head_arrays(head, VOCAB, result)}
    assert {path.startswith(PREFIX) for path in params} == {True}
    token, rate = jax.jit(head_function(result.graph))(params, hidden, jnp.asarray(tokens))
    variables = {"params": jax.tree.map(jnp.asarray, unflatten_dict(head.params, sep="/"))}
    logits = head.module.apply(variables, hidden, jnp.asarray(head.places(VOCAB)[tokens]))
    assert isinstance(logits, jax.Array)
    p = np.asarray(jax.nn.softmax(logits))
    named = np.searchsorted(head.tokens, np.asarray(token))
    np.testing.assert_array_equal(head.tokens[named], token)
    # Weights of 8 bits: the likeliest, or one that is nearly as likely.
    assert (p[np.arange(count), named] > 0.8 * p.max(axis=1)).all()
    np.testing.assert_allclose(rate, p.max(axis=1), rtol=0.2, atol=0.02)


def test_all_weights_of_a_head_are_codes():
    """What is not would be read in 16 or 32 bits for every token."""
    text = print_graph(rewrite_head(random_head(), 2, VOCAB, "bf16", "cpu").graph)
    assert text.count("jaxserve.quantized_matmul") == 5 and "jaxserve.quantized_take" in text
    assert "jaxserve.dense_matmul" not in text and "dot_general" not in text


def test_heads_are_rewritten_for_gpus_too():
    text = print_graph(rewrite_head(random_head(), 2, VOCAB, "bf16", "cuda").graph)
    assert text.count("jaxserve.quantized_matmul") == 5 and "panels" not in text


def test_a_tied_rate_names_the_first():
    head = random_head()
    zero = dataclasses.replace(head, params={path: np.zeros_like(value) for path, value in head.params.items()})
    result = rewrite_head(zero, 3, VOCAB, "f32", "cpu")
    params = {path: jnp.asarray(value) for path, value in head_arrays(zero, VOCAB, result)}
    token, rate = head_function(result.graph)(params, jnp.ones((3, 128)), jnp.zeros(3, jnp.int32))
    np.testing.assert_array_equal(token, [head.tokens[0]] * 3)
    np.testing.assert_allclose(rate, [1 / 64] * 3, rtol=1e-6)
