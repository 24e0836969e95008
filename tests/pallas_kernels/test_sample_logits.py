import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import sample_logits
from jaxserve.pallas_kernels.sample_logits.op import OP
from jaxserve.pallas_kernels.sample_logits.reference import exponential_noise, keep_filtered
from tests.pallas_kernels import oracles
from tests.pallas_kernels.harness import F32, compute, native_implementations, normal

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
FILTERS = [
    dict(top_k=1),
    dict(top_k=2),
    dict(top_k=17),
    dict(top_k=999),
    dict(top_k=1000),
    dict(top_k=5000),
    dict(top_p=0.1),
    dict(top_p=0.5),
    dict(top_p=0.9),
    dict(top_p=0.999),
    dict(top_p=1e-9),
    dict(min_p=0.05),
    dict(min_p=1.0),
    dict(top_k=40, top_p=0.8),
    dict(top_p=0.95, min_p=0.02),
    dict(top_k=100, top_p=0.9, min_p=0.01),
    dict(),
]


def columns(rows, **options):
    """temperature, top_k, top_p and min_p of some rows, each one value for all of them or a list."""
    dtypes = (np.float32, np.int32, np.float32, np.float32)
    values = [options.get(name, off) for name, off in OFF.items()]
    return tuple(np.broadcast_to(np.array(each, dtype), rows) for each, dtype in zip(values, dtypes, strict=True))


def random_keys(rows, seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, (rows, 2), np.uint32)


def sample(implementation, logits, vocab=None, keys=None, positions=None, **options):
    """Tokens and finite; each row has a key and a position of its own if none are given."""
    rows = len(logits)
    keys = random_keys(rows) if keys is None else keys
    positions = np.arange(rows, dtype=np.int32) if positions is None else positions
    operands = (logits, keys, positions, *columns(rows, **options))
    tokens, finite = compute(
        implementation, sample_logits, *operands, vocab=logits.shape[1] if vocab is None else vocab
    )
    return tokens.astype(int), finite.astype(bool)


def rows_of(row, count):
    return np.repeat(np.array([row], F32), count, 0)


@native_implementations
class TestSampleLogits:
    # Tails of a vector and of a group of them, more and less than one; the sample model's.
    @pytest.mark.parametrize("vocab", [1, 7, 16, 40, 1000, 1024, 5003])
    def test_tokens_are_those_of_the_definition(self, implementation, vocab):
        rows, rng = 8 * len(FILTERS), np.random.default_rng(vocab)
        spread = rng.choice(np.array([0.01, 1, 3, 10], F32), (rows, 1))
        logits, keys = spread * normal(vocab, rows, vocab), random_keys(rows, vocab)
        positions = rng.integers(0, 1 << 20, rows).astype(np.int32)
        options = {name: [row.get(name, off) for row in FILTERS * 8] for name, off in OFF.items()}
        options["temperature"] = rng.choice([0.0, 0.3, 1.0, 5.0], rows).tolist()
        found, _ = sample(implementation, logits, keys=keys, positions=positions, **options)
        words = jax.vmap(jax.random.fold_in)(
            jax.random.wrap_key_data(jnp.asarray(keys), impl="threefry2x32"), positions
        )
        for s, folded in enumerate(np.asarray(jax.random.key_data(words))):
            own = [each[s].item() for each in columns(rows, **options)]
            assert found[s] == oracles.sample_logits(logits[s], folded, *own), own

    @pytest.mark.parametrize("option", [dict(top_k=3), dict(top_p=0.5), dict(min_p=0.5)], ids=str)
    def test_ties_at_the_threshold_are_all_kept(self, implementation, option):
        """Five equal ones, of which a sort would have to drop two: all of them are drawn, and nothing else is."""
        row = [4, 0.0, -3] + [4, 2, -0.0, -3] * 4
        tokens, _ = sample(implementation, rows_of(row, 512), **option)
        assert set(tokens) == {i for i, logit in enumerate(row) if logit == 4}

    def test_zeros_of_both_signs_are_equal(self, implementation):
        """A tie at the tenth largest."""
        row = [4, 0.0, -3] + [4, 2, -0.0, -3] * 4
        tokens, _ = sample(implementation, rows_of(row, 2048), top_k=10, temperature=2.0)
        assert set(tokens) == {i for i, logit in enumerate(row) if logit >= 0}

    @pytest.mark.parametrize("top_p", [0.3, 0.999])
    @pytest.mark.parametrize("vocab", [20, 3000])
    def test_equal_logits_are_all_kept(self, implementation, vocab, top_p):
        """Also those that are many and each of little mass; the first of equal ones where greedy."""
        tokens, _ = sample(implementation, np.full((2048, vocab), -7.5, F32), top_p=top_p)
        assert len(set(tokens)) > (vocab - 1 if vocab < 2048 else vocab // 3)
        assert sample(implementation, np.full((2, vocab), -7.5, F32), temperature=0)[0].tolist() == [0, 0]

    def test_thresholds_among_many_levels(self, implementation):
        """The mass of top_p lies in few tokens, in some hundreds and in thousands; top_k within and past the groups."""
        vocab, rows = 4999, 256
        row = normal(3, vocab)
        spreads, nuclei = (8.0, 2.0, 0.1, 8.0, 0.1), (0.9, 0.8, 0.4, 0.9999999, 0.9999999)
        logits = np.repeat(np.outer(spreads, row).astype(F32), rows, 0)
        tokens, _ = sample(implementation, logits, top_p=np.repeat(nuclei, rows))
        for spread, top_p, drawn in zip(spreads, nuclei, tokens.reshape(-1, rows), strict=True):
            kept, _ = oracles.kept_tokens(F32.type(spread) * row, 1.0, 0, top_p, 0.0)
            assert kept[drawn].all()
        counts = (2, 20, 900, 2500, vocab - 1)
        tokens, _ = sample(implementation, rows_of(row, 5 * rows), top_k=np.repeat(counts, rows), temperature=1e4)
        for k, drawn in zip(counts, tokens.reshape(-1, rows), strict=True):
            assert (row[drawn] >= np.sort(row)[-k]).all()
            assert k > 20 or len(set(drawn)) == k

    def test_extreme_options(self, implementation):
        logits = normal(10, 9, 1000) * 3
        best = logits.argmax(1)
        cold = dict(
            temperature=[1e-5, 1e-30, 1, 1, 1, 1e-5, 1, 1, 1e-38],
            top_p=[1, 1, 1e-9, 1, 1, 0.1, -1, 1, 0.5],
            top_k=[0, 0, 0, 1, 2**31 - 1, 0, 0, 0, 7],
            min_p=[0, 0, 0, 0, 1, 0, 0, 1, 0],
        )
        for scale in (1, 1e30):
            np.testing.assert_array_equal(sample(implementation, logits * F32.type(scale), **cold)[0], best)
        hot, _ = sample(implementation, logits, temperature=3e38, top_p=[1, 0.5, 0.1] * 3, top_k=[0, 500, 0] * 3)
        assert len(set(hot)) > 3 and max(hot) < 1000

    @pytest.mark.parametrize("padding", [np.nan, np.inf, 100.0])
    @pytest.mark.parametrize("vocab", [1000, 1008])
    def test_padding_is_not_read(self, implementation, padding, vocab):
        logits = normal(4, 6, vocab) * 3
        padded = np.pad(logits, ((0, 0), (0, 24)), constant_values=padding)
        options = dict(temperature=[0, 1, 1, 1, 1, 1], top_k=[0, 0, 20, 0, 0, 2], top_p=[1, 1, 1, 0.9, 1, 0.5])
        found = sample(implementation, padded, vocab=vocab, **options)
        expected = sample(implementation, logits, **options)
        np.testing.assert_array_equal(found, expected)
        assert expected[1].all()

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_a_row_that_is_not_finite_harms_no_other(self, implementation, value):
        """Wherever in it the value stands, greedy or not."""
        clean, places = normal(8, 8, 1000), [0, 17, 999]
        options = dict(temperature=[1, 0, 0, 0, 1, 1, 1, 0], top_k=20, top_p=0.9)
        dirty = clean.copy()
        dirty[range(1, 7), places * 2] = value
        expected, all_finite = sample(implementation, clean, **options)
        tokens, finite = sample(implementation, dirty, **options)
        assert all_finite.all() and finite.tolist() == [True] + [False] * 6 + [True]
        assert tokens[[0, 7]].tolist() == expected[[0, 7]].tolist()
        assert tokens.min() >= 0 and tokens.max() < 1000

    def test_minus_infinity_is_never_drawn(self, implementation):
        row = np.where(np.arange(37) % 5 == 3, normal(1, 37), -np.inf)
        filters = dict(top_k=[0, 6, 0, 0, 0], top_p=[1, 1, 0.999, 0.5, 1], temperature=[1, 1, 1, 1, 0])
        options = {name: np.repeat(values, 256) for name, values in filters.items()}
        tokens, finite = sample(implementation, rows_of(row, 5 * 256), **options)
        assert set(tokens % 5) == {3} and not finite.any()

    def test_a_row_has_the_same_token_alone_and_among_others(self, implementation):
        logits, keys, positions = 2 * normal(1, 16, 3001), random_keys(16), np.arange(16, dtype=np.int32)
        options = {name: [(FILTERS * 2)[row].get(name, off) for row in range(16)] for name, off in OFF.items()}
        together, _ = sample(implementation, logits, keys=keys, positions=positions, **options)
        for s in range(0, 16, 3):
            own = {name: values[s] for name, values in options.items()}
            one = slice(s, s + 1)
            alone, _ = sample(implementation, logits[one], keys=keys[one], positions=positions[one], **own)
            assert alone[0] == together[s]


def kept_of(logits, **options):
    temperature, *filters = columns(len(logits), **options)
    scaled = (logits - logits.max(1, keepdims=True)) / temperature[:, None]
    return np.asarray(jax.jit(keep_filtered)(logits, scaled, *filters))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("vocab", [1000, 1024])
def test_filters_keep_what_sorting_would_keep(vocab, temperature):
    logits = 3 * normal(vocab, len(FILTERS), vocab)
    options = {name: [each.get(name, off) for each in FILTERS] for name, off in OFF.items()}
    kept = kept_of(logits, **options | {"temperature": temperature})
    for row, option in enumerate(FILTERS):
        top_k, top_p, min_p = (option.get(name, OFF[name]) for name in ("top_k", "top_p", "min_p"))
        expected, above = oracles.kept_tokens(logits[row], temperature, min(top_k, vocab), top_p, min_p)
        decided = np.abs(above - top_p) > 1e-6
        np.testing.assert_array_equal(kept[row][decided], expected[decided], err_msg=str(option))
        assert kept[row, logits[row].argmax()]


def test_each_filter_is_computed_alone_too():
    """With one row each, the conditionals around the other filters take their other branches."""
    logits = 3 * normal(5, 1, 1000)
    for option in FILTERS:
        top_k, top_p, min_p = (option.get(name, OFF[name]) for name in ("top_k", "top_p", "min_p"))
        expected, above = oracles.kept_tokens(logits[0], 1.0, min(top_k, 1000), top_p, min_p)
        decided = np.abs(above - top_p) > 1e-6
        np.testing.assert_array_equal(kept_of(logits, **option)[0][decided], expected[decided], err_msg=str(option))


def test_noise_is_exponential_and_independent():
    """e^-noise is uniform over ids, and neighbours in ids, positions and keys are uncorrelated."""
    positions = jnp.arange(64)
    keys = jnp.array([[0, 7], [1, 7]], jnp.uint32).repeat(32, axis=0)
    uniform = np.exp(-np.asarray(exponential_noise(keys, positions, 2**14), np.float64))
    assert 0 < uniform.min() < 1e-5 and 1 - 1e-5 < uniform.max() < 1
    counts, _ = np.histogram(uniform, bins=1024, range=(0, 1))
    expected = uniform.size / 1024
    assert abs(((counts - expected) ** 2 / expected).sum() - 1023) < 5 * (2 * 1023) ** 0.5
    centred = uniform - 0.5
    moved = {"id": (0, 1), "two ids": (0, 2), "position": (1, 0), "key": (32, 0)}
    for name, shift in moved.items():
        correlation = (centred * np.roll(centred, shift, (0, 1))).mean() * 12
        assert abs(correlation) < 5 / uniform.size**0.5, name


def _shape(var):
    return getattr(var.aval, "shape", None)


def reference_jaxpr():
    return jax.make_jaxpr(functools.partial(OP.reference, vocab=1000))(
        normal(0, 8, 1000), random_keys(8), np.arange(8, dtype=np.int32), *columns(8)
    )


def test_greedy_steps_skip_the_costly_parts_of_the_reference():
    """Random numbers, loops and exponentials happen in the conditional only."""
    closed = reference_jaxpr()
    outer = {eqn.primitive.name for eqn in closed.eqns if (8, 1000) in [_shape(v) for v in eqn.invars]}
    assert "cond" in outer and outer <= {"cond", "slice", "is_finite", "reduce_and", "jit"}
    assert "random_fold_in" in str(closed) and "scan[" in str(closed)


def test_nothing_sorts_the_vocabulary():
    assert "sort" not in str(reference_jaxpr()) and "top_k[" not in str(reference_jaxpr())


@pytest.mark.parametrize("vocab", [0, 17])
def test_a_vocabulary_that_is_not_there_is_refused(vocab):
    with pytest.raises(TypeError, match=f"vocab is {vocab}, expected 1 to 16, the columns of logits"):
        sample_logits(normal(0, 2, 16), random_keys(2), np.arange(2, dtype=np.int32), *columns(2), vocab=vocab)
