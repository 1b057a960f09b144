"""All charts of a run, drawn with matplotlib: for PNG files and for the page of a report.

matplotlib is an optional dependency, so it is imported when the first chart is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

from ..plain_data import JsonObject
from ..validation.arguments import check_history
from ..validation.optional_packages import optional_package
from .facts import RESOURCE_NAMES, budget_percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .report import Report

# Okabe and Ito's palette, which colour-blind readers can tell apart. Dashes tell lines apart in
# grey print. The page replaces each of these colours by one that fits its light or dark scheme.
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#117733"
INK, MUTED, GRID = "#1f2933", "#52606d", "#e1e6eb"
_HISTOGRAM_TOP = 0.5  # the paper's figure ends here, too
_MANY_DECADES = 8  # a logarithmic axis labels at most this many powers of ten


class Curve(NamedTuple):
    """One line of a chart; `dashes` are lengths in points, empty for a solid line."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str = BLUE
    dashes: tuple[float, ...] = ()
    width: float = 1.8


# --- charts of the page ---------------------------------------------------------------------------


def cost_chart(report: Report) -> Figure:
    """Draw the remaining cost over the steps, with the budgets as dotted lines."""
    return _line_chart(_cost_curves(report), "% of the original")


def gates_chart(report: Report) -> Figure:
    """Draw how many gates are closed, and how many are between 0 and 0.5."""
    curves = [
        _curve(report, "closed", Curve("closed (exactly 0)", ())),
        _curve(report, "between", Curve("between (0 to 0.5)", (), ORANGE, (5, 3))),
    ]
    return _line_chart(curves, "number of gates")


def epsilon_chart(report: Report) -> Figure:
    """Draw ε over the steps on a logarithmic axis."""
    return _line_chart([_curve(report, "eps", Curve("ε", ()))], "ε (log scale)", log=True)


def lambda_chart(report: Report) -> Figure:
    """Draw λ over the steps."""
    return _line_chart([_curve(report, "lam", Curve("λ", ()))], "λ")


def histogram_chart(row: JsonObject) -> Figure:
    """Draw the histogram of gate values in one row of the history."""
    figure = _figure(1.9, 1.9)
    panel = figure.subplots()
    _histogram(panel, row)
    panel.set_xlabel("gate value", fontsize=9, color=INK)
    panel.set_ylabel("frequency", fontsize=9, color=INK)
    panel.tick_params(labelsize=9)
    return figure


def _cost_curves(report: Report) -> list[Curve]:
    styles = {
        "macs": Curve(RESOURCE_NAMES["macs"], ()),
        "params": Curve(RESOURCE_NAMES["params"], (), ORANGE, (5, 3)),
        "latency": Curve(RESOURCE_NAMES["latency"], (), GREEN, (7, 2, 1.5, 2)),
    }
    styles = {key: style for key, style in styles.items() if key in report.history[0]}
    curves = [_curve(report, key, style, 100) for key, style in styles.items()]
    last = float(report.history[-1]["step"])
    for key, style in styles.items():
        if limit := report.settings.get(key):
            flat = [(0.0, 100 * limit), (last, 100 * limit)]
            name = f"budget of {RESOURCE_NAMES[key]}, {budget_percent(limit)}"
            curves.append(Curve(name, flat, style.colour, (1.5, 3), 1.3))
    return curves


def _curve(report: Report, key: str, style: Curve, factor: float = 1) -> Curve:
    return style._replace(points=[(row["step"], factor * row[key]) for row in report.history])


def _line_chart(curves: Sequence[Curve], y_name: str, *, log: bool = False) -> Figure:
    """Draw curves over the steps: y starts at 0, or covers powers of ten if `log`."""
    figure = _figure(4.8, 3.0)
    panel = figure.subplots()
    curves = [_drawable(curve, log) for curve in curves]
    for curve in curves:
        _draw_curve(panel, curve)
    _step_axis(panel, curves)
    panel.set_ylabel(y_name, color=INK)
    if log:
        _log_axis(panel, [y for curve in curves for _, y in curve.points])
    else:
        panel.set_ylim(0, panel.get_ylim()[1])
        panel.yaxis.set_major_formatter("{x:,.6g}")
    _style(panel)
    if len(curves) > 1:
        figure.legend(loc="outside upper left", ncols=2, frameon=False, labelcolor=INK, fontsize=9)
    return figure


def _drawable(curve: Curve, log: bool) -> Curve:
    """Leave out points that have no place on the axes: a run may have diverged."""
    points = [(x, y) for x, y in curve.points if math.isfinite(y) and (y > 0 or not log)]
    return curve._replace(points=points)


def _draw_curve(panel: Axes, curve: Curve) -> None:
    look: dict[str, Any] = {"color": curve.colour, "lw": curve.width, "label": curve.name}
    if curve.dashes:
        look["dashes"] = curve.dashes
    if len(curve.points) == 1:  # a line of one point would be invisible
        look["marker"] = "o"
    panel.plot([x for x, _ in curve.points], [y for _, y in curve.points], clip_on=False, **look)


def _step_axis(panel: Axes, curves: Sequence[Curve]) -> None:
    last = max((x for curve in curves for x, _ in curve.points), default=0)
    panel.set_xlim(0, last or 1)
    panel.set_xlabel("step", color=INK)
    panel.locator_params(axis="x", nbins=6, integer=True)
    panel.xaxis.set_major_formatter("{x:,.0f}")


def _log_axis(panel: Axes, heights: Sequence[float]) -> None:
    """Use a logarithmic y axis with whole powers of ten at its ends."""
    bottom = math.floor(math.log10(min(heights, default=1.0)) + 1e-9)
    top = max(math.ceil(math.log10(max(heights, default=1.0)) - 1e-9), bottom + 1)
    skip = math.ceil((top - bottom) / _MANY_DECADES)
    panel.set_yscale("log")
    panel.set_ylim(10.0**bottom, 10.0**top)
    panel.set_yticks([10.0**k for k in range(top, bottom - 1, -skip)])
    panel.set_yticks([], minor=True)
    panel.yaxis.set_major_formatter("{x:.0e}")


# --- PNG files ------------------------------------------------------------------------------------


def save_gate_histogram(report: Report, path: str | PathLike[str]) -> None:
    """Write the paper's figure as PNG: histograms of gate values at seven steps of the training.

    Args:
        report: A report with a history, from `pruner.report()`.
        path: The file to write.

    Raises:
        PruneError: If the report has no history, or matplotlib is not installed.
    """
    rows = report.snapshots(7)
    check_history(rows)
    figure = _figure(2 * len(rows), 2.4)
    panels = figure.subplots(1, len(rows), sharey=True, squeeze=False)[0]
    for panel, row in zip(panels, rows, strict=True):
        _histogram(panel, row)
    panels[0].set_ylabel("frequency of gates")
    figure.supxlabel("gate value", fontsize=10)
    figure.savefig(path, format="png", dpi=200)


def save_curve(rows: list[JsonObject], measure: str, path: str | PathLike[str]) -> None:
    """Write the result of a sweep as PNG: the score over the remaining MACs, and the Pareto front.

    Args:
        rows: For each trial `macs` (a fraction), `score`, `baseline` and `pareto` (whether it is on
            the front).
        measure: Name of the score, for the axis.
        path: The file to write.

    Raises:
        PruneError: If matplotlib is not installed.
    """
    figure = _figure(4.4, 3.2)
    panel = figure.subplots()
    _baseline(panel, rows[0]["baseline"])
    front = sorted((100 * row["macs"], row["score"]) for row in rows if row["pareto"])
    others = [(100 * row["macs"], row["score"]) for row in rows if not row["pareto"]]
    panel.plot(*zip(*front, strict=True), "o-", color=BLUE, ms=5, label="Pareto front")
    if others:
        panel.plot(*zip(*others, strict=True), "o", color=MUTED, mfc="none", ms=5, label="others")
        panel.legend(frameon=False, fontsize=9)
    panel.set(xlabel="MACs left (%)", ylabel=measure)
    panel.margins(0.08, 0.15)
    panel.grid(color=GRID)
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", dpi=200)


def save_comparison(
    rows: list[JsonObject], measure: str, shown: Callable[[float], str], path: str | PathLike[str]
) -> None:
    """Write a comparison of methods as PNG: their scores, and beside it what each training costs.

    Args:
        rows: For each method `name`, `scores` (one for each seed), `score` (their mean),
            `deviation` (None for one seed), `relative_cost`, and `baseline`; ours first.
        measure: Name of the score, for the axis.
        shown: Turns a score into text.
        path: The file to write.

    Raises:
        PruneError: If matplotlib is not installed.
    """
    figure = _figure(7.2, 1.3 + 0.42 * len(rows))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    for row_number, row in enumerate(rows):
        colour = BLUE if row_number == 0 else MUTED
        left.errorbar(
            row["score"],
            row_number,
            xerr=row["deviation"],
            fmt="|",
            ms=14,
            mew=2.2,
            capsize=0,
            lw=1.4,
            color=colour,
        )
        left.plot(
            row["scores"], [row_number] * len(row["scores"]), "o", ms=4, color=colour, alpha=0.5
        )
        right.barh(row_number, row["relative_cost"], 0.55, color=colour)
        right.text(
            row["relative_cost"],
            row_number,
            f" {row['relative_cost']:.2f}",
            va="center",
            fontsize=9,
            color=INK,
        )
    left.axvline(rows[0]["baseline"], color=ORANGE, ls="--", lw=1)
    left.set_title(f"dashed: original network, {shown(rows[0]['baseline'])}", fontsize=9, color=INK)
    left.set_yticks(range(len(rows)), [row["name"] for row in rows])
    left.invert_yaxis()
    left.set_xlabel(f"{measure} (dots: seeds; lines: mean ± deviation)", color=INK)
    percent = shown(0.5).endswith("%")
    left.xaxis.set_major_formatter(lambda x, _: f"{100 * x:g}%" if percent else shown(x))
    left.locator_params(axis="x", nbins=5)
    left.margins(x=0.08)
    right.set_xlabel("training cost", color=INK)
    right.set_xlim(0, 1.35 * max(row["relative_cost"] for row in rows))
    for panel in (left, right):
        _style(panel)
        panel.grid(axis="y", visible=False)
    left.grid(axis="x", color=GRID)
    figure.savefig(path, format="png", dpi=200)


def _baseline(panel: Axes, score: float) -> None:
    """Mark the score of the original network with a dashed line."""
    panel.axhline(score, color=MUTED, ls="--", lw=1)
    panel.annotate(
        "original network",
        (1, score),
        (0, 3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        color=MUTED,
    )


# --- shared parts ---------------------------------------------------------------------------------


def _figure(width: float, height: float) -> Figure:
    """Return an empty figure, made without pyplot and its global state."""
    module = optional_package("matplotlib.figure", needed_for="a picture", extra="report")
    figure: Figure = module.Figure(figsize=(width, height), layout="constrained")
    return figure


def _style(panel: Axes) -> None:
    """Use a light grid instead of a box and tick marks."""
    panel.grid(axis="y", color=GRID)
    panel.set_axisbelow(True)
    panel.tick_params(which="both", left=False, bottom=False, labelcolor=INK)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.spines["bottom"].set_color(MUTED)


def _histogram(panel: Axes, row: JsonObject) -> None:
    bars(panel, row["histogram"])
    panel.set_yticks([0, 0.25, 0.5], ["0", "0.25", "0.5"])
    panel.set_title(f"step {row['step']:,}", fontsize=10, color=INK)
    _style(panel)


def bars(panel: Axes, counts: Iterable[int], colour: str = BLUE) -> None:
    """Draw a histogram of values in [0, 1] as fractions of all values.

    Args:
        panel: The axes to draw on.
        counts: Number of values in each bin, from 0 to 1.
        colour: Colour of the bars.

    A bar above 0.5, where the axis ends, gets its height as text.
    """
    counts = list(counts)
    width = 1 / len(counts)
    shares = [count / max(sum(counts), 1) for count in counts]
    edges = [i * width for i in range(len(counts))]
    panel.bar(edges, shares, width, align="edge", color=colour, edgecolor="white", lw=0.4)
    for edge, share in zip(edges, shares, strict=True):
        if share > _HISTOGRAM_TOP:
            side, x = ("right", edge - 0.02) if edge > 0.5 else ("left", edge + width + 0.02)
            y = 0.98 * _HISTOGRAM_TOP
            panel.text(x, y, f"{share:.2f} ↑", ha=side, va="top", fontsize=9, color=INK)
    panel.set(xlim=(0, 1), ylim=(0, _HISTOGRAM_TOP))
    panel.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
