"""Pictures for papers and READMEs, drawn with matplotlib."""

from __future__ import annotations

from os import PathLike
from typing import Any

from .errors import PruneError
from .report import Report

_TOP = 0.5  # where the paper cuts the frequencies off


def save_gate_histogram(report: Report, path: str | PathLike[str]) -> None:
    """Write the paper's figure as PNG: density histograms of gates as the training goes on."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PruneError(
            "save_gate_histogram: matplotlib is missing: pip install polarprune[cli]"
        ) from error
    rows = report.snapshots(7)
    if not rows:
        raise PruneError(
            "save_gate_histogram: the report has no history; take it from pruner.report()."
        )
    figure = Figure(
        figsize=(2 * len(rows), 2.4), layout="constrained"
    )  # no pyplot: no global state
    panels = figure.subplots(1, len(rows), sharey=True, squeeze=False)[0]
    for panel, row in zip(panels, rows, strict=True):
        _draw(panel, row)
    panels[0].set_ylabel("frequency of gates")
    figure.supxlabel("gate value", fontsize=10)
    figure.savefig(path, format="png", dpi=200)


def _draw(panel: Any, row: dict[str, Any]) -> None:
    bars(panel, row["histogram"])
    panel.set_title(f"step {row['step']}", fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)


def bars(panel: Any, counts: list[int], colour: str = "#0072b2") -> None:
    """Shares of all, from 0 to 1 along the axis; what is higher than the panel says how high."""
    width = 1 / len(counts)
    shares = [count / max(sum(counts), 1) for count in counts]
    edges = [i * width for i in range(len(counts))]
    panel.bar(edges, shares, width, align="edge", color=colour, edgecolor="white", lw=0.4)
    for edge, share in zip(edges, shares, strict=True):
        if share > _TOP:
            side, x = ("right", edge - 0.02) if edge > 0.5 else ("left", edge + width + 0.02)
            panel.text(x, 0.98 * _TOP, f"{share:.2f} ↑", ha=side, va="top", fontsize=9)
    panel.set(xlim=(0, 1), ylim=(0, _TOP), xticks=[0, 0.5, 1])
    panel.set_xticklabels(["0", "0.5", "1"])
