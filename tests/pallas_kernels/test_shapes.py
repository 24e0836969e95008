"""The named shapes of real models are calls that the ops accept, and the benchmarks run on them."""

import importlib
import json

import jax
import numpy as np
import pytest

from jaxserve.pallas_kernels import OPS, _bench
from jaxserve.pallas_kernels._native import is_available

NAMES = sorted(name.removeprefix("jaxserve.") for name in OPS)


def cases(name, dtype):
    return importlib.import_module(f"jaxserve.pallas_kernels.{name}.shapes").cases(dtype)


@pytest.mark.parametrize("name", NAMES)
def test_cases_are_valid_calls(name):
    op = OPS[f"jaxserve.{name}"]
    found = cases(name, np.float32)
    assert len({case.name for case in found}) == len(found)
    assert any(case.name.startswith("llama-3-8b") for case in found)
    for case in found:
        op.shape_rule(*case.specs, **case.params)
        assert case.bytes > 0


@pytest.mark.parametrize("name", NAMES)
def test_operands_fit_their_specs(name):
    case = cases(name, np.float32)[0]
    for operand, spec in zip(case.fill(np.random.default_rng(0)), case.specs, strict=True):
        assert (operand.shape, operand.dtype) == (spec.shape, spec.dtype)


@pytest.mark.parametrize("name, form", [("kv_write", " int4"), ("paged_attention", " fp8"), ("rope", "")])
def test_bench_prints_a_json_line(name, form, monkeypatch, capsys):
    monkeypatch.setattr(_bench, "measure_ceilings", lambda dtype, repeats: (1e9, 1e9))
    monkeypatch.setattr("sys.argv", ["bench", "--shape", f"smollm2-135m decode b=32{form}", "--repeats", "2"])
    bench = importlib.import_module(f"jaxserve.pallas_kernels.{name}.bench")
    bench.main()
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["op"] == name
    assert found["implementation"] == ("native" if is_available() else "reference")
    assert found["median_us"] > 0 and found["percent_of_ceiling"] > 0


def test_bench_measures_ceilings():
    bytes_per_second, flops_per_second = _bench.measure_ceilings(np.float32, 1)
    assert bytes_per_second > 1e8 and flops_per_second > 1e8
    assert jax.devices()[0].platform == "cpu" or flops_per_second > 1e12


def test_bench_says_when_no_shape_fits(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench", "--shape", "gpt-5"])
    with pytest.raises(SystemExit):
        _bench.main(OPS["jaxserve.rope"], lambda dtype: cases("rope", dtype))
    assert "no shape of rope is named like 'gpt-5'" in capsys.readouterr().err
