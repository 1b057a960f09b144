"""HTML and SVG out of plain text and numbers; knows nothing of pruning.

What is built here is `Raw`; any other text is escaped on its way into an element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

# Okabe and Ito's colours: told apart by the colour-blind. Dashes tell lines apart in grey print.
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#117733"
_INK, _GREY, _GRID = "#1f2933", "#52606d", "#e1e6eb"

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f7f9; color: #1f2933;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  -webkit-print-color-adjust: exact; print-color-adjust: exact; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 20px 48px; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 4px; }
h2 { font-size: 1.15rem; margin: 0 0 4px; }
p { margin: 0 0 12px; }
.lead { color: #52606d; margin-bottom: 20px; }
.why { color: #52606d; font-size: .9rem; max-width: 80ch; }
section { background: #fff; border: 1px solid #dde3e9; border-radius: 8px; padding: 20px;
  margin-top: 20px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
@media (max-width: 1000px) { .cards { grid-template-columns: repeat(3, 1fr); } }
@media (max-width: 560px) { .cards { grid-template-columns: 1fr 1fr; } }
.card { background: #fff; border: 1px solid #dde3e9; border-top: 3px solid #0072b2;
  border-radius: 8px; padding: 12px 14px; overflow-wrap: anywhere; }
.card b { display: block; font-size: 1.5rem; line-height: 1.3; font-weight: 600;
  font-variant-numeric: tabular-nums; }
.card span { display: block; font-size: .85rem; color: #52606d; line-height: 1.4; }
.card .name { color: #1f2933; font-weight: 600; }
.card .name::first-letter, th::first-letter { text-transform: uppercase; }
.plots { display: grid; gap: 28px 32px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); }
.plots figure { max-width: 560px; }
.panels { display: grid; gap: 12px 8px;
  grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); }
@media (max-width: 560px) { .panels { grid-template-columns: 1fr 1fr; } section { padding: 14px; } }
figure { margin: 0; min-width: 0; break-inside: avoid; }
figcaption { font-weight: 600; font-size: .95rem; }
.legend { display: flex; flex-wrap: wrap; gap: 0 18px; font-size: .85rem; min-height: 1.5em; }
.legend svg { width: 28px; height: 8px; margin-right: 6px; vertical-align: middle;
  display: inline-block; }
svg { display: block; width: 100%; height: auto; font-family: inherit; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; padding: 6px 12px 6px 0; border-bottom: 1px solid #e1e6eb;
  vertical-align: middle; }
th { color: #52606d; font-weight: 600; white-space: nowrap; }
.right { text-align: right; font-variant-numeric: tabular-nums; }
.right + :not(.right) { padding-left: 20px; }
td:first-child { min-width: 8.5em; }
td.bar { width: 45%; min-width: 120px; }
td.bar svg { height: 14px; }
ul { margin: 10px 0 0; padding-left: 1.2em; overflow-wrap: anywhere; }
footer { color: #52606d; font-size: .85rem; margin-top: 20px; overflow-wrap: anywhere; }
@media print { body { background: #fff; } section, .card { break-inside: avoid; }
  main { max-width: none; padding: 0; } }
"""


class Raw(str):
    """Text that is HTML already."""


def tag(name: str, *children: object, **attributes: object) -> Raw:
    """An element; `class_` stands for class, `stroke_width` for stroke-width."""
    shown = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    pairs = "".join(f' {key}="{escape(_plain(value))}"' for key, value in shown.items())
    return Raw(f"<{name}{pairs}>{join(children)}</{name}>")


def join(parts: Iterable[object]) -> Raw:
    return Raw("".join(part if isinstance(part, Raw) else escape(str(part)) for part in parts))


def _plain(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def page(title: str, *body: object) -> str:
    """A whole page that needs no other file and runs nothing."""
    head = tag(
        "head",
        Raw('<meta charset="utf-8">'),
        Raw('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", title),
        tag("style", Raw(_STYLE)),
    )
    content = tag("main", *body)
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', content), lang='en')}\n"


def section(title: str, why: str, *body: object) -> Raw:
    return tag("section", tag("h2", title), tag("p", why, class_="why") if why else "", *body)


def cards(facts: Iterable[tuple[str, str, str]]) -> Raw:
    """Boxes of a name, a value and its detail."""
    boxes = [
        tag("div", tag("span", name, class_="name"), tag("b", value), tag("span", detail),
            class_="card")
        for name, value, detail in facts
    ]  # fmt: skip
    return tag("div", *boxes, class_="cards")


def bullets(lines: Iterable[str]) -> Raw:
    return tag("ul", *(tag("li", line) for line in lines))


def table(head: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[int] = ()) -> Raw:
    """A table; the columns in `right` hold numbers."""
    rule = ["right" if i in right else "" for i in range(len(head))]
    names = [_cell("th", text, kind) for text, kind in zip(head, rule, strict=True)]
    lines = [
        tag("tr", *(_cell("td", text, kind) for text, kind in zip(row, rule, strict=True)))
        for row in rows
    ]
    whole = tag("table", tag("thead", tag("tr", *names)), tag("tbody", *lines))
    return tag("div", whole, class_="scroll")


def _cell(name: str, content: object, kind: str) -> Raw:
    if isinstance(content, Raw):
        kind = "bar"
    else:
        content = str(content).replace(" %", "\N{NO-BREAK SPACE}%")
    return tag(name, content, class_=kind) if kind else tag(name, content)


def bar(before: int, after: int, most: int) -> Raw:
    """How much of a width is left, on a scale that ends at `most`."""
    full, left = (100 * value / max(most, 1) for value in (before, after))
    return _svg(
        100, 10, f"{after} of {before}",
        tag("rect", x=0, y=0, width=full, height=10, fill="#cfd8e0"),
        tag("rect", x=0, y=0, width=left, height=10, fill=BLUE),
        preserveAspectRatio="none",
    )  # fmt: skip


# --- line charts ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One curve of a chart; `dash` as in SVG's stroke-dasharray."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str = BLUE
    dash: str = "none"
    width: float = 2.2


@dataclass(frozen=True)
class _Axis:
    """Values from the first tick to `high`, laid out between two pixels."""

    ticks: Sequence[float]
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        turn: Callable[[float], float] = math.log10 if self.log else float
        low, high = turn(self.ticks[0]), turn(self.high)
        return self.start + (turn(value) - low) / (high - low) * (self.end - self.start)

    def label(self, tick: float) -> str:
        if not self.log:
            return f"{tick:,.6g}"
        exponent = str(round(math.log10(tick)))
        return "10" + exponent.translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


_WIDTH, _HEIGHT = 480, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 466, 10, 224


def line_chart(
    title: str, lines: Sequence[Line], x_name: str, y_name: str, *, log: bool = False
) -> Raw:
    """A figure: curves from x = 0 on, with y from 0 or, if `log`, in powers of ten."""
    lines = [_drawable(line, log) for line in lines]
    points = [point for line in lines for point in line.points]
    heights = [y for _, y in points]
    last = max((x for x, _ in points), default=0) or 1
    x = _Axis([tick for tick in ticks_from_zero([last]) if tick <= last], last, _LEFT, _RIGHT)
    y_ticks = powers_of_ten(heights) if log else ticks_from_zero(heights)
    y = _Axis(y_ticks, y_ticks[-1], _BOTTOM, _TOP, log)
    drawn = _svg(
        _WIDTH, _HEIGHT, f"{title}: {y_name} over {x_name}",
        *_horizontal_axis(x, x_name), *_vertical_axis(y, y_name),
        *(_curve(line, x, y) for line in lines),
    )  # fmt: skip
    return tag("figure", tag("figcaption", title), _legend(lines), drawn)


def _drawable(line: Line, log: bool) -> Line:
    """Without what has no place on the axes: a run may have diverged."""
    points = [(x, y) for x, y in line.points if math.isfinite(y) and (y > 0 or not log)]
    return Line(line.name, points, line.colour, line.dash, line.width)


def ticks_from_zero(values: Sequence[float], count: int = 5) -> list[float]:
    """Round numbers 0, ..., the first at or above all values; whole ones if all values are."""
    high = max(values, default=0.0) or 1.0
    unit = 10.0 ** math.floor(math.log10(high / count))
    step = next(unit * k for k in (1, 2, 2.5, 5, 10) if unit * k * count >= high * (1 - 1e-9))
    if all(float(value).is_integer() for value in values):
        step = math.ceil(step)
    return [step * k for k in range(math.ceil(high / step - 1e-9) + 1)]


def powers_of_ten(values: Sequence[float], most: int = 8) -> list[float]:
    """Powers of ten around the values; every second, third, ... if there would be too many."""
    low = math.floor(math.log10(min(values, default=1.0)) + 1e-9)
    high = max(math.ceil(math.log10(max(values, default=1.0)) - 1e-9), low + 1)
    skip = math.ceil((high - low) / most)
    return [10.0**k for k in range(high - skip * math.ceil((high - low) / skip), high + 1, skip)]


def _horizontal_axis(x: _Axis, name: str) -> list[Raw]:
    parts = [_stroke(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, _GREY)]
    for tick in x.ticks:
        parts.append(_stroke(x(tick), _BOTTOM, x(tick), _BOTTOM + 5, _GREY))
        parts.append(_write(x(tick), _BOTTOM + 20, x.label(tick)))
    return [*parts, _write((_LEFT + _RIGHT) / 2, _HEIGHT - 6, name)]


def _vertical_axis(y: _Axis, name: str) -> list[Raw]:
    parts = []
    for tick in y.ticks:
        parts.append(_stroke(_LEFT, y(tick), _RIGHT, y(tick), _GRID))
        parts.append(_write(_LEFT - 8, y(tick) + 4, y.label(tick), anchor="end"))
    middle = (_TOP + _BOTTOM) / 2
    return [*parts, _write(14, middle, name, transform=f"rotate(-90 14 {middle})")]


def _curve(line: Line, x: _Axis, y: _Axis) -> Raw:
    if len(line.points) == 1:
        ((across, up),) = line.points
        return tag("circle", cx=x(across), cy=y(up), r=3, fill=line.colour)
    path = " ".join(f"{x(across):.1f},{y(up):.1f}" for across, up in line.points)
    return tag(
        "polyline", points=path, fill="none", stroke=line.colour, stroke_width=line.width,
        stroke_dasharray=line.dash, stroke_linejoin="round",
    )  # fmt: skip


def _legend(lines: Sequence[Line]) -> Raw:
    entries = []
    for line in lines if len(lines) > 1 else ():
        sample = tag(
            "line", x1=0, y1=4, x2=28, y2=4, stroke=line.colour, stroke_width=line.width,
            stroke_dasharray=line.dash,
        )  # fmt: skip
        entries.append(tag("span", _svg(28, 8, "", sample), line.name))
    return tag("div", *entries, class_="legend")


# --- histograms -----------------------------------------------------------------------------------


_PANEL = (46, 152, 22, 130)  # left, right, top, bottom of the small plot


def histogram(title: str, counts: Sequence[int], x_name: str, y_name: str, top: float) -> Raw:
    """A small figure: frequencies of values in [0, 1], cut off at `top`; what is cut is written."""
    left, right, ceiling, floor = _PANEL
    x = _Axis([0, 0.5, 1], 1, left, right)
    y = _Axis([0, top / 2, top], top, floor, ceiling)
    parts = []
    for tick in y.ticks:
        parts.append(_stroke(left, y(tick), right, y(tick), _GRID))
        parts.append(_write(left - 4, y(tick) + 4, f"{tick:g}", anchor="end", size=11))
    parts += _bars(counts, x, y)
    parts.append(_stroke(left, floor, right, floor, _GREY))
    parts += [_write(x(tick), floor + 15, f"{tick:g}", size=11) for tick in x.ticks]
    parts.append(_write((left + right) / 2, floor + 31, x_name, size=11))
    parts.append(_write(9, 76, y_name, size=11, transform="rotate(-90 9 76)"))
    return tag("figure", tag("figcaption", title), _svg(160, 166, f"{title}: {x_name}", *parts))


def _bars(counts: Sequence[int], x: _Axis, y: _Axis) -> list[Raw]:
    parts = []
    width = (x.end - x.start) / max(len(counts), 1)
    for i, count in enumerate(counts):
        share = count / max(sum(counts), 1)
        left, height = x.start + i * width, y(min(share, y.high))
        parts.append(
            tag("rect", x=left, y=height, width=width - 0.6, height=y.start - height, fill=BLUE)
        )
        if share > y.high:
            middle = min(max(left + width / 2, x.start + 18), x.end - 14)
            parts.append(_write(middle, y.end - 7, f"↑ {share:.2f}", size=11))
    return parts


# --- pieces of SVG --------------------------------------------------------------------------------


def _svg(width: int, height: int, label: str, *parts: Raw, **attributes: str) -> Raw:
    named = {"role": "img", "aria_label": label} if label else {"aria_hidden": "true"}
    return tag("svg", *parts, viewBox=f"0 0 {width} {height}", **named, **attributes)


def _stroke(x1: float, y1: float, x2: float, y2: float, colour: str) -> Raw:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=colour)


def _write(
    x: float, y: float, text: str, *, anchor: str = "middle", size: int = 13, **more: str
) -> Raw:
    return tag("text", text, x=x, y=y, font_size=size, text_anchor=anchor, fill=_INK, **more)
