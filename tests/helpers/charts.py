"""Draw each kind of chart once: the page of a report takes longer than a tiny run."""

from __future__ import annotations

from matplotlib.figure import Figure

from polarprune.report.svg import inline_svg

CHARTS: dict[tuple[str, ...], str] = {}


def drawn_once(figure: Figure) -> str:
    """Stand in for `inline_svg`: the first chart with the same axes serves for all others."""
    axes = tuple(panel.get_ylabel() for panel in figure.axes)
    if axes not in CHARTS:
        CHARTS[axes] = inline_svg(figure)
    return CHARTS[axes]
