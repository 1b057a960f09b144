"""A tiny network on tiny data, for the tests of complete runs."""

from __future__ import annotations

import pytest

from polarprune.experiments import networks
from polarprune.experiments.data import Data
from polarprune.experiments.recipes import RECIPES
from tests.helpers.cifar import TINY, Tiny, images


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the tiny network and its recipe known."""
    monkeypatch.setitem(networks.NETWORKS, "tiny", Tiny)
    monkeypatch.setitem(RECIPES, "tiny", TINY)


@pytest.fixture
def data() -> Data:
    """Return a few images whose colours say which class they are of."""
    return Data(images(200), images(60, seed=1))
