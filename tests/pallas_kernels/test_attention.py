import numpy as np
import pytest

from jaxserve.pallas_kernels import attention
from tests.pallas_kernels import oracles
from tests.pallas_kernels.harness import F32, assert_close, compute, dtypes, implementations, normal, wide


def inputs(tokens, heads, kv_heads, dtype, head_dim=16):
    q = normal(0, tokens, heads, head_dim, dtype=dtype)
    k, v = (normal(seed, tokens, kv_heads, head_dim, dtype=dtype) for seed in (1, 2))
    return q, k, v


@implementations
class TestAttention:
    @dtypes
    @pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 4), (6, 2), (4, 1)])
    @pytest.mark.parametrize("tokens", [1, 2, 33])
    def test_matches_the_equation(self, implementation, dtype, heads, kv_heads, tokens):
        q, k, v = inputs(tokens, heads, kv_heads, dtype)
        positions, segments = np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.int32)
        found = compute(implementation, attention, q, k, v, positions, segments, scale=0.25)
        assert_close(found, oracles.attention(wide(q), wide(k), wide(v), positions, segments, 0.25), dtype)

    @pytest.mark.parametrize("window, softcap", [(1, None), (5, None), (1000, None), (None, 2.0), (5, 0.5)])
    def test_window_and_softcap(self, implementation, window, softcap):
        q, k, v = inputs(20, 4, 2, F32)
        positions, segments = np.arange(20, dtype=np.int32), np.zeros(20, np.int32)
        options = {"scale": 1.5, "window": window, "softcap": softcap}
        found = compute(implementation, attention, q, k, v, positions, segments, **options)
        assert_close(found, oracles.attention(wide(q), wide(k), wide(v), positions, segments, **options), F32)

    def test_segments_do_not_see_each_other_and_order_is_free(self, implementation):
        q, k, v = inputs(24, 2, 1, F32)
        order = np.random.default_rng(3).permutation(24)
        segments = np.repeat(np.array([5, -1, 9], np.int32), 8)[order]
        positions = np.tile(np.arange(100, 108, dtype=np.int32), 3)[order]
        found = compute(implementation, attention, q, k, v, positions, segments, scale=0.3, window=6)
        assert_close(found, oracles.attention(wide(q), wide(k), wide(v), positions, segments, 0.3, 6), F32)


def test_wrong_calls_are_refused():
    q, k, v = inputs(3, 4, 2, F32)
    index = np.zeros(3, np.int32)
    with pytest.raises(TypeError, match="4 query heads must be a multiple of the 3 KV heads"):
        attention(q, np.zeros((3, 3, 16), F32), np.zeros((3, 3, 16), F32), index, index, scale=1.0)
    with pytest.raises(TypeError, match=r"v has shape \(3, 1, 16\), expected axes \[T K H\] with K = 2 \(from k\)"):
        attention(q, k, v[:, :1], index, index, scale=1.0)
    with pytest.raises(TypeError, match="window must be at least 1"):
        attention(q, k, v, index, index, scale=1.0, window=0)
    with pytest.raises(TypeError, match="softcap must be positive"):
        attention(q, k, v, index, index, scale=1.0, softcap=0.0)
