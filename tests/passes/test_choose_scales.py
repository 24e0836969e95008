"""The formulas of SmoothQuant and AWQ on the papers' numbers, and the search for their exponent."""

import numpy as np
import pytest

from jaxserve.errors import UserError
from jaxserve.pallas_kernels import QuantFormat, quantize_rtn
from jaxserve.passes import statistics
from jaxserve.passes.choose_scales import ROWS, STEPS, Chooser, Method, Reader, expected_peak
from jaxserve.passes.rules import Scheme, parse_scheme
from jaxserve.passes.statistics import StatisticKind

INT4 = QuantFormat(4, None, "none", "float32")


def reader(x, weight, labels=None, path="w") -> Reader:
    """A matmul with weight [O, I] that reads x [T, I]."""
    x, weight = np.asarray(x, np.float32), np.asarray(weight, np.float32)
    kinds: tuple[StatisticKind, ...] = ("absmax", "absmean", "gram")
    found: dict[StatisticKind, np.ndarray] = {kind: statistics.compute(kind, x) for kind in kinds}
    return Reader(path, weight, np.arange(x.shape[1]) if labels is None else np.asarray(labels), found)


def choose(
    method: Method, alpha: float | None, *readers: Reader, channels: int = 0, scheme: str = "w4a16:g32"
) -> np.ndarray:
    return Chooser(method, alpha, parse_scheme(scheme))(readers, channels or readers[0].weight.shape[1])


# Figure 5 of the SmoothQuant paper: X [T, C_i] and W [C_i, C_o].
PAPER_X = np.array([[1, -16, 2, 6], [-2, 8, -1, -9]], np.float32)
PAPER_W = np.array([[2, 1, -2], [1, -1, -1], [2, -1, -2], [-1, -1, 1]], np.float32)


def test_smoothquant_of_the_paper():
    scales = choose("smoothquant", 0.5, reader(PAPER_X, PAPER_W.T))
    np.testing.assert_allclose(scales, [1, 4, 1, 3], rtol=1e-6)
    np.testing.assert_allclose(PAPER_X / scales, [[1, -4, 2, 2], [-2, 2, -1, -3]], rtol=1e-6)
    np.testing.assert_allclose(PAPER_W.T * scales, [[2, 4, 2, -3], [1, -4, -1, -3], [-2, -4, -2, 3]], rtol=1e-6)


def test_formulas_by_hand():
    x = [[1, 8, -2], [-3, 0, 2]]  # max 3 8 2, mean 2 4 2
    one = reader(x, [[1, -2, 4], [-3, 0, 2]])  # max 3 2 4, mean 2 1 3
    np.testing.assert_allclose(choose("smoothquant", 1.0, one), [3, 8, 2], rtol=1e-6)
    np.testing.assert_allclose(choose("smoothquant", 0.0, one), [1 / 3, 1 / 2, 1 / 4], rtol=1e-6)
    np.testing.assert_allclose(
        choose("smoothquant", 0.25, one), np.array([3, 8, 2]) ** 0.25 / np.array([3, 2, 4]) ** 0.75
    )
    # AWQ: x^a = 2 4 2 with a = 1, in the middle of the range: divided by sqrt(2 x 4).
    np.testing.assert_allclose(choose("awq", 1.0, one), np.array([2, 4, 2]) / 8**0.5, rtol=1e-6)
    np.testing.assert_allclose(choose("awq", 0.0, one), [1, 1, 1])
    duo = np.sqrt(np.array([2, 4, 2]) / np.array([2, 1, 3]))
    np.testing.assert_allclose(choose("awq-duo", 0.5, one), duo / np.sqrt(duo.max() * duo.min()), rtol=1e-6)


def test_everything_that_shares_a_scale_has_a_say():
    """Two readers of one activation, one of which reads each channel twice, as query heads of a group do."""
    first = reader([[1, 6]], [[2, 1]], path="a")
    second = reader([[4, 1, 3, 5]], [[1, 8, 1, 1], [0, 0, 3, 0]], [0, 1, 0, -1], path="b")
    # maxima: x 4 and 6, w 3 and 8; channel -1 is in neither.
    np.testing.assert_allclose(choose("smoothquant", 0.5, first, second, channels=2), [(4 / 3) ** 0.5, (6 / 8) ** 0.5])
    # means, in which a reader counts once for every output: x (1 + 2 x (4 + 3)) / 5 = 3 and (6 + 2 x 1) / 3 = 8 / 3.
    want = np.array([3, 8 / 3]) / np.sqrt(3 * 8 / 3)
    np.testing.assert_allclose(choose("awq", 1.0, first, second, channels=2), want, rtol=1e-6)


def test_awq_scaling_by_two_halves_the_error_of_a_salient_weight():
    """The worked example: 1.4 becomes 1 in steps of 1; scaled to 2.8 it becomes 3, which is 1.5, and the step stays."""
    weight = np.array([[7.0, 1.4]], np.float32)
    plain = quantize_rtn(weight, INT4)
    scaled = quantize_rtn(weight * [[1.0, 2.0]], INT4)
    assert plain.arrays["scale"] == scaled.arrays["scale"] == 1.0
    np.testing.assert_allclose(plain.dequantize(), [[7, 1]])
    np.testing.assert_allclose(scaled.dequantize() / [1, 2], [[7, 1.5]])
    # On average over many weights below half of the group's maximum the error halves.
    rng = np.random.default_rng(0)
    rows = np.stack([np.full(4000, 7.0), rng.uniform(-3.4, 3.4, 4000)], axis=1).astype(np.float32)
    errors = [
        np.abs(quantize_rtn(rows * s, INT4).dequantize() / s - rows)[:, 1].mean() for s in np.array([[1, 1], [1, 2]])
    ]
    assert errors[1] / errors[0] == pytest.approx(0.5, abs=0.02)


@pytest.fixture
def outliers() -> Reader:
    """300 tokens with two loud channels of 64."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 64))
    x[:, [5, 40]] *= [30, 80]
    return reader(x, rng.normal(size=(48, 64)))


def actual_error(one: Reader, x: np.ndarray, scales: np.ndarray, scheme: Scheme) -> float:
    """Mean squared error of quantized outputs, by doing it."""
    assert scheme.format is not None
    weight = quantize_rtn(one.weight * scales, scheme.format).dequantize()
    y, scaled = x @ one.weight.T, x / scales
    if scheme.activation:
        step = np.abs(scaled).max(axis=None if "static" in scheme.activation else 1, keepdims=True) / 127
        scaled = np.round(scaled / step) * step
    return float(np.square(scaled @ weight.T - y).sum(1).mean())


@pytest.mark.parametrize("text", ["w4a16:g32", "w3a16:g32:sym", "w8a16"])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_expected_error_of_weights_is_the_error(outliers, text, alpha):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 64))
    x[:, [5, 40]] *= [30, 80]
    scheme = parse_scheme(text)
    scales = choose("awq", alpha, outliers)
    expected = Chooser("awq", None, scheme).expected_error(outliers, scales)
    assert expected == pytest.approx(actual_error(outliers, x.astype(np.float32), scales, scheme), rel=1e-3)


@pytest.mark.parametrize("text", ["w8a8", "w8a8:static", "w4a8:g32"])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8])
def test_expected_error_of_activations_is_near_the_error(outliers, text, alpha):
    """A model of rounding, not a simulation: within a factor of two, where the errors themselves span a hundred."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 64))
    x[:, [5, 40]] *= [30, 80]
    scheme = parse_scheme(text)
    scales = choose("smoothquant", alpha, outliers)
    expected = Chooser("smoothquant", None, scheme).expected_error(outliers, scales)
    assert 0.5 < expected / actual_error(outliers, x.astype(np.float32), scales, scheme) < 2


def test_expected_peak():
    """One channel, many alike, and one that is louder than the others, against drawing them."""
    rng = np.random.default_rng(0)
    for deviations in (np.array([3.0]), np.ones(200), np.append(np.ones(100), 4.0), np.array([0.0, 1.0])):
        drawn = np.square(rng.normal(size=(20000, len(deviations))) * deviations).max(axis=1).mean()
        assert expected_peak(deviations**2) == pytest.approx(drawn, rel=0.05)
    assert expected_peak(np.zeros(3)) < 1e-20


@pytest.mark.parametrize("method", ["smoothquant", "awq", "awq-duo"])
@pytest.mark.parametrize("text", ["w4a16:g32", "w8a8", "w8a8:static"])
def test_the_search_takes_the_best_exponent(outliers, method, text):
    chooser = Chooser(method, None, parse_scheme(text))
    found = chooser([outliers], 64)
    tried = [chooser.formula([outliers], 64, step / STEPS) for step in range(STEPS)] + [np.ones(64, np.float32)]
    errors = [chooser.expected_error(outliers, scales) for scales in tried]
    assert chooser.expected_error(outliers, found) == min(errors)
    assert min(errors) < 0.5 * errors[-1]  # than without scales
    assert not np.allclose(found, 1)


def test_where_no_exponent_helps_nothing_is_scaled():
    """Channels alike and weights on their grid: every scale but 1 makes errors."""
    rng = np.random.default_rng(0)
    weight = rng.integers(-7, 8, (24, 32)).astype(np.float32)
    weight[:, 0] = 7
    one = reader(rng.normal(size=(100, 32)), weight)
    np.testing.assert_array_equal(choose("smoothquant", None, one, scheme="w4a16:channel:sym"), np.ones(32))


def test_many_outputs_are_sampled(outliers):
    rng = np.random.default_rng(1)
    tall = Reader("w", rng.normal(size=(6 * ROWS, 64)).astype(np.float32), outliers.labels, outliers.statistics)
    chooser = Chooser("awq", None, parse_scheme("w4a16:g32"))
    scales = chooser.formula([tall], 64, 0.5)
    parts = [
        chooser.expected_error(Reader("w", part, tall.labels, tall.statistics), scales)
        for part in np.split(tall.weight, 6)
    ]
    assert chooser.expected_error(tall, scales) == pytest.approx(sum(parts), rel=0.05)


@pytest.mark.parametrize("method", ["smoothquant", "awq", "awq-duo"])
@pytest.mark.parametrize("alpha", [0.0, 0.5, None])
def test_channels_without_activity_or_weight_stay(method, alpha):
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(50, 32)) * np.linspace(1, 30, 32), rng.normal(size=(8, 32))
    x[:, 3], weight[:, 7] = 0, 0
    x[:, 9] = 1e-30
    scales = choose(method, alpha, reader(x, weight))
    assert scales.dtype == np.float32 and np.isfinite(scales).all() and (scales > 0).all()
    assert scales[3] == 1
    assert method == "awq" or scales[7] == 1
    dead = choose(method, alpha, reader(np.zeros((50, 32)), weight))
    np.testing.assert_array_equal(dead, np.ones(32))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused(bad):
    x = np.ones((4, 32))
    x[0, 3] = bad
    with pytest.raises(UserError, match="layer/w: what it multiplies is not finite on the calibration text"):
        choose("smoothquant", 0.5, reader(x, np.ones((8, 32)), path="layer/w"))
    weight = np.ones((8, 32))
    weight[0, 0] = bad
    with pytest.raises(UserError, match="layer/w: its weights hold infinities or NaN"):
        choose("awq", 0.5, reader(np.ones((4, 32)), weight, path="layer/w"))


def test_scales_that_a_format_cannot_hold_are_not_chosen():
    """Weights near float16's largest number, and exponents that push some over it."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(8, 32)) * 1.5e4
    x = rng.normal(size=(50, 32))
    x[:, 4] *= 100
    one = reader(x, weight)
    chooser = Chooser("awq", None, parse_scheme("w4a16:g32"))
    assert chooser.expected_error(one, chooser.formula([one], 32, 0.95)) == np.inf
    assert np.isfinite(chooser.expected_error(one, chooser([one], 32)))


@pytest.mark.parametrize(
    ("method", "alpha", "text", "kinds"),
    [
        ("smoothquant", 0.5, "w8a8", ("absmax",)),
        ("smoothquant", None, "w8a8", ("absmax", "gram")),
        ("awq", None, "w8a8:static", ("absmean", "gram", "absmax")),
        ("smoothquant", None, "w8a16", ("absmax", "gram")),
        ("awq", 0.5, "w4a16", ("absmean",)),
        ("awq", None, "w4a16", ("absmean", "gram")),
        ("awq-duo", None, "fp8", ("absmean", "gram")),
    ],
)
def test_statistics_are_those_that_are_needed(method, alpha, text, kinds):
    assert Chooser(method, alpha, parse_scheme(text)).kinds == kinds
