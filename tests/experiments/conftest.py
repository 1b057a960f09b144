"""A tiny network on tiny data, for the tests of complete runs."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from polarprune.experiments.data.cifar10 import Cifar10
from polarprune.experiments.networks.table import NETWORKS
from polarprune.experiments.presets import PRESETS
from polarprune.report import page
from tests.helpers.cifar import TINY, Tiny, few_images

CHARTS: dict[tuple[str, ...], str] = {}
DRAW = page.inline_svg


def drawn_once(figure: Figure) -> str:
    """Return the first chart with these axes, which serves for all others."""
    axes = tuple(panel.get_ylabel() for panel in figure.axes)
    if axes not in CHARTS:
        CHARTS[axes] = DRAW(figure)
    return CHARTS[axes]


@pytest.fixture(autouse=True)
def quick_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw each kind of chart once: the page of a report takes longer than a tiny run."""
    monkeypatch.setattr(page, "inline_svg", drawn_once)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the tiny network and its settings known."""
    monkeypatch.setitem(NETWORKS, "tiny", Tiny)
    monkeypatch.setitem(PRESETS, "tiny", TINY)


@pytest.fixture
def data() -> Cifar10:
    """Return a few images whose colours say which class they are of."""
    return few_images()
