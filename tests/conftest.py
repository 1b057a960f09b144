"""One thread and fixed seeds for every test."""

from __future__ import annotations

import gc
import sys

import pytest
import torch

from tests.helpers.shared_traces import shared_traces as shared_traces

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that share one long run: the last ones may go to several workers."""
    items.sort(key=lambda item: item.get_closest_marker("shares_a_run") is None)


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was imported, which stays until the end.

    It then collects the garbage of the tests often. Otherwise the classes that traces derive pile
    up, and every trace takes longer, because torch.fx patches a class that all of them inherit.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def pytest_sessionfinish() -> None:
    """Collect garbage once; pytest does it five more times, each through all objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` seeds devices, too, slowly
    if "torch._dynamo" in sys.modules:  # what other tests compiled counts towards its limits
        torch._dynamo.reset()


@pytest.fixture(scope="module")
def quick_collections() -> None:
    """Freeze what exists, for frameworks that collect garbage after every epoch."""
    gc.collect()
    gc.freeze()
