"""One thread and fixed seeds for every test."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.helpers.shared_traces import shared_traces as shared_traces

torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was imported, which stays until the end."""
    gc.collect()
    gc.set_threshold(50_000, 20, 100)


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
def quick_collections() -> Iterator[None]:
    """Freeze what exists, for frameworks that collect garbage after every epoch.

    For all tests it would not pay: a trace counts what is frozen, one by one.
    """
    gc.freeze()
    yield
    gc.unfreeze()
