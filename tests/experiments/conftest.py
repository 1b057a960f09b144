"""A tiny network on tiny data, for the tests of complete runs."""

from __future__ import annotations

import pytest

from polarprune.experiments.data.cifar10 import Cifar10
from polarprune.experiments.networks.table import NETWORKS
from polarprune.experiments.presets import PRESETS
from polarprune.report import page
from tests.helpers.charts import drawn_once
from tests.helpers.cifar import TINY, Tiny, few_images


@pytest.fixture(autouse=True)
def quick_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw each kind of chart once in all tests."""
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
