"""report.html of an artifact: what every pass did to every weight, what it takes and what it costs in accuracy.

One page without scripts, links and a network: inline styles and SVG, readable in light and dark.
"""

import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence

import jinja2
import numpy as np

from jaxserve._compat import JaxprEqn
from jaxserve.charts import Series, bar_chart, line_chart, percent
from jaxserve.error_meter import OutputError, fusion_plan
from jaxserve.manifest import Manifest, PassRecord
from jaxserve.pallas_kernels import QuantFormat
from jaxserve.passes.graph import Graph, Input
from jaxserve.passes.pipeline import PipelineResult, Stage
from jaxserve.passes.stack_layers import unstacked


@dataclasses.dataclass(frozen=True)
class WeightRow:
    """One weight of the final graph.

    `layer` is None outside the layers; `kind` says which weight of a layer it is; `form` how it is stored, in `nbytes`
    bytes with scales and all; `method` how its codes were chosen; `scales` where the inverse of what its inputs were
    scaled by went, or why they were not; `history` holds (pass, what it did) in order.
    """

    path: str
    layer: int | None
    kind: str
    shape: tuple[int, ...]
    form: str
    nbytes: int
    method: str = ""
    scales: str = ""
    history: tuple[tuple[str, str], ...] = ()
    error: OutputError = dataclasses.field(default_factory=OutputError)

    @property
    def bits(self) -> float:
        """Bits a number, scales included."""
        return 8 * self.nbytes / math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class ReportData:
    """All that the page says. `facts` are lines of (what, how much) for its top."""

    title: str
    facts: Sequence[tuple[str, str]]
    passes: Sequence[PassRecord]
    weights: Sequence[WeightRow]


def report_data(
    manifest: Manifest,
    result: PipelineResult,
    calibration: str = "",
    errors: Mapping[str, OutputError] | None = None,
) -> ReportData:
    """The data of a compile; `calibration` says on what text, `errors` are by the path of the final weight."""
    return ReportData(
        title=f"{manifest.model.name} · {manifest.recipe}",
        facts=_facts(manifest, calibration),
        passes=manifest.passes,
        weights=weight_rows(result, errors or {}),
    )


def write_report(path: pathlib.Path, data: ReportData) -> None:
    """Writes the page."""
    path.write_text(render(data), encoding="utf-8")


def render(data: ReportData) -> str:
    """The page as text; everything that comes from a model or a user is escaped."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"percent": percent, "bytes": _bytes}
    template = environment.from_string(TEMPLATE)
    return template.render(
        data=data, charts=_charts(data.weights), measured=any(_measured(row) for row in data.weights)
    )


def weight_rows(result: PipelineResult, errors: Mapping[str, OutputError]) -> list[WeightRow]:
    """A row for every parameter of two and more axes in the final graph, but with layers not stacked, in the order in
    which they are read; the arrays of a quantized weight make one row."""
    fused, rows = fusion_plan(result.stages), []
    for path, (reader, entries) in _grouped(unstacked(result)).items():
        form: QuantFormat | None = reader.params.get("format")
        shape = entries[0].aval.shape if form is None else tuple(reader.params["shape"])
        if len(shape) < 2:
            continue
        activation = reader.params.get("activation")
        places = [_place(part) for part in dict.fromkeys((path, *fused.originals(path)))]
        history = tuple(_history(result.stages, places))
        parts = _place(path).split("/")
        layer = re.fullmatch(r"\D*_(\d+)", parts[0])
        rows.append(
            WeightRow(
                path=path,
                layer=int(layer[1]) if layer else None,
                kind="/".join(parts[1:] if layer else parts),
                shape=shape,
                form=str(form or np.dtype(entries[0].aval.dtype).name) + (f" × {activation}" if activation else ""),
                nbytes=sum(_nbytes(entry) for entry in entries),
                method=_method(history, form),
                scales=_scales(history, places),
                history=history,
                error=errors.get(path, OutputError()),
            )
        )
    return rows


def _grouped(graph: Graph) -> dict[str, tuple[JaxprEqn, list[Input]]]:
    """Parameters by weight, with the equation that reads them first.

    The arrays of a quantized weight share the path above theirs.
    """
    groups: dict[str, tuple[JaxprEqn, list[Input]]] = {}
    for eqn in graph.eqns:
        for entry in filter(None, map(graph.param_of, eqn.invars)):
            path = entry.path if eqn.params.get("format") is None else entry.path.rsplit("/", 1)[0]
            _, entries = groups.setdefault(path, (eqn, []))
            if entry not in entries:
                entries.append(entry)
    return groups


def _place(path: str) -> str:
    """The module that a weight belongs to."""
    return re.sub(r"/(kernel|embedding)$", "", path)


def _nbytes(entry: Input) -> int:
    return math.prod(entry.aval.shape) * np.dtype(entry.aval.dtype).itemsize


def _history(stages: Sequence[Stage], places: Sequence[str]) -> list[tuple[str, str]]:
    """What the passes report of the matmuls at some places: the entries that name them."""
    named = re.compile("|".join(rf"(?<![\w/]){re.escape(place)}(?!\w)" for place in places))
    quiet = ("canonicalize", "lower-dense-matmul")  # every weight goes through them
    return [
        (stage.step.name, str(entry))
        for stage in stages
        if stage.step.name not in quiet
        for entry in stage.result.report
        if named.search(str(entry))
    ]


def _scales(history: Sequence[tuple[str, str]], places: Sequence[str]) -> str:
    """What fold-scales reports of the inputs of a weight, in short; the parts of a fused weight have one scale."""
    found = {}
    for name, note in history:
        where, _, text = note.partition(": ")
        if name == "fold-scales" and _place(where) in places:
            into = re.search(r"1/s into ([^,;]+)", text)
            text = f"into {into[1]}" if into else text.removeprefix("no match, ")
            found[re.sub(r"layers_\d+/|/(kernel|scale)\b", "", text)] = None
    return "; ".join(found)


def _method(history: Sequence[tuple[str, str]], form: QuantFormat | None) -> str:
    """How the codes of a weight were chosen, from what the pass that did so reports; empty if it is not quantized."""
    if form is None:
        return ""
    notes = [re.search(r" by (\w+)", note) for name, note in history if name == "quantize-matmul"]
    return next((found[1] for found in notes if found), "as stored")


def _facts(manifest: Manifest, calibration: str) -> list[tuple[str, str]]:
    sizes, limits = manifest.sizes, manifest.limits
    per_token = sum(group.bytes_per_token for group in manifest.cache_groups)
    kinds = ", ".join(dict.fromkeys(group.format or "unknown" for group in manifest.cache_groups))
    return [
        ("model", f"{manifest.model.name} ({manifest.model.family}), from {manifest.model.origin}"),
        ("recipe", f"{manifest.recipe}, activations {manifest.activations}, target {manifest.target}"),
        ("pipeline", manifest.pass_spec),
        ("weights", f"{_bytes(sizes.checkpoint_bytes)} in the checkpoint, {_bytes(sizes.weight_bytes)} here"),
        ("KV cache", f"{per_token} bytes a token ({kinds}), room for {limits.kv_tokens} tokens"),
        ("calibration", calibration or "none"),
        ("versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
    ]


def _bytes(size: float) -> str:
    return f"{size / 1e6:.3g} MB" if size >= 1e6 else f"{size / 1e3:.3g} kB"


def _measured(row: WeightRow) -> bool:
    return row.error.before is not None or row.error.after is not None


def _charts(rows: Sequence[WeightRow]) -> list[str]:
    """Where the bytes are; and, for each kind of weight that was measured, its error by layer."""
    kinds = dict.fromkeys(row.kind for row in rows)
    sizes = [(kind, float(sum(row.nbytes for row in rows if row.kind == kind))) for kind in kinds]
    charts = [bar_chart("Bytes of the weights", sizes, text=_bytes)]
    for kind in kinds:
        found = [row for row in rows if row.kind == kind and row.layer is not None and _measured(row)]
        if found:
            lines = [
                _line("round to nearest", found, lambda error: error.before),
                _line("this artifact", found, lambda error: error.after),
            ]
            lines = [line for line in lines if any(value is not None for _, value in line.points)]
            title = f"Relative output error, {kind}"
            charts.append(line_chart(title, lines, x="layer", text=percent, height=220))
    return charts


def _line(name: str, rows: Sequence[WeightRow], pick: Callable[[OutputError], float | None]) -> Series:
    return Series(name, [(row.layer, pick(row.error)) for row in rows if row.layer is not None])


TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ data.title }}</title>
<style>
:root { --ink: #1c1e21; --muted: #5f6672; --line: #e3e6ea; --paper: #fff; --head: #f4f6f8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --muted: #9aa3af; --line: #333941; --paper: #181b1f; --head: #22262b }
}
body { color: var(--ink); background: var(--paper); font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto;
  padding: 0 1rem; max-width: 1280px }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: .25rem .6rem; border-bottom: 1px solid var(--line) }
thead th { position: sticky; top: 0; background: var(--head) }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.muted, summary { color: var(--muted) }
summary { white-space: nowrap }
.scroll { overflow-x: auto }
code { font: 12px ui-monospace, monospace; overflow-wrap: anywhere }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1rem }
.charts > div { max-width: 720px }
</style>
</head>
<body>
<h1>{{ data.title }}</h1>
<table>
{% for name, fact in data.facts %}
<tr><th scope="row">{{ name }}</th>
<td>{% if name == "pipeline" %}<code>{{ fact }}</code>{% else %}{{ fact }}{% endif %}</td></tr>
{% endfor %}
</table>
<div class="charts">
{% for chart in charts %}
<div>{{ chart | safe }}</div>
{% endfor %}
</div>
<h2>Weights</h2>
{% if measured %}
<p class="muted">The error is ‖XWᵀ − XQᵀ‖ / ‖XWᵀ‖ on the calibration text: of rounding the original
weight to nearest, and of what this artifact holds; – where no pass measured it.</p>
{% else %}
<p class="muted">No output errors: they are measured where a pass collects the products of activations (AWQ, GPTQ).</p>
{% endif %}
<div class="scroll"><table>
<thead><tr><th>layer</th><th>weight</th><th class="n">shape</th><th>form</th><th class="n">bits</th>
<th class="n">size</th><th>method</th><th>scale</th>
{% if measured %}<th class="n">rounded</th><th class="n">error</th>{% endif %}<th></th></tr></thead>
<tbody>
{% for row in data.weights %}
<tr><td>{{ "" if row.layer is none else row.layer }}</td><td>{{ row.kind }}</td>
<td class="n">{{ row.shape | join(" × ") }}</td><td>{{ row.form }}</td>
<td class="n">{{ "%.2f" | format(row.bits) }}</td><td class="n">{{ row.nbytes | bytes }}</td>
<td>{{ row.method }}</td><td>{{ row.scales }}</td>
{% if measured %}
<td class="n">{{ "–" if row.error.before is none else row.error.before | percent }}</td>
<td class="n">{{ "–" if row.error.after is none else row.error.after | percent }}</td>
{% endif %}
<td>{% if row.history %}<details><summary>passes</summary>
{% for name, note in row.history %}<div><b>{{ name }}</b> {{ note }}</div>{% endfor %}</details>{% endif %}</td></tr>
{% endfor %}
</tbody>
</table></div>
<h2>Passes</h2>
<div class="scroll"><table>
<thead><tr><th>pass</th><th class="n">matches</th><th>refused, and why</th></tr></thead>
<tbody>
{% for entry in data.passes %}
<tr><td>{{ entry.name }}</td><td class="n">{{ entry.matches }}</td>
<td>{% for reason, count in entry.refused.items() %}<div>{{ count }} × {{ reason }}</div>{% endfor %}</td></tr>
{% endfor %}
</tbody>
</table></div>
</body>
</html>
"""
