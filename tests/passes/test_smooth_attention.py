"""smooth-attention: keys and queries keep their products, through rotary pairs, groups and head norms."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import UserError
from jaxserve.pallas_kernels import RopeSpec
from jaxserve.passes.graph import Graph
from jaxserve.passes.recipes import parse_spec
from tests.passes import scale_cases
from tests.passes.helpers import make_graph, pipeline, random_values, report_of, trace_tiny

DENSE = "canonicalize,lower-dense-matmul"
ATTN = "layers_0/self_attn"
Q, K = f"{ATTN}/q_proj/kernel", f"{ATTN}/k_proj/kernel"
GROUPED: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 8, "width": 32}


def smoothed(graph: Graph, text: str) -> tuple[dict, dict, np.ndarray]:
    """Parameters before and after, and max|k| [K, H] over the tokens of the run that calibrated it."""
    values = random_values(graph)
    lowered, values, _ = scale_cases.fold(graph, values, DENSE)
    (step,) = parse_spec(text)
    result = pipeline(lowered, text).stages[0].result
    (absmax,) = scale_cases.measured(lowered, result, values).values()
    _, after, _ = scale_cases.fold(lowered, values, str(step))
    return values, after, absmax


def row_ratio(after: dict, before: dict, path: str, heads: int) -> np.ndarray:
    """What the rows of a weight were multiplied by, [heads, H]."""
    ratio = after[path] / before[path]
    np.testing.assert_allclose(ratio, np.broadcast_to(ratio[:, :1], ratio.shape), rtol=1e-5)
    return ratio[:, 0].reshape(heads, -1)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_keys_shrink_by_the_papers_scale_and_queries_grow(alpha):
    before, after, absmax = smoothed(trace_tiny(**GROUPED), f"smooth-attention{{alpha={alpha}}}")
    pairs = np.maximum(absmax[:, :4], absmax[:, 4:]) ** alpha  # channel i turns with i + H/2
    want = np.concatenate([pairs, pairs], axis=1)
    np.testing.assert_allclose(row_ratio(after, before, K, 2), 1 / want, rtol=1e-5)
    np.testing.assert_allclose(row_ratio(after, before, Q, 4), np.repeat(want, 2, axis=0), rtol=1e-5)
    assert np.ptp(want) > 0.1
    changed = {path for path in before if not np.array_equal(before[path], after[path])}
    assert changed == {Q, K}


@pytest.mark.parametrize(
    "spec", [RopeSpec(8, 1e4, interleaved=True), RopeSpec(4, 1e4), RopeSpec(4, 1e4, interleaved=True)]
)
def test_interleaved_and_partial_rotations(spec):
    before, after, absmax = smoothed(trace_tiny(**GROUPED, rope=spec), "smooth-attention{alpha=1}")
    turned = absmax[:, : spec.dim]
    if spec.interleaved:
        paired = np.repeat(turned.reshape(2, -1, 2).max(axis=2), 2, axis=1)
    else:
        paired = np.tile(turned.reshape(2, 2, -1).max(axis=1), (1, 2))
    want = np.concatenate([paired, absmax[:, spec.dim :]], axis=1)
    np.testing.assert_allclose(row_ratio(after, before, K, 2), 1 / want, rtol=1e-5)


def test_keys_become_equally_loud():
    """With alpha = 1 every pair's loudest key is 1; with 0 nothing changes."""
    graph = trace_tiny(**GROUPED, qkv_bias=True)
    lowered, values, _ = scale_cases.fold(graph, random_values(graph), DENSE)
    step = "smooth-attention{alpha=1}"
    result = pipeline(lowered, step).stages[0].result
    _, after, _ = scale_cases.fold(lowered, values, step)
    (absmax,) = scale_cases.measured(lowered, result, after).values()
    np.testing.assert_allclose(np.maximum(absmax[:, :4], absmax[:, 4:]), 1, rtol=1e-4)
    _, same, _ = scale_cases.fold(lowered, values, "smooth-attention{alpha=0}")
    assert all(np.array_equal(same[path], values[path]) for path in values)


def test_head_norms_take_one_scale_for_all_heads():
    before, after, absmax = smoothed(trace_tiny(**GROUPED, qk_norm=True), "smooth-attention")
    loudest = absmax.max(axis=0)
    want = np.tile(np.sqrt(np.maximum(loudest[:4], loudest[4:])), 2)
    np.testing.assert_allclose(before[f"{ATTN}/k_norm/scale"] / after[f"{ATTN}/k_norm/scale"], want, rtol=1e-5)
    np.testing.assert_allclose(after[f"{ATTN}/q_norm/scale"] / before[f"{ATTN}/q_norm/scale"], want, rtol=1e-5)
    assert np.array_equal(before[K], after[K])


def norm_on_one_side(side: str) -> Graph:
    """A head norm for the keys or the queries alone."""

    def function(v):
        q, k, w = (
            scale_cases.heads(scale_cases.linear(v, v["x"], name), n) for name, n in (("q", 4), ("k", 2), ("v", 2))
        )
        q, k = (scale_cases.norm(v, y) if name == side else y for name, y in (("q", q), ("k", k)))
        q, k = (scale_cases.rope(y, v["positions"], spec=scale_cases.ROPE) for y in (q, k))
        return scale_cases.attend(v, q, k, w)

    shapes = (
        scale_cases.scales("norm", size=8) | scale_cases.kernels(32, 16, "q") | scale_cases.kernels(16, 16, "k", "v")
    )
    return make_graph(function, shapes, scale_cases.STEP)


@pytest.mark.parametrize("side", ["q", "k"])
def test_a_norm_on_one_side_makes_the_other_side_share(side):
    results = scale_cases.assert_same_numbers(norm_on_one_side(side), "smooth-attention")
    assert results[-1].matches == 1


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    "order", ["smooth-attention,fuse-qkv", "fuse-qkv,smooth-attention", "fuse-qkv,fold-scales,smooth-attention"]
)
def test_the_model_stays_the_same(order, norms, bias):
    graph = trace_tiny(**GROUPED, qkv_bias=bias, qk_norm=norms, windows=(3,))
    results = scale_cases.assert_same_numbers(graph, f"{DENSE},{order}")
    assert results[-1].matches == 1


@pytest.mark.parametrize(
    "reason",
    [
        "the result of k is also read by attention at attn",  # twice: for both attentions that share these keys
        "its keys: its input comes through tanh at ",
        "the result of v also goes through attention at attn, which combines two scaled activations",
        "its queries: its input is made of x, which takes no scale",
        "the result of k2 also goes through attention at attn, which combines two scaled activations",
    ],
)
def test_reasons(reason):
    lines = report_of(
        pipeline(scale_cases.attentions_that_share(), "smooth-attention", numbers=False), "smooth-attention"
    )
    assert sum(reason in line for line in lines) == (2 if "also read by" in reason else 1), lines
    assert len(lines) == 6 and all("no match" in line for line in lines)


def test_without_attention():
    result = pipeline(scale_cases.relu_mlp(), "smooth-attention")
    assert report_of(result, "smooth-attention") == ["graph: no match, there is no attention op"]


def test_keys_that_are_never_active_or_not_finite():
    graph = trace_tiny(**GROUPED)
    values = random_values(graph)
    values[K][8:] = 0
    _, after, _ = scale_cases.fold(graph, values, f"{DENSE},smooth-attention", numbers=False)
    assert np.array_equal(after[Q].reshape(4, 8, -1)[2:], values[Q].reshape(4, 8, -1)[2:])
    values[K][0] = np.inf
    with pytest.raises(UserError, match=r"k_proj/kernel: its keys hold infinities or NaN"):
        scale_cases.fold(graph, values, f"{DENSE},smooth-attention", numbers=False)


@pytest.mark.parametrize("alpha", ["-0.1", "1.5", "nan"])
def test_bad_alpha(alpha):
    with pytest.raises(UserError, match=r"alpha=.* is not in \[0, 1\]"):
        parse_spec(f"smooth-attention{{alpha={alpha}}}")


def test_the_text_form_parses_back():
    (step,) = parse_spec("smooth-attention{alpha=0.75}")
    assert parse_spec(str(step)) == (step,) and dataclasses.astuple(step) == (0.75,)
