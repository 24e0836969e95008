"""The benchmark for machines with a GPU, run dry on the CPU's kernels: what it writes, and that it goes on."""

import json

import pytest

from jaxserve import gpu_bench, gpu_end_to_end
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
    assert [line[:40] for line in said.out.splitlines()[2:]] == [f"| quantized_matmul {MATCH}"[:40]]
    assert said.err == f"disagrees with its reference: quantized_matmul {MATCH}\n"


@pytest.mark.skipif(not is_available(), reason=describe())
def test_caches_are_updated_in_place(tmp_path, monkeypatch):
    """Calls go on with what the one before them wrote: operands that were given away are not read again."""
    monkeypatch.setattr(gpu_bench, "measure_ceilings", lambda dtype, repeats: (1e10, 1e12))
    file, match = tmp_path / "rows.json", "kv_write smollm2-135m decode b=1 int8"
    assert gpu_bench.main(["--json", str(file), "--repeats", "2", "--match", match]) == 0
    row = json.loads(file.read_text())[match]
    assert row["kernel"] == "native" and row["agrees"] and row["microseconds"] > 0


@pytest.mark.slow
def test_end_to_end_on_a_tiny_model(tmp_path, monkeypatch, capsys):
    """Everything but a card: all recipes, decoding and a prompt, in two runs, of which the first has no time."""
    monkeypatch.setattr(gpu_end_to_end, "DEPTHS", (1, 2))
    monkeypatch.setattr(gpu_bench, "measure_ceilings", lambda dtype, repeats: (1e10, 1e12))
    file = tmp_path / "rows.json"
    arguments = ["--json", str(file), "--repeats", "1", "--match", "step tiny", "--model", "tiny"]
    arguments += ["--batches", "2", "--context", "64"]
    assert gpu_bench.main([*arguments, "--minutes", "0"]) == 0
    assert "8 rows are left" in capsys.readouterr().err and not file.exists()
    assert gpu_bench.main(arguments) == 0
    rows = json.loads(file.read_text())
    assert sum(key.startswith("step tiny") for key in rows) == 8
    for recipe in ("bf16", "w8a8", "w4a16", "w4a8kv4"):
        row = rows[f"step tiny {recipe} decode b=2"]
        assert len(row["microseconds_measured"]) == 2 and row["launches"] == {}
        assert any("paged_attention by" in line for line in row["kernels"])
    assert "| step tiny w4a8kv4 prefill 64 |" in capsys.readouterr().out


def test_launches_are_counted_where_there_are_any():
    assert not gpu_end_to_end.count_launches(lambda: None)
    assert gpu_end_to_end._at_depth([3.0, 5.0], 32) == 33.0
