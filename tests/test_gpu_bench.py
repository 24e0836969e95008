"""The benchmark for machines with a GPU, run dry on the CPU's kernels: what it writes, and that it goes on."""

import json

import pytest

from jaxserve import gpu_bench
from jaxserve.pallas_kernels._native import describe, is_available

MATCH = "smollm2-135m decode b=1 o int8 row none f16"


@pytest.mark.skipif(not is_available(), reason=describe())
def test_dry_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_bench, "measure_ceilings", lambda dtype, repeats: (1e10, 1e12))
    file = tmp_path / "rows.json"
    arguments = ["--json", str(file), "--repeats", "1", "--match", MATCH]
    assert gpu_bench.main(arguments) == 0
    rows = json.loads(file.read_text())
    row = rows[f"quantized_matmul {MATCH}"]
    assert row["kernel"] == "native" and row["agrees"] and row["microseconds"] > 0
    assert rows["device"]["described_as"] == "cpu"
    capsys.readouterr()

    file.write_text(json.dumps({f"quantized_matmul {MATCH}": row | {"agrees": False}}))
    assert gpu_bench.main(arguments) == 1  # the row is there already: it is not measured again, but still reported
    said = capsys.readouterr()
    assert said.out == "" and said.err == f"disagrees with its reference: quantized_matmul {MATCH}\n"
