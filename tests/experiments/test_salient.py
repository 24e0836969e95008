"""Which channels are salient, and what is done to them."""

import json
import math

import numpy as np
import pytest

from jaxserve.errors import UserError
from jaxserve.experiments import alpha_sweep, salient
from jaxserve.experiments.salient import RoundWithSalient, parse_scales, variants
from jaxserve.pallas_kernels import quantize_rtn
from jaxserve.passes.pipeline import Context
from jaxserve.passes.recipes import parse_spec
from jaxserve.passes.rules import parse_scheme
from jaxserve.passes.weights import dense
from tests.passes.helpers import trace_tiny

SCHEME = "w4a16:g32"


@pytest.fixture
def weight() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(8, 64)).astype("float32")


@pytest.fixture
def absmean() -> np.ndarray:
    return np.random.default_rng(1).permutation(64).astype("float32")


def rounded(weight: np.ndarray, absmean: np.ndarray, **options) -> np.ndarray:
    """What the pass makes of a weight."""
    graph = trace_tiny()
    for step in (*parse_spec("canonicalize,lower-dense-matmul"), RoundWithSalient(SCHEME, **options)):
        result = step.run(graph, Context())
        graph = result.graph
    assert [statistic.kind for statistic in result.statistics] == ["absmean"] * 7
    (value,) = result.edits[0].function(weight, absmean)
    return dense(value)


def plain(weight: np.ndarray) -> np.ndarray:
    form = parse_scheme(SCHEME).format
    assert form is not None
    return quantize_rtn(weight, form).dequantize()


def test_which_channels_are_salient(weight, absmean):
    weight[:, 7] *= 100
    chosen = salient.salient(weight, absmean, "activation", 0.05, "path")
    assert sorted(absmean[chosen]) == [61, 62, 63]  # round(0.05 * 64) of them, the loudest
    assert list(np.flatnonzero(salient.salient(weight, absmean, "weight", 0.01, "path"))) == [7]  # at least one
    once, again, other = (salient.salient(weight, absmean, "random", 0.05, seed) for seed in "aab")
    assert once.sum() == 3 and (once == again).all() and (once != other).any()
    assert not salient.salient(weight, absmean, "activation", 0, "path").any()
    assert salient.salient(weight, absmean, "random", 1, "path").all()


def test_kept_channels_stay_and_the_others_are_rounded(weight, absmean):
    value = rounded(weight, absmean, fraction=0.05)
    kept = absmean >= 61
    np.testing.assert_array_equal(value[:, kept], weight[:, kept])
    np.testing.assert_array_equal(value[:, ~kept], plain(weight)[:, ~kept])


def test_scaled_channels_are_rounded_finer(weight, absmean):
    """Multiplied by 2 before rounding and divided afterwards: their step is about half where the range allows."""
    value = rounded(weight, absmean, fraction=0.05, scale=2.0)
    loud = absmean >= 61
    scaled = plain(weight * np.where(loud, 2, 1)) / np.where(loud, 2, 1)
    np.testing.assert_allclose(value, scaled, rtol=1e-6)
    before, after = (np.abs(w - weight)[:, loud].mean() for w in (plain(weight), value))
    assert after < 0.85 * before
    np.testing.assert_array_equal(rounded(weight, absmean, fraction=0.0, scale=1.0), plain(weight))


def test_the_papers_example_of_scaling():
    """Section 3.2: the error of a weight that is scaled by s before rounding is 1/s times as large in expectation."""
    rng = np.random.default_rng(0)
    weight = rng.uniform(-1, 1, size=(4000, 32)).astype("float32")
    weight[:, 0] *= 0.4  # scaled by 2 it still does not reach the group's largest weight
    absmean = np.zeros(32, "float32")
    absmean[0] = 1
    errors = [np.abs(rounded(weight, absmean, fraction=0.01, scale=s) - weight)[:, 0].mean() for s in (1.0, 2.0)]
    assert errors[1] / errors[0] == pytest.approx(0.5, rel=0.05)


def test_variants_are_told_apart():
    found = variants(SCHEME, 0.01, [1.5, 2.0])
    assert list(found) == [
        "f32", SCHEME, "kept 0.01 by activation", "kept 0.01 by weight", "kept 0.01 by random", "scaled 0.01 by 1.5",
        "scaled 0.01 by 2",
    ]  # fmt: skip
    assert found["f32"] is None and len(set(map(str, found.values()))) == 7


def test_the_command(parse, tmp_path, capsys, monkeypatch):
    """Three of the variants, with every channel salient."""
    names = ("f32", SCHEME, "kept 1 by random")
    monkeypatch.setattr(salient, "variants", lambda *given: {name: variants(*given)[name] for name in names})
    file = tmp_path / "salient.json"
    salient.run(parse(scheme=SCHEME, fraction=1.0, windows=1, activations="f32", json=file))
    found = {row["name"]: row["perplexity"] for row in json.loads(file.read_text())["rows"]}
    assert tuple(found) == names and all(math.isfinite(value) for value in found.values())
    assert found["kept 1 by random"] == pytest.approx(found["f32"], rel=1e-6)  # all channels kept
    assert found[SCHEME] != found["f32"]
    assert "kept 1 by random" in capsys.readouterr().out


SWEPT = (
    "canonicalize,lower-dense-matmul,fold-scales{alpha=0.1},fuse-qkv,fuse-gate-up,quantize-matmul{rules='layers_=w8a8'},"
    "insert-paged-kv{page=128,kv=f32}"
)


def test_alpha_sweep(parse, tmp_path):
    file, plot = tmp_path / "sweep.json", tmp_path / "sweep.svg"
    alpha_sweep.run(parse(pipeline=SWEPT, alphas=["0.5", "0.8"], windows=1, json=file, plot=plot))
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows] == ["none", "0.5", "0.8"]
    assert "fold-scales" not in rows[0]["spec"] and "alpha=0.8" in rows[2]["spec"]
    assert len({row["perplexity"] for row in rows}) == 3
    assert plot.read_text().count("<circle") == 4


def test_bad_sweeps():
    with pytest.raises(UserError, match="there is no fold-scales in it: canonicalize"):
        alpha_sweep.with_alpha(parse_spec("canonicalize"), "0.5")
    with pytest.raises(UserError, match="allowed: auto, or a number from 0 to 1"):
        alpha_sweep.with_alpha(parse_spec(SWEPT), "two")


@pytest.mark.parametrize("texts", [["2", "x"], ["0"], ["-1"], ["nan"], ["inf"]])
def test_scales_that_will_not_do(texts):
    with pytest.raises(UserError, match=r"--scales .*: must be positive numbers"):
        parse_scales(texts)
