"""Quantized caches in whole models, and what the checks of the pass would notice."""

import importlib

import jax
import numpy as np
import pytest

from jaxserve.errors import UserError
from jaxserve.models.resolve import resolve
from jaxserve.pallas_kernels import KV_FORMATS, RopeSpec
from jaxserve.pallas_kernels.kv_write.format import decode, encode
from jaxserve.passes import insert_paged_kv
from jaxserve.passes.pipeline import Context, run_pipeline
from jaxserve.passes.recipes import RECIPES, parse_spec
from jaxserve.passes.verify import NumberCheck, Verifier, VerifyError
from tests.passes.helpers import paths, pipeline, run_graph, trace_tiny
from tests.passes.test_models import GEOMETRY, PAGE, STEP, Paged, materialize, trace, whole

ATTENTION = importlib.import_module("jaxserve.pallas_kernels.attention.op").OP

formats = pytest.mark.parametrize("kv", KV_FORMATS)


@pytest.fixture
def model(shared):
    """(checkpoint, two prompts)."""
    folder = shared / "fixtures" / "qwen3"
    expected = np.load(folder / "expected.npz")
    return resolve(folder), expected["input_ids_1"], expected["input_ids_0"]


def paged_model(checkpoint, kv, tokens=STEP) -> Paged:
    result = pipeline(trace(checkpoint, tokens), RECIPES["f32"].spec(page=PAGE, kv=kv), GEOMETRY, numbers=False)
    paged = Paged(result.graph, materialize(result, checkpoint))
    # Beside NaN, which Paged puts into floating arrays, codes that nobody has written.
    paged.caches = {path: array + 0xB7 if array.dtype == np.uint8 else array for path, array in paged.caches.items()}
    return paged


@formats
def test_the_paged_model_is_the_model_on_rounded_keys_and_values(model, kv, monkeypatch):
    """In one step, in uneven chunks beside another sequence, and in single tokens."""
    checkpoint, long, short = model
    exact, format = ATTENTION.reference, KV_FORMATS[kv]

    def rounded(q, k, v, *order, **options):
        return exact(q, *(decode(encode(x, format, None), format) for x in (k, v)), *order, **options)

    graph, values = trace(checkpoint, STEP), {path: checkpoint.read(path) for path in checkpoint.specs()}
    plain = run_graph(graph, {**values, **whole(long)})["logits"][: len(long)]
    monkeypatch.setattr(ATTENTION, "reference", rounded)
    jax.clear_caches()
    want = run_graph(graph, {**values, **whole(long)})["logits"][: len(long)]
    monkeypatch.undo()
    jax.clear_caches()
    tolerance = 1e-3 * np.abs(want).max()
    assert np.abs(want - plain).max() > 3 * tolerance

    paged = paged_model(checkpoint, kv)
    np.testing.assert_allclose(paged.step((long, 0)), want, atol=tolerance)
    paged.shuffle(seed=1)
    chunks = [paged.step((long[:7], 0), (short[:3], 0))[:7], paged.step((long[7:], 7))]
    np.testing.assert_allclose(np.concatenate(chunks), want, atol=tolerance)
    paged.shuffle(seed=2)
    one_by_one = [paged.step((long[t : t + 1], t)) for t in range(len(long))]
    np.testing.assert_allclose(np.concatenate(one_by_one), want, atol=tolerance)


@formats
def test_bytes_of_a_sequence_do_not_depend_on_its_chunks(model, kv):
    """What a step stores for a token, alone or in a prompt: the same scales, and codes that are one apart at most where
    the matmuls' own rounding tips one."""
    checkpoint, long, _ = model
    stored = []
    for size in (len(long), 5, 1):
        paged = paged_model(checkpoint, kv)
        for start in range(0, len(long), size):
            paged.step((long[start : start + size], start))
        slots = paged.tables[0, np.arange(len(long)) // PAGE], np.arange(len(long)) % PAGE
        stored.append({path: np.asarray(array)[:, *slots] for path, array in paged.caches.items()})
    for other in stored[1:]:
        for path, array in stored[0].items():
            assert (array != other[path]).mean() < 0.002, path
            assert np.isfinite(array.astype(np.float32)).all()


@formats
def test_checks_notice_a_wrong_cache(kv, monkeypatch):
    """The tolerance of a format leaves room for its rounding and no more: not for keys in the place of values, nor
    for a window that is forgotten."""
    real = insert_paged_kv.paged_attention

    def swapped(q, keys, values, *ragged, **options):
        return real(q, values, keys, *ragged, **options)

    def boundless(*operands, **options):
        return real(*operands, **{**options, "window": None})

    passes = parse_spec(f"insert-paged-kv{{page=4,kv={kv}}}")
    run_pipeline(trace_tiny(windows=(2,)), passes, Context(), [Verifier(numbers := NumberCheck())])
    assert numbers.checked == 1
    for wrong in (swapped, boundless):
        monkeypatch.setattr(insert_paged_kv, "paged_attention", wrong)
        with pytest.raises(VerifyError, match="moved by"):
            run_pipeline(trace_tiny(windows=(2,)), passes, Context(), [Verifier(NumberCheck())])


def test_heads_that_do_not_fill_bytes():
    graph = trace_tiny(heads=2, kv_heads=1, head_dim=7, rope=RopeSpec(6, 1e4))
    with pytest.raises(
        UserError, match=r"kv=int4 keeps two components .* layers_0/self_attn have 7; allowed: f32, bf16"
    ):
        pipeline(graph, "insert-paged-kv{kv=int4}")
    assert "kv/0/k_minimum" in paths(pipeline(graph, "insert-paged-kv{kv=int8}").graph, "cache")
