"""Charts are well-formed SVG, hold every number, and survive odd ones."""

import math
import xml.etree.ElementTree as ET

import pytest

from jaxserve.charts import Axis, Series, bar_chart, line_chart, percent, write_chart
from jaxserve.errors import UserError

SVG = "{http://www.w3.org/2000/svg}"


def elements(svg: str, tag: str) -> list[ET.Element]:
    return list(ET.fromstring(svg).iter(SVG + tag))


def tooltips(svg: str) -> list[str]:
    return [element.text or "" for element in elements(svg, "title")]


def test_lines_hold_every_point_and_leave_gaps():
    lines = [Series("a & <b>", [(0, 0.5), (1, None), (2, math.nan), (3, 0.25)]), Series("c", [(0, 0.125)])]
    svg = line_chart("A <title>", lines, x="layer", y="error", text=percent)
    assert tooltips(svg) == ["a & <b>, layer 0: 50%", "a & <b>, layer 3: 25%", "c, layer 0: 12.5%"]
    texts = [element.text for element in elements(svg, "text")]
    assert {"A <title>", "layer", "error", "a & <b>", "c"} <= set(texts)  # two lines have a legend
    first, second, third = elements(svg, "circle")
    assert float(first.attrib["cy"]) < float(second.attrib["cy"]) < float(third.attrib["cy"])  # larger is higher
    assert float(first.attrib["cx"]) < float(second.attrib["cx"])
    height = float(ET.fromstring(svg).attrib["viewBox"].split()[3])
    assert all(0 < float(circle.attrib["cy"]) < height for circle in (first, second, third))


def test_a_single_line_needs_no_legend():
    svg = line_chart("t", [Series("only", [(0, 1.0), (1, 2.0)])])
    assert "only" not in [element.text for element in elements(svg, "text")]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "points", [[], [(0, 3.0)], [(0, 3.0), (1, 3.0)], [(0, 0.0), (1, 1e-9)], [(0, -2.0), (1, 1e12)], [(0, math.inf)]]
)
def test_odd_values(points, log):
    svg = line_chart("t", [Series("a", points), Series("b", points)], log=log)
    assert "nan" not in svg and "inf" not in svg.split("</style>")[1]
    ET.fromstring(svg)


def test_a_logarithmic_axis_spaces_factors_evenly():
    axis = Axis.over([1, 100], 0, 200, log=True)
    assert axis(10) - axis(1) == pytest.approx(axis(100) - axis(10), abs=0.2)
    assert {1, 10, 100} <= set(Axis.over([1, 100], 0, 200, log=True).ticks())


def test_ticks_are_round_and_few():
    assert Axis(0.0, 0.097, 0, 1).ticks() == pytest.approx([0, 0.02, 0.04, 0.06, 0.08])
    for low, high in ((0, 1), (3, 17), (-5, 5), (0, 1e-6), (19.2, 19.3), (0, 29)):
        assert 3 <= len(Axis(low, high, 0, 1).ticks()) <= 8


def test_bars():
    svg = bar_chart("Perplexity", [("f32", 19.23), ("w<4>", 38.46), ("broken", math.inf), ("missing", None)])
    assert tooltips(svg) == ["f32: 19.23", "w<4>: 38.46"]
    small, large = (float(r.attrib["width"]) for r in elements(svg, "rect") if "paper" not in r.attrib["class"])
    assert large == pytest.approx(2 * small, rel=0.01)  # bars begin at zero
    assert {"not finite", "none"} <= {element.text for element in elements(svg, "text")}
    ET.fromstring(bar_chart("none", []))
    ET.fromstring(bar_chart("log", [("a", 20.0), ("b", 3000.0)], log=True))


def test_files(tmp_path):
    write_chart(tmp_path / "a.svg", line_chart("t", []))
    ET.parse(tmp_path / "a.svg")
    with pytest.raises(UserError, match=r"a\.png: charts are written as \.svg"):
        write_chart(tmp_path / "a.png", "")
    with pytest.raises(UserError, match="No such file"):
        write_chart(tmp_path / "no" / "a.svg", "")
