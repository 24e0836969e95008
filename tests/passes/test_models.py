"""Real (tiny) checkpoints through whole pipelines, against the reference's logits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.lowering import graph_forward, specs_of, trace_model
from jaxserve.models.resolve import resolve
from jaxserve.pallas_kernels import QuantFormat, QuantizedTensor, RopeSpec, quantize_rtn
from jaxserve.passes.graph import Graph
from jaxserve.passes.pipeline import KvGeometry, select
from jaxserve.passes.recipes import RECIPES, parse_spec
from jaxserve.passes.weights import ValueSource, WeightPlan
from tests.passes.helpers import DTYPES, names, paths, pipeline, random_values, run_graph, tiny, trace_tiny

NAMES = ("llama", "llama_rope3", "mistral", "qwen2", "qwen3")
TOLERANCE: dict[str, Any] = {"atol": 2e-4, "rtol": 1e-4}
PAGE = 4
STEP = 40
GEOMETRY = KvGeometry(num_pages=24, pages_per_seq=10, seqs=2)


@pytest.fixture(scope="module", params=NAMES)
def model(request, shared):
    """(checkpoint, its arrays by path, expected logits)."""
    folder = shared / "fixtures" / request.param
    checkpoint = resolve(folder)
    values = {path: checkpoint.read(path) for path in checkpoint.specs()}
    return checkpoint, values, np.load(folder / "expected.npz")


def trace(checkpoint, tokens: int, activations: str = "f32") -> Graph:
    stored = {path: spec.format for path, spec in checkpoint.specs().items()}
    return trace_model(checkpoint.config, tokens, tokens, stored, DTYPES[activations])


def whole(ids: np.ndarray) -> dict[str, np.ndarray]:
    """The arguments of a step that holds one sequence; padding is a segment of its own."""
    tokens = np.zeros(STEP, np.int32)
    tokens[: len(ids)] = ids
    index = np.arange(STEP, dtype=np.int32)
    return {"tokens": tokens, "positions": index, "segments": (index >= len(ids)).astype(np.int32), "logit_rows": index}


class Paged:
    """Steps of a rewritten graph over one paged cache; every sequence has its pages shuffled beforehand."""

    def __init__(self, graph: Graph, params: dict[str, np.ndarray], seed: int = 0):
        self.forward = jax.jit(graph_forward(graph), donate_argnums=1)
        self.params = {path: jnp.asarray(params[path]) for path in paths(graph)}
        # Pages that nobody has written hold NaN, which must never reach a result.
        self.caches = {
            path: jnp.full(spec.shape, jnp.nan, spec.dtype) for path, spec in specs_of(graph, "cache").items()
        }
        pages = np.random.default_rng(seed).permutation(GEOMETRY.num_pages).astype(np.int32)
        self.tables = pages[: GEOMETRY.seqs * GEOMETRY.pages_per_seq].reshape(GEOMETRY.seqs, -1)
        self.tokens = specs_of(graph, "arg")["tokens"].shape[0]

    def shuffle(self, seed: int) -> None:
        """New pages for every sequence."""
        pages = np.random.default_rng(seed).permutation(GEOMETRY.num_pages).astype(np.int32)
        self.tables = pages[: GEOMETRY.seqs * GEOMETRY.pages_per_seq].reshape(GEOMETRY.seqs, -1)

    def step(self, *rows: tuple[np.ndarray, int]) -> np.ndarray:
        """Each row is (ids, where they start); rows are packed first, the rest of the step is padding."""
        counts = np.array([len(ids) for ids, _ in rows] + [0] * (GEOMETRY.seqs - len(rows)))
        pad = self.tokens - counts.sum()
        ids = np.concatenate([*(ids for ids, _ in rows), np.zeros(pad, np.int64)])
        positions = np.concatenate([*(start + np.arange(len(ids)) for ids, start in rows), np.zeros(pad, np.int64)])
        owner = np.repeat(np.arange(len(rows)), counts[: len(rows)])
        used = positions[: len(owner)]
        slots = np.full(self.tokens, -1)
        slots[: len(owner)] = self.tables[owner, used // PAGE] * PAGE + used % PAGE
        lens = np.array([start + len(ids) for ids, start in rows] + [0] * (GEOMETRY.seqs - len(rows)))
        arguments = {
            "tokens": ids, "positions": positions, "logit_rows": np.arange(self.tokens), "kv_slots": slots,
            "block_tables": self.tables, "query_starts": np.concatenate([[0], np.cumsum(counts)]), "context_lens": lens,
        }  # fmt: skip
        arrays = {name: jnp.asarray(value, jnp.int32) for name, value in arguments.items()}
        self.caches, outputs = self.forward(self.params, self.caches, arrays)
        return np.asarray(outputs["logits"])[: counts.sum()]


def materialize(result, source) -> dict[str, np.ndarray]:
    return dict(WeightPlan(result.edits).materialize(result.graph, source))


def test_traced_and_rewritten_graphs_match_the_reference(model):
    """Before the passes; after them the whole prompt in one step, and then token by token beside another sequence."""
    checkpoint, values, expected = model
    long = expected["input_ids_1"]
    graph = trace(checkpoint, STEP)
    before = run_graph(graph, {**values, **whole(long)})["logits"][: len(long)]
    np.testing.assert_allclose(before, expected["logits_1"], **TOLERANCE)

    result = pipeline(graph, RECIPES["f32"].spec(page=PAGE), GEOMETRY, numbers=False)
    idle = ("canonicalize", "roll-layers", *(("fuse-rope",) if checkpoint.config.qk_norm else ()))
    assert all(stage.result.matches for stage in result.stages if stage.step.name not in idle)
    assert not {"dot_general", "jaxserve.attention"} & set(names(result.graph))
    paged = Paged(result.graph, materialize(result, checkpoint))
    np.testing.assert_allclose(paged.step((long, 0)), expected["logits_1"], **TOLERANCE)
    paged.shuffle(seed=1)
    assert_token_by_token(paged, expected)


def assert_token_by_token(paged: Paged, expected) -> None:
    """Decodes the long prompt and, from its third step on, the short one beside it."""
    long, short = expected["input_ids_1"], expected["input_ids_0"]
    found = {0: [], 1: []}
    for position in range(len(long)):
        rows = [(long[position : position + 1], position)]
        start = position - 2
        if 0 <= start < len(short):
            rows.append((short[start : start + 1], start))
        for row, logits in enumerate(paged.step(*rows)):
            found[row].append(logits)
    np.testing.assert_allclose(np.stack(found[0]), expected["logits_1"], **TOLERANCE)
    np.testing.assert_allclose(np.stack(found[1]), expected["logits_0"], **TOLERANCE)


def test_decode_bucket(shared):
    """As many tokens as sequences: the form of paged attention in which a row has one token."""
    folder = shared / "fixtures" / "mistral"
    checkpoint = resolve(folder)
    result = pipeline(trace(checkpoint, 2), RECIPES["f32"].spec(page=PAGE), GEOMETRY, numbers=False)
    assert_token_by_token(Paged(result.graph, materialize(result, checkpoint)), np.load(folder / "expected.npz"))


def test_chunks_of_two_sequences(shared):
    """A ragged prefill of both prompts in chunks that straddle pages, with padding behind."""
    folder = shared / "fixtures" / "mistral"
    checkpoint, expected = resolve(folder), np.load(folder / "expected.npz")
    result = pipeline(trace(checkpoint, 16), RECIPES["f32"].spec(page=PAGE), GEOMETRY, numbers=False)
    paged = Paged(result.graph, materialize(result, checkpoint))
    long, short = expected["input_ids_1"], expected["input_ids_0"]
    parts = [
        paged.step((long[:9], 0), (short[:3], 0)),
        paged.step((long[9:22], 9), (short[3:], 3)),
        paged.step((long[22:37], 22)),
    ]
    np.testing.assert_allclose(
        np.concatenate([parts[0][:9], parts[1][:13], parts[2]]), expected["logits_1"], **TOLERANCE
    )
    np.testing.assert_allclose(np.concatenate([parts[0][9:], parts[1][13:]]), expected["logits_0"], **TOLERANCE)


def undone(graph: Graph, result, final: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The original parameters as the quantized ones stand for them: dequantized, and cut apart again."""
    plan, shapes = WeightPlan(result.edits), {entry.path: entry.aval.shape for entry in graph.of_kind("param")}
    originals = {}
    for eqn in result.graph.eqns:
        if eqn.primitive.name not in ("jaxserve.quantized_matmul", "jaxserve.quantized_take"):
            continue
        form: QuantFormat = eqn.params["format"]
        entries = [result.graph.param_of(atom) for atom in eqn.invars[1:]]
        found = [entry.path for entry in entries if entry is not None]
        arrays = {path.rsplit("/", 1)[1]: final[path] for path in found}
        weight = QuantizedTensor(form, eqn.params["shape"], arrays).dequantize()
        for path in plan.originals(found[0]):
            originals[path], weight = np.split(weight, [shapes[path][0]])
        assert weight.size == 0
    for path in shapes.keys() - originals.keys():
        originals[path] = final[path]
    return originals


def assert_equals_dequantized(graph: Graph, result, source, ids, tolerance=1e-4) -> dict[str, np.ndarray]:
    final = materialize(result, source)
    originals = undone(graph, result, final)
    arguments = whole(ids)
    want = run_graph(graph, {**originals, **arguments})["logits"]
    have = run_graph(result.graph, {**final, **arguments})["logits"]
    np.testing.assert_allclose(have, want, rtol=tolerance, atol=tolerance)
    return originals


def without_paging(name: str, **options: Any) -> str:
    """A recipe's pipeline up to the quantized matmuls, with float32 activations."""
    passes = parse_spec(RECIPES[name].spec(activations="f32", **options))
    return ",".join(map(str, select(passes, ["choose-layout", "stack-layers", "insert-paged-kv"])))


@pytest.mark.parametrize(("name", "family"), [("w8a16", "llama_rope3"), ("w4a16", "qwen3"), ("w4a16", "qwen2")])
def test_quantized_recipes_equal_their_dequantized_weights(shared, name, family):
    folder = shared / "fixtures" / family
    checkpoint, ids = resolve(folder), np.load(folder / "expected.npz")["input_ids_1"]
    values = {path: checkpoint.read(path) for path in checkpoint.specs()}
    graph = trace(checkpoint, STEP)
    result = pipeline(graph, without_paging(name), numbers=False)
    originals = assert_equals_dequantized(graph, result, checkpoint, ids)
    changed = [path for path in values if not np.array_equal(values[path], originals[path])]
    assert changed == [path for path in values if path.startswith("layers_") and values[path].ndim == 2]
    for path in changed:  # as near as rounding to 8 or 4 bits is, and no nearer
        error = np.linalg.norm(values[path] - originals[path]) / np.linalg.norm(values[path])
        assert (0.001 < error < 0.01) if name == "w8a16" else (0.03 < error < 0.15)


def test_tied_embeddings_are_quantized_once_for_both_readers(shared):
    folder = shared / "fixtures" / "qwen2"
    checkpoint, expected = resolve(folder), np.load(folder / "expected.npz")
    graph = trace(checkpoint, STEP)
    result = pipeline(graph, without_paging("f32", rules=".*=w4a16:g32:sym"))
    assert names(result.graph).count("jaxserve.quantized_take") == 1
    assert next(path for path in paths(result.graph) if "embed" in path) == "embed_tokens/embedding/codes"
    assert_equals_dequantized(graph, result, checkpoint, expected["input_ids_1"])


def test_native_keeps_blocks_bit_for_bit():
    """A checkpoint of Q8_0, Q4_1 and dense weights: stacked or not, codes and scales are those it came with."""
    eight, four = QuantFormat(8, 32, "none", "float16"), QuantFormat(4, 32, "minimum", "float16")
    config = {"width": 64, "mlp": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 64, "tied": True}
    config = tiny(**config, rope=RopeSpec(16, 1e4))
    shapes = {entry.path: entry.aval.shape for entry in trace_model(config, 1, 1, {}).of_kind("param")}
    stored = {path: four for path in shapes if "_proj" in path}
    stored["embed_tokens/embedding"] = eight
    stored["layers_0/mlp/gate_proj/kernel"] = eight  # up is not: they stay apart
    del stored["layers_0/mlp/down_proj/kernel"]
    graph = trace_model(config, STEP, STEP, stored)
    rng = np.random.default_rng(0)
    source = {path: rng.normal(size=shape).astype("float32") / 4 for path, shape in shapes.items()}
    source |= {path: quantize_rtn(source[path], form) for path, form in stored.items()}

    result = pipeline(graph, without_paging("native"))
    refused = next(stage for stage in result.stages if stage.step.name == "fuse-gate-up").result
    assert refused.matches == 0 and "int4 g32 minimum f16, int8 g32 none f16" in str(refused.report[0])
    ids = rng.integers(0, 64, 8)
    originals = assert_equals_dequantized(graph, result, ValueSource(source), ids)
    for path, value in source.items():
        want = value.dequantize() if isinstance(value, QuantizedTensor) else value
        np.testing.assert_array_equal(originals[path], want)
    final = materialize(result, ValueSource(source))
    parts = [source[f"layers_0/self_attn/{name}_proj/kernel"] for name in "qkv"]
    for field in four.fields:
        stacked = np.concatenate([part.arrays[field] for part in parts])
        np.testing.assert_array_equal(final[f"layers_0/self_attn/qkv_proj/kernel/{field}"], stacked)


def test_bf16_activations_stay_near_f32(shared):
    folder = shared / "fixtures" / "qwen3"
    checkpoint, expected = resolve(folder), np.load(folder / "expected.npz")
    ids = expected["input_ids_1"]
    result = pipeline(trace(checkpoint, STEP), RECIPES["bf16"].spec(page=PAGE), GEOMETRY)
    assert {spec.dtype.name for spec in specs_of(result.graph, "cache").values()} == {"bfloat16"}
    logits = Paged(result.graph, materialize(result, checkpoint)).step((ids, 0))
    assert 0 < np.abs(logits - expected["logits_1"]).mean() < 0.05 * expected["logits_1"].std()


@pytest.mark.parametrize("activations", ["f32", "bf16"])
@pytest.mark.parametrize(
    "changes",
    [
        {"mlp_bias": True, "qkv_bias": True, "o_bias": True, "qk_norm": True, "activation": "gelu"},
        {"activation": "gelu_pytorch_tanh", "tied": True, "layers": 2, "windows": (2, None)},
    ],
    ids=str,
)
def test_every_variant_is_rewritten_completely(changes, activations):
    """Biases, head norms, other activations and windows do not hide a projection from the fusions."""
    graph = trace_tiny(activations, tokens=STEP, rows=STEP, **changes)
    result = pipeline(graph, RECIPES[activations].spec(page=PAGE), GEOMETRY, numbers=False)
    layers = changes.get("layers", 1)
    assert names(result.graph).count("jaxserve.dense_matmul") == 4 * layers + 1
    assert "dot_general" not in names(result.graph)
    windows = [eqn.params["window"] for eqn in result.graph.eqns if eqn.primitive.name == "jaxserve.paged_attention"]
    assert windows == list(changes.get("windows", (None,)))
    if activations == "bf16":  # one whole model is run in bf16 above
        return
    values = random_values(graph)
    ids = np.arange(8) % 7
    params = {path: values[path] for path in paths(graph)}
    want = run_graph(graph, {**params, **whole(ids)})["logits"][:8]
    have = Paged(result.graph, materialize(result, ValueSource(params))).step((ids, 0))
    np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
