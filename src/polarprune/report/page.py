"""A report as one HTML page: collects what the page shows, and fills the template with it.

The template is `templates/report.html.j2`. jinja2 escapes every text that it inserts; only the
charts, which matplotlib drew and escaped, go in as they are. jinja2 and matplotlib are optional
dependencies and are imported when the first page is made.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..validation.optional_packages import optional_package
from .facts import (
    JsonObject,
    accuracy_facts,
    cost_facts,
    frozen_reason,
    goal,
    measured_facts,
    odd_widths,
    origin,
    prediction_checks,
    sentence,
    stage_table,
    title,
)
from .loading import loading_lines
from .plots import cost_chart, epsilon_chart, gates_chart, histogram_chart, lambda_chart
from .svg import inline_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .report import Report

_TEMPLATES = Path(__file__).parent / "templates"
_CHARTS: dict[str, Callable[[Report], Figure]] = {
    "Remaining cost": cost_chart,
    "Gates": gates_chart,
    "ε, the softness of the gates": epsilon_chart,
    "λ, the weight of the cost": lambda_chart,
}


class Chart(NamedTuple):
    """A drawn chart and its caption."""

    title: str
    svg: str


class Width(NamedTuple):
    """Channels of a prunable group; `length` of its bar and `kept` part of it are in percent."""

    name: str
    before: int
    after: int
    length: float
    kept: float


def html_page(report: Report) -> str:
    """Return the report as a page that needs no other file and runs no script.

    Raises:
        PruneError: If jinja2 or matplotlib is not installed.
    """
    jinja2 = optional_package("jinja2", needed_for="the HTML page", extra="report")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["unbroken"] = _unbroken
    page: str = environment.get_template("report.html.j2").render(page_content(report))
    return page


def _unbroken(text: str) -> str:
    """Keep a number and its percent sign on one line."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%")


def page_content(report: Report) -> dict[str, object]:
    """Return what the template shows, under the names that it uses."""
    stages = stage_table(report)
    return {
        "title": title(report),
        "warnings": odd_widths(report),
        "goal": sentence(goal(report)),
        "facts": [*cost_facts(report), *accuracy_facts(report), *measured_facts(report)],
        "stage_head": stages[0] if stages else (),
        "stages": stages[1:],
        "checks": prediction_checks(report),
        "charts": _charts(report),
        "histograms": _histograms(report),
        "widths": _widths(report),
        "frozen": _frozen(report),
        "notes": report.notes,
        "load": "\n".join(loading_lines(report)),
        "origin": origin(report),
    }


def _charts(report: Report) -> list[Chart]:
    if not report.history:
        return []
    return [Chart(title, inline_svg(draw(report))) for title, draw in _CHARTS.items()]


def _histograms(report: Report) -> list[Chart]:
    return [
        Chart(f"gate values at step {row['step']:,}", inline_svg(histogram_chart(row)))
        for row in report.snapshots()
    ]


def _widths(report: Report) -> list[Width]:
    """Return the prunable groups, with bars on a common scale."""
    groups = [group for group in report.groups if not group["reason"]]
    widest = max((group["before"] for group in groups), default=1)
    return [_width(group, widest) for group in groups]


def _width(group: JsonObject, widest: int) -> Width:
    before, after = group["before"], group["after"]
    length, kept = 100 * before / max(widest, 1), 100 * after / max(before, 1)
    return Width(str(group["name"]), before, after, length, kept)


def _frozen(report: Report) -> list[tuple[str, str, str]]:
    """Return name, channels and reason of every frozen group."""
    return [
        (str(group["name"]), f"{group['before']:,}", frozen_reason(group))
        for group in report.groups
        if group["reason"]
    ]
