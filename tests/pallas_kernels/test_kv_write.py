import jax
import numpy as np
import pytest

from jaxserve.pallas_kernels import kv_write
from tests.pallas_kernels.harness import BF16, F32, compute, dtypes, implementations, normal

PAGES, B, K, H = 6, 4, 2, 8


def caches(dtype):
    return tuple(normal(seed, PAGES, B, K, H, dtype=dtype) for seed in (0, 1))


@implementations
class TestKvWrite:
    @dtypes
    @pytest.mark.parametrize(
        "slots",
        [
            [0],
            [PAGES * B - 1],
            [3, 4],
            [7, 8, 9, 10, 11, 12],
            [23, 0, 13, 5],
            [-1, 6, -1],
            [-1],
            [-5, PAGES * B + 3, 2],
        ],
        ids=str,
    )
    def test_writes_only_the_slots_asked_for(self, implementation, dtype, slots):
        k_cache, v_cache = caches(dtype)
        k, v = (normal(seed, len(slots), K, H, dtype=dtype) for seed in (2, 3))
        expected = [cache.reshape(-1, K, H).astype(F32) for cache in (k_cache, v_cache)]
        for t, slot in enumerate(slots):
            if 0 <= slot < PAGES * B:
                expected[0][slot], expected[1][slot] = k[t], v[t]
        found = compute(implementation, kv_write, k_cache, v_cache, k, v, np.array(slots, np.int32))
        for cache, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(cache.reshape(-1, K, H), wanted)

    def test_rounds_to_the_dtype_of_the_cache(self, implementation):
        k_cache, v_cache = caches(BF16)
        k, v = normal(2, 1, K, H), normal(3, 1, K, H)
        found = compute(implementation, kv_write, k_cache, v_cache, k, v, np.array([5], np.int32))
        np.testing.assert_array_equal(found[0][1, 1], k[0].astype(BF16).astype(F32))


@dtypes
@pytest.mark.parametrize("tokens", [1, 2, 64])
def test_donated_caches_are_written_in_place(dtype, tokens):
    def memory(pages):
        cache = jax.ShapeDtypeStruct((pages, 16, 3, 64), dtype)
        rows, slots = jax.ShapeDtypeStruct((tokens, 3, 64), dtype), jax.ShapeDtypeStruct((tokens,), np.int32)
        compiled = jax.jit(kv_write, donate_argnums=(0, 1)).lower(cache, cache, rows, rows, slots).compile()
        found = compiled.memory_analysis()
        assert found is not None
        assert found.alias_size_in_bytes == 2 * pages * 16 * 3 * 64 * dtype.itemsize
        return found.temp_size_in_bytes

    assert memory(512) == memory(256)


def test_shape_errors_name_the_operand():
    k_cache, v_cache = caches(F32)
    k = np.zeros((3, K, H), F32)
    with pytest.raises(TypeError, match=r"kv_write: v_cache has shape \(5, 4, 2, 8\).*pages = 6 \(from k_cache\)"):
        kv_write(k_cache, v_cache[:5], k, k, np.zeros(3, np.int32))
    with pytest.raises(TypeError, match=r"slots has shape \(2,\), expected axes \[T\] with T = 3 \(from k\)"):
        kv_write(k_cache, v_cache, k, k, np.zeros(2, np.int32))
    with pytest.raises(TypeError, match=r"k has shape \(3, 16\), expected axes \[T K H\]"):
        kv_write(k_cache, v_cache, k.reshape(3, 16), k, np.zeros(3, np.int32))
