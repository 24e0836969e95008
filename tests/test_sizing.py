"""`jaxserve plan`: what is counted from a graph, against numbers of the literature and against counting by hand."""

import json

import pytest

from jaxserve.cli import main
from jaxserve.gpu_steps import MODELS
from jaxserve.models.config import ModelConfig
from jaxserve.roofline import Cost, count, decode_load, prefill_load, roofline
from jaxserve.sizing import kv_bytes_per_token, recommend, rewritten_graph, size_model, weight_bytes
from jaxserve.targets import GPUS, H100_SXM

LLAMA2_7B = MODELS["llama-2-7b"]
LINEAR = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)  # weights of the layers' matmuls
EMBEDDING, HEAD, NORMS = 4 * 32000 * 4096, 2 * 32000 * 4096, 4 * 65 * 4096  # their bytes: f32, bf16, f32


@pytest.fixture(scope="module")
def llama2() -> ModelConfig:
    return ModelConfig.from_hf(LLAMA2_7B)


@pytest.mark.parametrize(
    ("recipe", "bytes_per_weight", "literature"),
    [
        ("bf16", 2, 13.5e9),
        ("w8a16", 1 + 4 / 4096, 6.7e9),  # a float32 scale an output, 4096 or 11008 inputs
        ("w4a16", 0.5 + 4 / 64, 3.9e9),  # float16 scale and minimum for 64; AWQ's files have groups of 128
    ],
)
def test_weights_of_a_7b_model(llama2, recipe, bytes_per_weight, literature):
    two, one = (weight_bytes(rewritten_graph(llama2.with_layers(layers), {}, recipe)) for layers in (2, 1))
    found = one + 31 * (two - one)
    assert found == pytest.approx(LINEAR * bytes_per_weight + EMBEDDING + HEAD + NORMS, rel=1e-3)
    # Papers count an embedding in 16 bits; ours is in 32.
    assert found - EMBEDDING / 2 == pytest.approx(literature, rel=0.1)


def test_cache_of_llama2_7b_takes_a_gigabyte_for_2048_tokens(llama2):
    graph = rewritten_graph(llama2.with_layers(2), {}, "bf16")
    assert kv_bytes_per_token(graph) * 16 * 2048 == 1_073_741_824


def test_ridge_of_an_a100():
    """QServe (arXiv:2405.04532) says that 16-bit matmuls turn from memory to computing at 156 tokens, with 2 TB/s."""
    assert GPUS["a100"].ridge("bf16") == pytest.approx(156, rel=0.02)
    matmul = Cost("dense_matmul", "bf16", fixed_bytes=2 * 4096 * 4096, token_ops=2 * 4096 * 4096)
    bounds = {batch: roofline([matmul], decode_load(batch, 1), GPUS["a100"]).bound for batch in (152, 154)}
    assert bounds == {152: "memory", 154: "compute"}


def test_counts_of_a_layer_by_hand(llama2):
    costs = [count(rewritten_graph(llama2.with_layers(layers), {}, "bf16")) for layers in (1, 2)]
    load = decode_load(8, 100)
    layer_bytes, layer_ops = (
        sum(getattr(cost, what)(load) for cost in costs[1]) - sum(getattr(cost, what)(load) for cost in costs[0])
        for what in ("bytes", "ops")
    )
    weights, cache = 2 * LINEAR // 32, 2 * 2 * 4096 * 8 * 100
    assert layer_ops == 2 * 8 * LINEAR // 32 + 4 * 4096 * 8 * 100
    assert weights + cache < layer_bytes < (weights + cache) * 1.01  # the rest are activations


def test_prefill_sees_every_earlier_token_and_computes_one_row_of_logits(llama2):
    costs = count(rewritten_graph(llama2.with_layers(1), {}, "bf16"))
    ops = sum(cost.ops(prefill_load(10)) for cost in costs)
    assert ops == 2 * 10 * LINEAR // 32 + 2 * 4096 * 32000 + 4 * 4096 * 55


@pytest.mark.parametrize("recipe", ["bf16", "w4a16"])
def test_a_norm_reads_the_weight_of_its_layer_alone(llama2, recipe):
    costs = count(rewritten_graph(llama2.with_layers(3), {}, recipe))
    norms = [cost for cost in costs if cost.op.endswith("rms_norm")]
    assert [cost.op for cost in norms] == ["rms_norm", *["add_rms_norm"] * 5, "rms_norm"]
    assert {cost.fixed_bytes for cost in norms} == {4 * 4096}
    numbers = {"rms_norm": 4 + 2, "add_rms_norm": 4 + 4 + 4 + 2}  # bytes: x, another, their sum; the norm in bf16
    assert all(cost.token_bytes == 4096 * numbers[cost.op] for cost in norms)


def test_codes_of_a_norm_are_counted_by_their_bytes(llama2):
    """Float32 in, int8 codes and a scale out; the matmul reads codes, and no scale of a token is part of its weight."""
    costs = count(rewritten_graph(llama2.with_layers(1), {}, "w8a8-smoothquant"))
    norms = [cost for cost in costs if cost.op == "quantized_norm"]
    assert [(cost.fixed_bytes, cost.token_bytes) for cost in norms] == [(4 * 4096, 4096 * (4 + 1) + 4)] * 2
    qkv = next(cost for cost in costs if cost.op == "quantized_matmul")
    outputs = 3 * 4096
    assert (qkv.fixed_bytes, qkv.token_bytes) == (outputs * (4096 + 4), 4096 + 4 * outputs)


def test_a_window_bounds_what_is_read():
    cost = Cost("paged_attention", "bf16", key_bytes=4, pair_ops=8, window=16)
    assert (cost.bytes(decode_load(2, 100)), cost.ops(decode_load(2, 100))) == (4 * 32, 8 * 32)
    assert cost.bytes(prefill_load(100)) == 400


def test_recommendation_is_the_fastest_at_the_largest_batch_that_fits(llama2):
    sizings = size_model(llama2.with_layers(4), {}, ("bf16", "w4a16"), H100_SXM, (1, 10**9), 2048, price=2.0)
    best = recommend(sizings)
    assert best is not None and best in sizings[1].decode and best.batch == 1
    assert best.cost == pytest.approx(2.0 / 3600 * best.step.seconds * 1e6)
    assert [decode.fits for decode in sizings[0].decode] == [True, False]
    assert recommend(size_model(llama2.with_layers(1), {}, ("bf16",), H100_SXM, (10**9,), 2048)) is None


def test_command(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA2_7B | {"num_hidden_layers": 1}))
    arguments = ["plan", str(config), "--target", "a100", "--recipe", "bf16", "--recipe", "fp8", "--batch", "1,4"]
    assert main([*arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["recommended"] == "bf16"
    assert [recipe["recipe"] for recipe in facts["recipes"]] == ["bf16"]  # an A100 has no units for fp8
    assert [step["batch"] for step in facts["recipes"][0]["decode"]] == [1, 4]
    assert main([*arguments, "--price", "2.5"]) == 0
    assert "nothing was measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "cpu"], "ceilings are known of h100-sxm"),
        (["--batch", "1,x"], "--batch '1,x' is not a list"),
        (["--context", "5000"], "--context 5000 is not between 1 and 4096"),
        (["--price", "0"], "--price 0 is not above 0"),
        (["--target", "a100", "--recipe", "fp8"], "a100 has no units for fp8"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, capsys, arguments, message):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA2_7B | {"num_hidden_layers": 1}))
    assert main(["plan", str(config), *arguments]) == 2
    assert message in capsys.readouterr().err
