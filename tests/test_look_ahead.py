"""A look-ahead head in an artifact: its graph after the passes against its module, and what is refused."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from jaxserve.errors import UserError
from jaxserve.look_ahead import PREFIX, head_arrays, head_function, load_head, rewrite_head
from jaxserve.lowering import trace_model
from jaxserve.models.look_ahead import LOOK_AHEAD, Head, LookAhead, param_specs
from jaxserve.models.resolve import resolve
from jaxserve.passes.pipeline import Context, for_platform, run_pipeline
from jaxserve.passes.printer import print_graph
from jaxserve.passes.recipes import RECIPES, parse_spec
from jaxserve.text import load_tokenizer
from tests.passes.helpers import tiny

VOCAB = 300


def random_head(known=64, width=128, mlp=64, vocab=VOCAB, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {path: spec.shape for path, spec in param_specs(LookAhead(known, width, mlp)).items()}
    params = {path: _weights(rng, path, shape) for path, shape in shapes.items()}
    return Head(params, np.sort(rng.choice(vocab, known, replace=False)).astype(np.int32))


def _weights(rng, path, shape):
    """Of 16 values, so that 4 bits hold them: the least and the greatest are in each group of 64 inputs."""
    if len(shape) == 1:
        return (0.2 * rng.normal(size=shape)).astype(np.float32)
    codes = rng.integers(0, 16, shape)
    inputs = codes.T if path.endswith("embedding") else codes
    inputs[::64], inputs[1::64] = 0, 15
    return ((codes - 7.5) / 24).astype(np.float32)


WIDTHS = [(128, 4), (96, 8)]  # and the bits that weights of heads as wide get: no groups of 64 fit into 96


@pytest.mark.parametrize("activations", ["f32", "bf16"])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("width", [width for width, _ in WIDTHS])
def test_the_rewritten_head_says_what_its_module_says(activations, count, width):
    head, rng = random_head(width=width), np.random.default_rng(1)
    hidden = jnp.asarray(rng.normal(size=(count, width)), jnp.float32)
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
    # Activations of few bits: the likeliest, or one that is nearly as likely.
    assert (p[np.arange(count), named] > 0.8 * p.max(axis=1)).all()
    assert p.max() < 0.9, "or a rate of 1 would do"
    np.testing.assert_allclose(rate, p.max(axis=1), rtol=0.2, atol=0.02)


@pytest.mark.parametrize(("width", "bits"), WIDTHS)
def test_all_weights_of_a_head_are_codes(width, bits):
    """What is not would be read in 16 or 32 bits for every token."""
    text = print_graph(rewrite_head(random_head(width=width), 2, VOCAB, "bf16", "cpu").graph)
    assert text.count(f"format=int{bits} ") == 5
    assert text.count("jaxserve.quantized_matmul") == 4 and "jaxserve.quantized_take" in text
    assert "jaxserve.dense_matmul" not in text and "dot_general" not in text


def test_heads_are_rewritten_for_gpus_too():
    text = print_graph(rewrite_head(random_head(), 2, VOCAB, "bf16", "cuda").graph)
    assert text.count("jaxserve.quantized_matmul") == 4 and "panels" not in text


def test_a_tied_rate_names_the_first():
    head = random_head()
    zero = dataclasses.replace(head, params={path: np.zeros_like(value) for path, value in head.params.items()})
    result = rewrite_head(zero, 3, VOCAB, "f32", "cpu")
    params = {path: jnp.asarray(value) for path, value in head_arrays(zero, VOCAB, result)}
    token, rate = head_function(result.graph)(params, jnp.ones((3, 128)), jnp.zeros(3, jnp.int32))
    np.testing.assert_array_equal(token, [head.tokens[0]] * 3)
    np.testing.assert_allclose(rate, [1 / 64] * 3, rtol=1e-6)


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_recipe_changes_what_a_head_reads(recipe):
    """Scales that are folded into the last norm would be the head's to know."""
    for tied in (False, True):
        graph = trace_model(tiny(tied=tied), 4, 2, {}, hidden=True)
        rules = ".*=w8a8" if RECIPES[recipe].scheme == "w8a8" else ""
        result = run_pipeline(graph, for_platform(parse_spec(RECIPES[recipe].spec(rules=rules)), "cpu"), Context())
        assert [output.name for output in result.graph.outputs if not output.replaces] == ["logits", "hidden"]
        [hidden] = [out for out in result.graph.outputs if out.name == "hidden"]
        assert (hidden.aval.shape, hidden.aval.dtype) == ((2, 16), jnp.float32)
        assert not any("norm/scale" in edit.writes for edit in result.edits)


def test_what_is_no_head_of_the_model_is_refused(tmp_path, shared):
    checkpoint = resolve(str(shared / "fixtures" / "stories260K"))
    checkpoint.write_tokenizer(tmp_path)
    tokenizer, width = load_tokenizer(tmp_path), checkpoint.config.width
    with pytest.raises(UserError, match="it holds no"):
        load_head(tmp_path, width, 512, tokenizer)
    random_head(width=width).save(tmp_path / LOOK_AHEAD)
    assert load_head(tmp_path, width, 512, tokenizer).tokens.size == 64
    with pytest.raises(UserError, match=f"of a model whose width is not {width + 8}"):
        load_head(tmp_path, width + 8, 512, tokenizer)
    with pytest.raises(UserError, match="of a model with more than 100 tokens"):
        load_head(tmp_path, width, 100, tokenizer)
    other = tmp_path / "other"
    other.mkdir()
    resolve("smollm2-135m-instruct").write_tokenizer(other)
    shutil.copy(tmp_path / LOOK_AHEAD, other)
    with pytest.raises(
        UserError, match=r"--look-ahead .*: it has another tokenizer than the target: it knows 49152 tokens"
    ):
        load_head(other, width, 512, tokenizer)
