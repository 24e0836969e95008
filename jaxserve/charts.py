"""Small charts as SVG text: lines and bars, in light and dark, without any library and any script.

Colours follow the reader's `prefers-color-scheme`, in a file of its own as well as within a page. Points and bars carry
their numbers as tooltips. Values that are None or not finite leave a gap.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence
from html import escape

from jaxserve.errors import UserError

LIGHT = ("#2563c9", "#c2570c", "#15803d", "#9333ea", "#b91c5c", "#0e7490")
DARK = ("#7aa8f7", "#f29b57", "#5cc98a", "#c69bf7", "#f48ab0", "#5cc4d6")
WIDTH = 720
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 34, 40  # room for tick labels, the last point, the title, the axis
LETTER = 7.0  # width of a letter at 12 px, for laying out text that nobody has measured


@dataclasses.dataclass(frozen=True)
class Series:
    """One line of a chart: (x, y) points in the order of x."""

    name: str
    points: Sequence[tuple[float, float | None]]


@dataclasses.dataclass(frozen=True)
class Axis:
    """Maps values from `low`..`high` to pixels from `start` to `end`, evenly or by their logarithms."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    @staticmethod
    def over(values: Sequence[float], start: float, end: float, *, log: bool = False, zero: bool = False) -> "Axis":
        """An axis that shows all of `values`, from 0 on if asked."""
        low, high = (min(values), max(values)) if values else (1.0, 1.0)
        if log:
            low, high = low / 1.1, high * 1.1
        else:
            low = 0.0 if zero and low >= 0 else low
            high += 0.05 * (high - low) if high > low else (abs(high) or 1.0)
        return Axis(low, high, start, end, log)

    def __call__(self, value: float) -> float:
        place = (math.log(value / self.low) / math.log(self.high / self.low)) if self.log else None
        if place is None:
            place = (value - self.low) / (self.high - self.low)
        return round(self.start + place * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Round numbers on the axis: about five of them."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
                found = [d * 10.0**p for p in powers for d in digits if self.low <= d * 10.0**p <= self.high]
                if len(found) >= 3:
                    return found
        raw = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(d * power for d in (1, 2, 2.5, 5, 10) if d * power >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A number for people, to four digits."""
    return "0" if value == 0 else f"{value:.4g}"


def percent(value: float) -> str:
    """A fraction as a percentage."""
    return f"{100 * value:.3g}%"


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x: str = "",
    y: str = "",
    log: bool = False,
    text: Callable[[float], str] = number,
    height: int = 280,
) -> str:
    """Lines over a common x; `log` scales y by its logarithm, where values of 0 and less are left out.

    `text` writes the values of y for people.
    """
    series = [Series(line.name, [point for point in line.points if _shown(point[1], log)]) for line in series]
    legend, legend_height = _legend([line.name for line in series])
    top, floor = TOP + legend_height, height - BOTTOM
    down = Axis.over([v for line in series for _, v in line.points if v is not None], floor, top, log=log, zero=True)
    across = Axis.over([u for line in series for u, _ in line.points], LEFT, WIDTH - RIGHT)
    parts = [_title(title), legend]
    for tick in down.ticks():
        parts.append(f'<path class="grid" d="M{LEFT} {down(tick)}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 8, down(tick) + 4, text(tick), "tick end"))
    for tick in across.ticks():
        parts.append(_text(across(tick), floor + 16, number(tick), "tick middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, height - 6, x, "tick middle"))
    parts.append(_text(LEFT - 8, top - 10, y, "tick"))
    for index, line in enumerate(series):
        places = [(across(u), down(v), u, v) for u, v in line.points if v is not None]
        path = "L".join(f"{px} {py}" for px, py, _, _ in places)
        if len(places) > 1:
            parts.append(f'<path class="line s{index % len(LIGHT)}"{_dash(index)} d="M{path}"/>')
        for px, py, u, v in places:
            label = escape(f"{line.name}, {x} {number(u)}: {text(v)}".replace(",  ", ", "))
            parts.append(
                f'<circle class="s{index % len(LIGHT)}" cx="{px}" cy="{py}" r="3"><title>{label}</title></circle>'
            )
    return _svg(title, height, parts)


def bar_chart(
    title: str,
    bars: Sequence[tuple[str, float | None]],
    *,
    log: bool = False,
    text: Callable[[float], str] = number,
) -> str:
    """One horizontal bar for each (name, value), in their order; `log` measures them from a power of ten."""
    values = [value for _, value in bars if value is not None and _shown(value, log)]
    left = 24 + LETTER * max((len(name) for name, _ in bars), default=0)
    left = min(left, WIDTH / 2)
    across = Axis.over(values, left, WIDTH - 80, zero=True)
    if log and values:
        across = Axis(10.0 ** math.floor(math.log10(min(values))), max(values) * 1.05, left, WIDTH - 80, log=True)
    parts, height = [_title(title)], TOP + 26 * len(bars) + 12
    for index, (name, value) in enumerate(bars):
        row = TOP + 26 * index
        parts.append(_text(left - 8, row + 15, name, "end"))
        if value is None or not _shown(value, log):
            parts.append(_text(left + 6, row + 15, "not finite" if value is not None else "none", "tick"))
            continue
        width = max(1.0, across(value) - left)
        label = f"<title>{escape(f'{name}: {text(value)}')}</title>"
        parts.append(f'<rect class="s0" x="{left:g}" y="{row}" width="{width:.1f}" height="20" rx="2">{label}</rect>')
        parts.append(_text(left + width + 6, row + 15, text(value), ""))
    return _svg(title, height, parts)


def write_chart(path: pathlib.Path, svg: str) -> None:
    """Writes one chart as a file; UserError when its name does not end in .svg, or it cannot be written."""
    if path.suffix != ".svg":
        raise UserError(f"--plot {path}: charts are written as .svg, which browsers and editors show and print")
    try:
        path.write_text(svg)
    except OSError as error:
        raise UserError(f"--plot {path}: {error.strerror}") from None


def _shown(value: float | None, log: bool) -> bool:
    return value is not None and math.isfinite(value) and not (log and value <= 0)


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-label="{escape(title)}"><style>{STYLE}</style><rect class="paper" width="{WIDTH}" height="{height:g}"/>'
        + "".join(part for part in parts if part)
        + "</svg>\n"
    )


def _title(text: str) -> str:
    return _text(12, 20, text, "title")


def _text(x: float, y: float, text: str, classes: str) -> str:
    return f'<text class="{classes}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>' if text else ""


def _dash(index: int) -> str:
    """Lines beyond the number of colours are dashed."""
    return f' stroke-dasharray="{3 * (index // len(LIGHT))} 3"' if index >= len(LIGHT) else ""


def _legend(names: Sequence[str]) -> tuple[str, float]:
    """Names with their colours, in as many rows as they need, and the height of that; nothing for a single line."""
    if len(names) < 2:
        return "", 10.0
    parts, x, row = [], 14.0, 0
    for index, name in enumerate(names):
        width = 26 + LETTER * len(name)
        if x + width > WIDTH - RIGHT and x > 14:
            x, row = 14.0, row + 1
        y = TOP + 4 + 18 * row
        parts.append(f'<path class="line s{index % len(LIGHT)}"{_dash(index)} d="M{x:.1f} {y - 4}h14"/>')
        parts.append(_text(x + 19, y, name, ""))
        x += width + 8
    return "".join(parts), 18.0 * (row + 1) + 16


def _colours(colours: Sequence[str]) -> str:
    return "".join(f"--s{index}:{colour};" for index, colour in enumerate(colours))


STYLE = (
    f".chart{{--ink:#1c1e21;--muted:#5f6672;--grid:#e3e6ea;--paper:#fff;{_colours(LIGHT)}"
    "font:12px system-ui,sans-serif;max-width:100%}"
    "@media(prefers-color-scheme:dark){.chart{--ink:#e6e8eb;--muted:#9aa3af;--grid:#333941;--paper:#181b1f;"
    f"{_colours(DARK)}}}}}"
    ".chart text{fill:var(--ink)}.chart .title{font-weight:600;font-size:13px}"
    ".chart .tick{fill:var(--muted);font-size:11px}.chart .end{text-anchor:end}.chart .middle{text-anchor:middle}"
    ".chart .paper{fill:var(--paper)}.chart .grid{stroke:var(--grid);fill:none}"
    ".chart .line{fill:none;stroke-width:2}"
    + "".join(
        f".chart .line.s{index}{{stroke:var(--s{index})}}"
        f".chart circle.s{index},.chart rect.s{index}{{fill:var(--s{index})}}"
        for index in range(len(LIGHT))
    )
)
