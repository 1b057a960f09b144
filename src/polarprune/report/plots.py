"""Pictures for papers and READMEs, drawn with matplotlib."""

from __future__ import annotations

from os import PathLike
from typing import Any

from ..errors import PruneError
from .report import Report

_TOP = 0.5  # where the paper cuts the frequencies off


def save_gate_histogram(report: Report, path: str | PathLike[str]) -> None:
    """Write the paper's figure as PNG: density histograms of gates as the training goes on."""
    rows = report.snapshots(7)
    if not rows:
        raise PruneError(
            "save_gate_histogram: the report has no history; take it from pruner.report()."
        )
    figure = _figure(2 * len(rows), 2.4)
    panels = figure.subplots(1, len(rows), sharey=True, squeeze=False)[0]
    for panel, row in zip(panels, rows, strict=True):
        _draw(panel, row)
    panels[0].set_ylabel("frequency of gates")
    figure.supxlabel("gate value", fontsize=10)
    figure.savefig(path, format="png", dpi=200)


def save_curve(rows: list[dict[str, float]], measure: str, path: str | PathLike[str]) -> None:
    """Write a sweep as PNG: what is left of a score beside what is left of the MACs."""
    figure = _figure(4.4, 3.2)
    panel = figure.subplots()
    whole = rows[0]["baseline"]
    panel.axhline(whole, color="#767676", ls="--", lw=1)
    panel.annotate("whole network", (1, whole), (0, 3), xycoords=("axes fraction", "data"),
                   textcoords="offset points", ha="right", fontsize=9, color="#767676")  # fmt: skip
    left = [100 * row["macs"] for row in rows]
    panel.plot(left, [row["score"] for row in rows], "o-", color="#0072b2", ms=5)
    panel.set(xlabel="MACs left (%)", ylabel=measure)
    panel.margins(0.08, 0.15)
    panel.grid(color="#e5e5e5")
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", dpi=200)


def _figure(width: float, height: float) -> Any:
    """Without pyplot, which has global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PruneError(
            "pictures are drawn with matplotlib: pip install polarprune[cli]"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


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
