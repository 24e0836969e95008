"""Statistics over streamed batches, against numpy on the whole."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.passes.statistics import StatisticKind, add, compute, finish, is_statistic, start, statistic_path

X = np.random.default_rng(0).normal(size=(12, 3, 2)).astype(np.float32)
FLAT = X.reshape(12, 6)
WANT: dict[StatisticKind, np.ndarray] = {
    "absmax": np.abs(X).max(0),
    "absmean": np.abs(X).mean(0),
    "square": (X**2).mean(0),
    "range": np.array([X.min(), X.max()]),
}


@pytest.mark.parametrize("kind", WANT)
def test_in_batches_and_at_once(kind):
    total = start(kind, X[:5].shape)
    for batch in (X[:5], X[5:6], X[6:]):
        total = add(kind, total, jnp.asarray(batch))
    found = finish(kind, total, 12)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, WANT[kind], rtol=1e-6)
    np.testing.assert_allclose(compute(kind, X), WANT[kind], rtol=1e-6)


def test_gram_gives_the_error_of_a_changed_weight():
    """trace(E G E^T) is the mean over tokens of ||x E^T||^2."""
    gram = compute("gram", FLAT)
    np.testing.assert_allclose(gram, FLAT.T @ FLAT / 12, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.diag(gram), compute("square", FLAT), rtol=1e-6)
    change = np.random.default_rng(1).normal(size=(4, 6)).astype(np.float32)
    np.testing.assert_allclose(
        np.trace(change @ gram @ change.T), np.mean(np.sum((FLAT @ change.T) ** 2, 1)), rtol=1e-5
    )


def test_narrow_activations_are_summed_in_float32():
    ones = jnp.full((1000, 1), 1.0, jnp.bfloat16)
    assert compute("square", ones) == 1.0  # a sum in bf16 would stop at 256
    assert compute("gram", ones) == 1.0


def test_a_range_of_one_sign():
    np.testing.assert_array_equal(compute("range", np.full((2, 2), 3, np.float32)), [3, 3])


def test_paths():
    assert statistic_path("gram", "layers_0/w") == "stats/gram/layers_0/w"
    assert is_statistic("stats/gram/layers_0/w") and not is_statistic("layers_0/w")
