"""What a pruning run did: data first; text, Markdown, JSON and HTML are views of it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple

from ..errors import PruneError
from . import html
from .html import BLUE, GREEN, ORANGE, Line, Raw

_NAMES = {"macs": "MACs", "params": "params", "memory": "memory (bytes)",
          "latency": "latency (ns)"}  # fmt: skip
_TITLE = "polarprune report"
_KINDS = {"settings": dict, "before": dict, "after": dict, "groups": list, "history": list,
          "proof": dict, "notes": list, "results": dict}  # fmt: skip


@dataclass(frozen=True)
class Report:
    """The facts of one run.

    `history` has a row for every look at the gates: step, macs, params, latency (shares of the
    original), closed, between (gates in (0, 0.5]), eps, lam, histogram (of gate values, 20 bins).
    `results` is what was measured around the run, all of it optional: table (rows of stage,
    accuracy, macs, params), identical_predictions, test_images, largest_difference, latency_ms
    (before, after, runs), machine, versions.
    """

    settings: dict[str, Any]
    before: dict[str, int]
    after: dict[str, int]
    groups: list[dict[str, Any]]
    history: list[dict[str, Any]] = field(repr=False)
    proof: dict[str, float]
    notes: list[str]
    results: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        try:
            return json.dumps(dataclasses.asdict(self), indent=2)
        except (TypeError, ValueError, RecursionError) as error:  # of what a user put in
            raise PruneError(
                f"report: it holds what JSON cannot ({error}). Give plain data as results: texts, "
                f"numbers, lists and dicts."
            ) from error

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that `to_json` wrote."""
        try:
            found = cls(**json.loads(text))
            for name, kind in _KINDS.items():
                if not isinstance(getattr(found, name), kind):
                    raise TypeError(f"{name} is no {kind.__name__}")
            found.to_html(), found.to_markdown(), str(found)  # what cannot be shown is none
            return found
        except Exception as error:  # whatever may be in a text
            raise PruneError(
                f"report: this is not what Report.to_json() writes ({error}). Give the text of "
                f"such a file, of this version of polarprune."
            ) from error

    def snapshots(self, count: int = 7) -> list[dict[str, Any]]:
        """At most `count` rows of the history, evenly spread, the first and the last among them."""
        if not isinstance(count, Integral) or count < 2:
            raise PruneError(f"snapshots: count={count!r}; give a whole number from 2 on.")
        last = len(self.history) - 1
        if last < count:
            return list(self.history)
        return [self.history[round(i * last / (count - 1))] for i in range(count)]

    def __str__(self) -> str:
        parts = [
            [f"{_TITLE}: {_goal(self)}"],
            _aligned(_cost_table(self)),
            _aligned(_group_table(self), left=(0, 4)),
            _aligned(_stage_table(self)),
            [f"{name}: {value} ({detail})" if detail else f"{name}: {value}"
             for name, value, detail in _measured(self)],
            [*_checks(self), *_origin(self)],
            [f"note: {note}" for note in self.notes],
        ]  # fmt: skip
        return "\n\n".join("\n".join(lines) for lines in parts if lines)

    def to_markdown(self) -> str:
        facts = [f"**{name}**: {_escaped(value)}" + (f" ({_escaped(detail)})" if detail else "")
                 for name, value, detail in _measured(self)]  # fmt: skip
        remarks = [_escaped(line) for line in [*_checks(self), *_origin(self)]]
        parts = [
            [f"# {_TITLE}", "", _escaped(_sentence(_goal(self)))],
            _piped("Cost", _cost_table(self)),
            _piped("Before and after removal", _stage_table(self)),
            _listed("Measured", [*facts, *remarks]),
            _piped("Groups", _group_table(self), left=(0, 4)),
            _listed("Notes", [_escaped(note) for note in self.notes]),
        ]
        return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"

    def to_html(self) -> str:
        """One page that needs no other file: cards, tables, and charts of the way there."""
        return html.page(
            _TITLE,
            html.tag("h1", _TITLE),
            html.tag("p", _sentence(_goal(self)), class_="lead"),
            html.cards([*_cost_cards(self), *_accuracy(self), *_measured(self)]),
            _stages_section(self),
            _history_section(self),
            _histogram_section(self),
            _widths_section(self),
            _whole_section(self),
            html.section("Notes", "", html.bullets(self.notes)) if self.notes else "",
            _footer(self),
        )


# --- the facts, in words --------------------------------------------------------------------------


class _Cost(NamedTuple):
    name: str
    before: int
    after: int
    share: float
    limit: float | None

    @property
    def verdict(self) -> str:
        """Empty without a budget."""
        if self.limit is None:
            return ""
        met = self.after <= self.limit * self.before * (1 + 1e-12)
        return f"budget {_budget(self.limit)}, {'met' if met else 'not met'}"


def _costs(report: Report) -> list[_Cost]:
    return [
        _Cost(_NAMES.get(key, key), whole, report.after[key],
              report.after[key] / max(whole, 1), report.settings.get(key))
        for key, whole in report.before.items()
    ]  # fmt: skip


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _small(gap: float) -> str:
    return f"{gap:.1e}" if gap else "0"


def _budget(limit: float) -> str:
    return f"{100 * limit:.6g} %"  # as the user gave it: 50 %, 46.65 %


def _goal(report: Report) -> str:
    settings = report.settings
    limits = [f"{c.name} {_budget(c.limit)}" for c in _costs(report) if c.limit is not None]
    parts = [f"budget {', '.join(limits)} of the original"] if limits else []
    if "lam" in settings:
        parts.append(f"fixed λ = {settings['lam']:g}, no budget")
    if report.history and "steps" in settings:
        parts.append(f"step {report.history[-1]['step']:,} of {settings['steps']:,}")
    if settings.get("multiple_of", 1) > 1:
        parts.append(f"widths in multiples of {settings['multiple_of']}")
    if report.after == report.before:
        parts.append("no channel is closed")  # said aloud: in λ's mode this is a real outcome
    return "; ".join(parts) or "no settings"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _cost_cards(report: Report) -> list[tuple[str, str, str]]:
    facts = []
    for cost in _costs(report):
        amount = f"{cost.after:,} of {cost.before:,}"
        detail = f"{amount}; {cost.verdict}" if cost.verdict else amount
        facts.append((cost.name, _percent(cost.share), detail))
    return facts


def _measured(report: Report) -> list[tuple[str, str, str]]:
    """Name, value and detail of what was measured, where it was; accuracies have their table."""
    return [*_latency(report), *_difference(report)]


def _accuracy(report: Report) -> list[tuple[str, str, str]]:
    rows = [row for row in report.results.get("table", ()) if row.get("accuracy") is not None]
    if not rows:
        return []
    earlier = [f"{row.get('stage', '?')} {_percent(row['accuracy'])}" for row in rows[:-1]]
    stage = str(rows[-1].get("stage", ""))
    return [("accuracy", _percent(rows[-1]["accuracy"]), "; ".join([stage, *earlier]))]


def _latency(report: Report) -> list[tuple[str, str, str]]:
    latency = report.results.get("latency_ms") or {}
    if "after" not in latency:
        return []
    details = []
    if "before" in latency:
        speedup = latency["before"] / latency["after"] if latency["after"] else math.inf
        details.append(f"before {latency['before']:.3g} ms, {speedup:.2f} times as fast")
    if "runs" in latency:
        details.append(f"{latency['runs']} runs")
    return [("latency", f"{latency['after']:.3g} ms", "; ".join(details))]


def _difference(report: Report) -> list[tuple[str, str, str]]:
    name = "largest difference"
    if not report.proof:
        return [(name, "not measured", "export() compares the small model with the gated one")]
    modes = ", ".join(f"{mode} {_small(gap)}" for mode, gap in report.proof.items())
    detail = f"small model against gated one, relative: {modes}"
    return [(name, _small(max(report.proof.values())), detail)]


def _checks(report: Report) -> list[str]:
    """Were the predictions the same before and after removal, on data of the user's own?"""
    results, lines = report.results, []
    images = f"{results['test_images']:,} test images" if "test_images" in results else "test data"
    if "identical_predictions" in results:
        same = "identical" if results["identical_predictions"] else "NOT identical"
        lines.append(f"predictions before and after removal: {same} ({images})")
    if "largest_difference" in results:
        gap = _small(results["largest_difference"])
        lines.append(f"largest difference of outputs before and after removal: {gap} ({images})")
    return lines


def _origin(report: Report) -> list[str]:
    machine, versions = (report.results.get(key) for key in ("machine", "versions"))
    lines = [f"machine: {machine}"] if machine else []
    if versions:
        lines.append("versions: " + ", ".join(f"{name} {v}" for name, v in versions.items()))
    return lines


# --- tables, as rows of text ----------------------------------------------------------------------

_Rows = list[tuple[str, ...]]


def _cost_table(report: Report) -> _Rows:
    rows = [
        (c.name, f"{c.before:,}", f"{c.after:,}", _percent(c.share), c.verdict)
        for c in _costs(report)
    ]
    return [("", "before", "after", "share", ""), *rows]


def _group_table(report: Report) -> _Rows:
    rows = [
        (str(g["name"]), f"{g['before']:,}", "->", f"{g['after']:,}", _fate(g))
        for g in report.groups
    ]
    before, after = (sum(group[key] for group in report.groups) for key in ("before", "after"))
    total = ("total", f"{before:,}", "->", f"{after:,}", "")
    return [("group", "channels", "", "kept", ""), *rows, total]


def _fate(group: dict[str, Any]) -> str:
    if group["reason"]:
        return f"whole: {group['reason'].removeprefix('kept whole ')}"
    return "" if group["after"] else "removed entirely"


def _stage_table(report: Report) -> _Rows:
    """Scores and cost at every stage; empty if nothing was measured."""
    rows = [
        (
            str(row.get("stage", "")),
            _percent(row["accuracy"]) if row.get("accuracy") is not None else "",
            *(_with_share(row.get(key), report.before.get(key)) for key in ("macs", "params")),
        )
        for row in report.results.get("table", ())
    ]
    return [("stage", "accuracy", "MACs", "params"), *rows] if rows else []


def _with_share(value: int | None, whole: int | None) -> str:
    if value is None:
        return ""
    return f"{value:,} ({_percent(value / whole)})" if whole else f"{value:,}"


def _aligned(rows: _Rows, left: Sequence[int] = (0,)) -> list[str]:
    """Columns of plain text, numbers to the right."""
    rows = [tuple(_one_line(cell) for cell in row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _escaped(text: str) -> str:
    """Markdown that shows exactly this text, also inside a table."""
    return re.sub(r"([\\`*_{}\[\]<#|~&])", r"\\\1", _one_line(text))


def _piped(title: str, rows: _Rows, left: Sequence[int] = (0,)) -> list[str]:
    if not rows:
        return []
    lines = ["| " + " | ".join(_escaped(cell) for cell in row) + " |" for row in rows]
    rule = "|".join(":---" if i in left else "---:" for i in range(len(rows[0])))
    return [f"## {title}", "", lines[0], f"|{rule}|", *lines[1:]]


def _listed(title: str, lines: list[str]) -> list[str]:
    return [f"## {title}", "", *(f"- {line}" for line in lines)] if lines else []


# --- sections of the page -------------------------------------------------------------------------


def _stages_section(report: Report) -> str:
    rows, checks = _stage_table(report), _checks(report)
    if not rows and not checks:
        return ""
    return html.section(
        "Before and after removal",
        "Before and after removal, which cuts out the channels whose gate is zero.",
        html.table(rows[0], rows[1:], right=(1, 2, 3)) if rows else "",
        html.bullets(checks) if checks else "",
    )


def _curve(report: Report, key: str, name: str, factor: float = 1, **style: Any) -> Line:
    return Line(name, [(row["step"], factor * row[key]) for row in report.history], **style)


def _cost_lines(report: Report) -> list[Line]:
    styles = {"macs": (BLUE, "none"), "params": (ORANGE, "7 4"), "latency": (GREEN, "10 3 2 3")}
    styles = {key: style for key, style in styles.items() if key in report.history[0]}
    last = report.history[-1]["step"]
    lines = [
        _curve(report, key, _NAMES[key], 100, colour=colour, dash=dash)
        for key, (colour, dash) in styles.items()
    ]
    for key, (colour, _) in styles.items():
        if limit := report.settings.get(key):
            flat = [(0.0, 100 * limit), (float(last), 100 * limit)]
            name = f"budget of {_NAMES[key]}, {_budget(limit)}"
            lines.append(Line(name, flat, colour, "2 4", 1.6))
    return lines


def _history_section(report: Report) -> str:
    if not report.history:
        return ""
    gates = [
        _curve(report, "closed", "closed (exactly 0)"),
        _curve(report, "between", "in between (0 to 0.5)", colour=ORANGE, dash="7 4"),
    ]
    charts = [
        html.line_chart("Remaining cost", _cost_lines(report), "step", "% of the original"),
        html.line_chart("Gates", gates, "step", "number of gates"),
        html.line_chart("ε, the softness of the gates", [_curve(report, "eps", "ε")], "step",
                        "ε (log scale)", log=True),
        html.line_chart("λ, the weight of the cost", [_curve(report, "lam", "λ")], "step", "λ"),
    ]  # fmt: skip
    why = "A step is one step of the optimizer. MACs: one multiply-add counts as 1."
    return html.section("The way there", why, html.tag("div", *charts, class_="plots"))


def _histogram_section(report: Report) -> str:
    panels = [
        html.histogram(
            f"step {row['step']:,}", row["histogram"], "gate value", "frequency", top=0.5
        )
        for row in report.snapshots()
    ]
    why = (
        "Density histogram of gates as the training goes on: the share of gates in each of the "
        "bins of gate values. As in the paper, the axis ends at 0.5; a taller bar has its share "
        "written above it."
    )
    if not panels:
        return ""
    return html.section("Gates polarize", why, html.tag("div", *panels, class_="panels"))


def _widths_section(report: Report) -> str:
    open_ones = [group for group in report.groups if not group["reason"]]
    most = max((group["before"] for group in open_ones), default=1)
    rows: list[tuple[str | Raw, ...]] = [
        (str(g["name"]), html.bar(g["before"], g["after"], most), f"{g['before']:,}",
         f"{g['after']:,}", f"{100 * g['after'] / max(g['before'], 1):.0f} %")
        for g in open_ones
    ]  # fmt: skip
    head = ("group", "width", "before", "after", "kept")
    why = "Channels of a group live and die together. Blue: kept; grey: removed."
    return html.section("Widths", why, html.table(head, rows, right=(2, 3, 4))) if rows else ""


def _whole_section(report: Report) -> str:
    rows = [(str(g["name"]), f"{g['before']:,}", str(g["reason"]))
            for g in report.groups if g["reason"]]  # fmt: skip
    why = "These groups kept all of their channels, for the reason given."
    table = html.table(("group", "channels", "reason"), rows, right=(1,))
    return html.section("Groups left whole", why, table) if rows else ""


def _footer(report: Report) -> Raw:
    return html.tag("footer", *(html.tag("div", line) for line in _origin(report)))
