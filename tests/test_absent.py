"""Compiling for a GPU that is not there: what is decided and refused where JAX's CUDA plugin is not installed."""

import dataclasses
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.absent import AbsentGpu
from jaxserve.cli import main
from jaxserve.errors import UserError
from jaxserve.gpu_report import failures, report
from jaxserve.gpu_steps import RECIPES, make_step, random_arrays
from jaxserve.models.config import ModelConfig
from jaxserve.programs import chosen_kernels
from jaxserve.serving.load import check_machine
from jaxserve.serving.state import init_state
from jaxserve.serving.step import unpack_rows
from jaxserve.sizing import kv_bytes_per_token, pool_tokens, rewritten_graph, weight_bytes
from jaxserve.targets import GPUS, H100_SXM, cpu_target
from tests.test_sizing import LLAMA2_7B


def absent(memory: int) -> AbsentGpu:
    """A card of so many bytes, made without the plugin."""
    gpu = object.__new__(AbsentGpu)
    gpu.gpu = dataclasses.replace(H100_SXM, memory_bytes=memory)
    return gpu


def compiled(arguments: int, results: int, aliased: int, temporaries: int) -> types.SimpleNamespace:
    memory = types.SimpleNamespace(
        argument_size_in_bytes=arguments,
        output_size_in_bytes=results,
        alias_size_in_bytes=aliased,
        temp_size_in_bytes=temporaries,
    )
    return types.SimpleNamespace(memory_analysis=lambda: memory)


def test_without_the_plugin_it_names_the_packages(shared, tmp_path, capsys):
    model = shared / "fixtures" / "stories260K"
    try:
        AbsentGpu(H100_SXM)
    except UserError as error:
        assert "jax-cuda12-plugin" in str(error)
    else:
        pytest.skip("the plugin is installed here")
    arguments = ["compile", str(model), "--target", "h100-sxm", "-o", str(tmp_path / "a"), "--no-verify"]
    assert main(arguments) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("jaxserve compile: cannot compile for h100-sxm here") and "nvidia-cuda-nvcc-cu12" in last
    assert not (tmp_path / "a").exists()


def test_the_pool_fills_what_the_weights_leave():
    graph = rewritten_graph(ModelConfig.from_hf(LLAMA2_7B).with_layers(2), {}, "bf16")
    tokens, usable = pool_tokens(graph, H100_SXM), 0.9 * H100_SXM.memory_bytes
    filled = weight_bytes(graph) + tokens * kv_bytes_per_token(graph)
    assert usable - kv_bytes_per_token(graph) < filled <= usable
    with pytest.raises(UserError, match=r"GB of weights do not fit the 0.9 GB usable of h100-sxm"):
        pool_tokens(graph, dataclasses.replace(H100_SXM, memory_bytes=10**9))


def test_a_program_must_fit_with_all_that_it_keeps():
    absent(100).check_memory("step", compiled(arguments=60, results=50, aliased=40, temporaries=30))
    with pytest.raises(UserError, match=r"step does not fit h100-sxm.*lower --kv-tokens"):
        absent(99).check_memory("step", compiled(arguments=60, results=50, aliased=40, temporaries=30))


def test_an_artifact_for_a_gpu_is_refused_on_a_cpu():
    with pytest.raises(UserError, match="compiled for h200, and JAX runs on cpu"):
        check_machine(GPUS["h200"], print)
    check_machine(cpu_target(), lambda line: pytest.fail(line))


def test_who_computes_what_is_said_with_the_reasons():
    graph = rewritten_graph(ModelConfig.from_hf(LLAMA2_7B).with_layers(1), {}, "w4a16")
    lines = chosen_kernels(graph, H100_SXM)
    assert "4x quantized_matmul by mosaic" in lines
    assert "1x dense_matmul by mosaic" in lines
    assert "1x paged_attention by mosaic" in lines
    assert "2x rms_norm by mosaic" in lines and "1x add_rms_norm by mosaic" in lines
    assert any("it needs sm_90a, and a100 is sm_80" in line for line in chosen_kernels(graph, GPUS["a100"]))


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_the_steps_that_are_compiled_run(recipe):
    """A whole step of a tiny model by its shapes, with random weights: it gives every sequence a token."""
    step = make_step("tiny", recipe, 8, 2, 64, cpu_target(), layers=1)
    params, caches, _, packed = step.specs
    weights, state = dict(random_arrays(params)), init_state(step.limits)
    inputs = step.inputs(64)
    assert inputs.shape == packed.shape
    run = jax.jit(step.function, donate_argnums=(1, 2))
    empty = {path: jnp.zeros(spec.shape, spec.dtype) for path, spec in caches.items()}
    _, state, outputs = run(weights, empty, state, inputs)
    tokens, _, finite, _ = unpack_rows(np.asarray(outputs["rows"]))
    assert finite.all() and (tokens >= 0).all()
    assert np.asarray(state["length"])[:2].tolist() == [4, 4]


def test_the_report_reads_ptxas(tmp_path: pathlib.Path):
    (tmp_path / "k.ptxas").write_text(
        "4 bytes stack frame, 8 bytes spill stores, 0 bytes spill loads\nUsed 84 registers"
    )
    (tmp_path / "k.resources.txt").write_text("Resources(smem_scratch_bytes=4096, tmem=0)")
    found = report(tmp_path)
    assert found == {"kernels": 1, "registers": 84, "spills": 8, "shared_memory": 4096}
    assert list(tmp_path.iterdir()) == []
    row = {"op": "o", "shape": "s", **found}
    assert failures([row], 10**6) and failures([row | {"spills": 0}], 4095) and failures([row | {"kernels": 0}], 10**6)
    step = row | {"spills": 0, "cache": 8, "aliased": 8, "temporaries": 10**6}
    assert not failures([step], 10**6)
    assert failures([step | {"aliased": 7}], 10**6) and failures([step | {"temporaries": 10**10}], 10**6)
    assert not failures([row | {"spills": 0}, {"op": "o", "shape": "s", "refused": "why"}], 4096)
