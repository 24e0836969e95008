"""The report: a row for every weight with what is true of it, and nothing that a browser would have to fetch or run."""

import dataclasses
import html.parser
import re

import pytest

from jaxserve.error_meter import OutputError
from jaxserve.lowering import trace_model
from jaxserve.manifest import PassRecord
from jaxserve.pallas_kernels import QuantFormat
from jaxserve.passes.graph import Graph
from jaxserve.report_html import ReportData, WeightRow, render, report_data, weight_rows, write_report
from tests.artifact_sample import sample_manifest
from tests.passes.helpers import pipeline, tiny

STORED = QuantFormat(8, 32, "none", "float16")
SPEC = (
    "canonicalize,lower-dense-matmul,prune{method=magnitude,targets=down_proj},fuse-qkv,fuse-gate-up,"
    "quantize-matmul{rules='o_proj=native;down_proj=skip;embed=w8a16;layers_=w4a16:g32:sym'},narrow-matmul"
)


class Page(html.parser.HTMLParser):
    """Tags that are open at the end, cells by table row, and every tag with its attributes."""

    VOID = ("meta", "link", "img", "br", "input")

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.tags: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def graph() -> Graph:
    config = tiny(layers=2, tied=True, vocab=64, width=64, heads=2, head_dim=32, kv_heads=1, mlp=96)
    return trace_model(config, 4, 2, {f"layers_{i}/self_attn/o_proj/kernel": STORED for i in (0, 1)})


@pytest.fixture(scope="module")
def result(graph):
    return pipeline(graph, SPEC, numbers=False)


def test_rows_say_what_is_true(result):
    errors = {"layers_1/self_attn/qkv_proj/kernel": OutputError(0.2, 0.1)}
    rows = weight_rows(result, errors)
    facts = [(row.layer, row.kind, row.shape, row.form, row.method) for row in rows]
    layer = [
        ("self_attn/qkv_proj", (128, 64), "int4 g32 none f16", "rtn"),
        ("self_attn/o_proj", (64, 64), "int8 g32 none f16", "as stored"),
        ("mlp/gate_up_proj", (192, 64), "int4 g32 none f16", "rtn"),
        ("mlp/down_proj", (64, 96), "bfloat16", ""),
    ]
    assert facts == [
        (None, "embed_tokens", (64, 64), "int8 row none f32", "rtn"),
        *((0, *rest) for rest in layer),
        *((1, *rest) for rest in layer),
    ]
    embedding, qkv, o, *_ = rows
    assert embedding.nbytes == 64 * 64 + 64 * 4 and qkv.nbytes == 128 * (32 + 2 * 2)
    assert qkv.bits == 4.5 and o.bits == 8.5
    assert rows[5].error == OutputError(0.2, 0.1) and qkv.error == OutputError()


def test_history_is_of_the_weight_alone(result):
    rows = {(row.layer, row.kind): row for row in weight_rows(result, {})}
    qkv = rows[1, "self_attn/qkv_proj"]
    assert [name for name, _ in qkv.history] == ["fuse-qkv", "quantize-matmul"]
    assert "3 matmuls stacked" in qkv.notes("fuse-")
    down = rows[0, "mlp/down_proj"]
    assert [name for name, _ in down.history] == ["prune", "quantize-matmul", "narrow-matmul"]
    assert "a rule says skip" in down.notes("quantize") and "0.5 of it become 0 by magnitude" in down.notes("prune")
    assert "layers_1" not in str(down.history) and down.notes("fold-scales") == ""


@pytest.mark.parametrize("measured", [False, True])
def test_the_page_has_the_rows_and_stands_alone(result, tmp_path, measured):
    rows = weight_rows(result, {})
    errors = {row.path: OutputError(0.25, 0.125) for row in rows if row.layer == 1} if measured else {}
    passes = (PassRecord(name="quantize-matmul", matches=7, refused={"a rule says skip: it stays dense": 2}),)
    data = report_data(sample_manifest(passes=passes), result, "8 sequences of 64 tokens of calibration.txt", errors)
    write_report(tmp_path / "report.html", data)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    cells = [[cell.strip() for cell in row] for row in page.rows]
    qkv = next(row for row in cells if row[:2] == ["1", "self_attn/qkv_proj"])
    assert qkv[2:7] == ["128 × 64", "int4 g32 none f16", "4.50", "4.61 kB", "rtn"]
    assert ("25%" in qkv and "12.5%" in qkv) == measured
    if measured:
        unmeasured = next(row for row in cells if row[:2] == ["0", "self_attn/qkv_proj"])
        assert unmeasured.count("–") == 2
    assert len([row for row in cells if len(row) == len(qkv) and row[0] in ("", "0", "1")]) == 9
    assert ["calibration", "8 sequences of 64 tokens of calibration.txt"] in cells
    assert ["quantize-matmul", "7", "2 × a rule says skip: it stays dense"] in cells
    # A chart of sizes, and with errors one for each kind of weight that has them.
    assert [tag for tag, _ in page.tags].count("svg") == (5 if measured else 1)
    assert ("No output errors" in text) != measured
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not [value for _, attrs in page.tags for key, value in attrs.items() if key in ("src", "href")]
    assert "url(" not in text and "@import" not in text and "prefers-color-scheme:dark" in text.replace(" ", "")
    assert set(re.findall(r"https?://[^\"]+", text)) == {"http://www.w3.org/2000/svg"}


def test_everything_is_escaped():
    evil = "<script>alert('x')</script>&\""
    row = WeightRow(evil, 0, evil, (1, 2), evil, 4, evil, ((evil, evil), ("fold-scales", evil)), OutputError(0.1, 0.2))
    data = ReportData(
        evil, [(evil, evil), ("pipeline", evil)], [PassRecord(name=evil, matches=1, refused={evil: 1})], [row]
    )
    page = Page(render(data))
    assert page.open == [] and "script" not in [tag for tag, _ in page.tags]
    assert any(evil in cell for row in page.rows for cell in row)


def test_no_weights_and_no_passes():
    data = report_data(dataclasses.replace(sample_manifest(), passes=()), pipeline(trace_model(tiny(), 4, 2, {}), ""))
    page = Page(render(dataclasses.replace(data, weights=[])))
    assert page.open == [] and ["calibration", "none"] in [[cell.strip() for cell in row] for row in page.rows]
