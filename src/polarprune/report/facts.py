"""The facts of a report as short texts and tables, shared by all of its views.

A fact is a name, a value and a detail. A table is a list of rows of text; its first row is the
head. Nothing here knows how a view lays them out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from ..plain_data import JsonObject

if TYPE_CHECKING:
    from .report import Report

TITLE = "polarprune report"
FILE = "small.safetensors"  # the usual name of a small model
_ODD = 8  # channels: kernels are made for multiples of this
RESOURCE_NAMES = {
    "macs": "MACs",
    "params": "params",
    "memory": "memory (bytes)",
    "latency": "latency (ns)",
}
Rows = list[tuple[str, ...]]


class Fact(NamedTuple):
    """One value of a report, with its name and an explanation (which may be empty)."""

    name: str
    value: str
    detail: str


class ResourceCost(NamedTuple):
    """What the model costs before and after removal; `limit` is its budget as a fraction."""

    name: str
    before: int
    after: int
    limit: float | None

    @property
    def share(self) -> float:
        """Return the remaining cost as a fraction of the original."""
        return self.after / max(self.before, 1)

    @property
    def verdict(self) -> str:
        """Say whether the budget is met; empty without a budget."""
        if self.limit is None:
            return ""
        met = self.after <= self.limit * self.before * (1 + 1e-12)
        return f"budget {budget_percent(self.limit)}, {'met' if met else 'not met'}"


def resource_costs(report: Report) -> list[ResourceCost]:
    """Return the cost in every resource that the report counts."""
    return [
        ResourceCost(
            RESOURCE_NAMES.get(key, key), before, report.after[key], report.settings.get(key)
        )
        for key, before in report.before.items()
    ]


def percent(share: float) -> str:
    """Format a fraction as a percentage with two decimals."""
    return f"{100 * share:.2f} %"


def budget_percent(limit: float) -> str:
    """Format a budget with the digits that the user gave: 50 %, 46.65 %."""
    return f"{100 * limit:.6g} %"


def _scientific(difference: float) -> str:
    """Format a difference; an exact zero is printed as 0."""
    return f"{difference:.1e}" if difference else "0"


def sentence(text: str) -> str:
    """Return the text with a capital first letter and a full stop."""
    return text[:1].upper() + text[1:] + "."


def model_name(report: Report) -> str:
    """Return the name of the network, or else that of its class; empty in older reports."""
    return str(report.results.get("network") or report.model.rpartition(".")[2])


def title(report: Report) -> str:
    """Return a headline for the report."""
    name = model_name(report)
    return f"{TITLE}: {name}" if name else TITLE


# --- facts ----------------------------------------------------------------------------------------


def goal(report: Report) -> str:
    """Describe the settings of the run, and how far it got."""
    settings = report.settings
    limits = [
        f"{cost.name} {budget_percent(cost.limit)}"
        for cost in resource_costs(report)
        if cost.limit is not None
    ]
    parts = [f"budget {', '.join(limits)} of the original"] if limits else []
    if "lam" in settings:
        parts.append(f"fixed λ = {settings['lam']:g}, no budget")
    if report.history and "steps" in settings:
        parts.append(f"step {report.history[-1]['step']:,} of {settings['steps']:,}")
    if settings.get("multiple_of", 1) == "auto":
        parts.append("wide groups in multiples of 8")
    elif settings.get("multiple_of", 1) > 1:
        parts.append(f"widths in multiples of {settings['multiple_of']}")
    if settings.get("uniform"):
        families = {group["family"] for group in report.groups if "family" in group}
        parts.append(f"uniform widths in {len(families)} families of groups")
    if report.after == report.before:
        parts.append("no channel is closed")  # with a fixed λ, this is a possible outcome
    return "; ".join(parts) or "no settings"


def cost_facts(report: Report) -> list[Fact]:
    """Return the remaining cost in every resource."""
    facts = []
    for cost in resource_costs(report):
        amount = f"{cost.after:,} of {cost.before:,}"
        detail = f"{amount}; {cost.verdict}" if cost.verdict else amount
        facts.append(Fact(cost.name, percent(cost.share), detail))
    return facts


def accuracy_facts(report: Report) -> list[Fact]:
    """Return the accuracy of the last stage, with those of the stages before it."""
    rows = [row for row in report.results.get("table", ()) if row.get("accuracy") is not None]
    if not rows:
        return []
    earlier = [f"{row.get('stage', '?')} {percent(row['accuracy'])}" for row in rows[:-1]]
    stage = str(rows[-1].get("stage", ""))
    return [Fact("accuracy", percent(rows[-1]["accuracy"]), "; ".join([stage, *earlier]))]


def measured_facts(report: Report) -> list[Fact]:
    """Return the latency, if it was measured, and the difference that the proof found."""
    return [*_latency(report), _difference(report)]


def _latency(report: Report) -> list[Fact]:
    latency = report.results.get("latency_ms") or {}
    if "after" not in latency:
        return []
    after, details = f"{latency['after']:.3g} ms", []
    if "before" in latency:
        details.append(f"{after} after, {latency['before']:.3g} ms before")
    if "batch" in latency:
        details.append(f"batch of {latency['batch']}")
    if "runs" in latency:
        details.append(f"median of {latency['runs']} runs")
    if "before" not in latency:
        return [Fact("latency", after, "; ".join(details))]
    speedup = latency["before"] / latency["after"] if latency["after"] else math.inf
    return [Fact("speed", f"{speedup:.2f} times as fast", "; ".join(details))]


def _difference(report: Report) -> Fact:
    name = "largest difference"
    if not report.proof:
        return Fact(name, "not measured", "export() compares the small model with the gated one")
    modes = ", ".join(f"{mode} {_scientific(gap)}" for mode, gap in report.proof.items())
    detail = f"small model against gated model, relative: {modes}"
    return Fact(name, _scientific(max(report.proof.values())), detail)


def odd_widths(report: Report) -> list[str]:
    """Warn of kept widths that are not multiples of 8; empty if there are none."""
    odd = [group for group in report.groups if _is_odd(group)]
    if not odd:
        return []
    prunable = sum(not group["reason"] for group in report.groups)
    example = f"{odd[0]['name']}: {odd[0]['after']} of {odd[0]['before']}"
    return [
        f"{len(odd)} of {prunable} groups end at a width that is not a multiple of {_ODD} "
        f"({example}). Many kernels are slower there: pass multiple_of={_ODD}."
    ]


def _is_odd(group: JsonObject) -> bool:
    """Return whether a group was cut to a width that is not a multiple of 8."""
    units = group.get("multiple")  # this many make up a multiple of 8; a unit may be a whole head
    cut = not group["reason"] and group["after"] < group["before"]
    return bool(units) and cut and group["before"] >= units and group["after"] % units > 0


def remarks(report: Report) -> list[str]:
    """Return the notes, and what the proof skipped."""
    skipped = [f"{name} ({why})" for name, why in report.skipped.items()]
    lines = [f"export() did not compare: {'; '.join(skipped)}"] if skipped else []
    return [*report.notes, *lines]


def prediction_checks(report: Report) -> list[str]:
    """Say whether removal changed any prediction on the user's own test data."""
    results, lines = report.results, []
    images = f"{results['test_images']:,} test images" if "test_images" in results else "test data"
    if "identical_predictions" in results:
        same = "identical" if results["identical_predictions"] else "NOT identical"
        lines.append(f"predictions before and after removal: {same} ({images})")
    if "largest_difference" in results:
        gap = _scientific(results["largest_difference"])
        lines.append(f"largest difference of outputs before and after removal: {gap} ({images})")
    return lines


def origin(report: Report) -> list[str]:
    """Name the machine and the versions that the results come from."""
    machine, versions = (report.results.get(key) for key in ("machine", "versions"))
    lines = [f"machine: {machine}"] if machine else []
    if versions:
        lines.append("versions: " + ", ".join(f"{name} {v}" for name, v in versions.items()))
    return lines


# --- tables ---------------------------------------------------------------------------------------


def cost_table(report: Report) -> Rows:
    """Return before, after, share and verdict of every resource."""
    rows = [
        (cost.name, f"{cost.before:,}", f"{cost.after:,}", percent(cost.share), cost.verdict)
        for cost in resource_costs(report)
    ]
    return [("", "before", "after", "share", ""), *rows]


def group_table(report: Report) -> Rows:
    """Return the channels of every group before and after removal, and their total."""
    rows = [
        (str(g["name"]), f"{g['before']:,}", "->", f"{g['after']:,}", _remark(g))
        for g in report.groups
    ]
    before, after = (sum(group[key] for group in report.groups) for key in ("before", "after"))
    total = ("total", f"{before:,}", "->", f"{after:,}", "")
    return [("group", "channels", "", "kept", ""), *rows, total]


def _remark(group: JsonObject) -> str:
    if group["reason"]:
        return f"frozen: {group['reason']}"
    family = f"uniform: {group['family']}" if "family" in group else ""
    return "; ".join(filter(None, ["" if group["after"] else "removed entirely", family]))


def stage_table(report: Report) -> Rows:
    """Return scores and cost at every stage of the run; empty if nothing was measured."""
    rows = [
        (
            str(row.get("stage", "")),
            percent(row["accuracy"]) if row.get("accuracy") is not None else "",
            *(_with_share(row.get(key), report.before.get(key)) for key in ("macs", "params")),
        )
        for row in report.results.get("table", ())
    ]
    return [("stage", "accuracy", "MACs", "params"), *rows] if rows else []


def _with_share(value: int | None, original: int | None) -> str:
    if value is None:
        return ""
    return f"{value:,} ({percent(value / original)})" if original else f"{value:,}"
