"""Runs that are interrupted and resumed, and a comparison of their complete states."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import polarprune as pp
from tests.helpers.nets import digits_resnet
from tests.helpers.training import sgd

STEPS = 40
Parts = tuple[pp.Pruner, Any, Any]  # with the model and the optimizer


def adam(pruner: pp.Pruner) -> torch.optim.Optimizer:
    return torch.optim.Adam(pruner.param_groups(lr=0.01))


OPTIMIZERS = {"sgd": sgd, "adam": adam}


def build(optimizer: str = "sgd", *, attached: bool = True, **settings: Any) -> Parts:
    """Build a run; return its parts in the order in which their states are loaded."""
    torch.manual_seed(1)
    model = digits_resnet(8)
    settings = {"macs": 0.3, "steps": STEPS, **settings}
    pruner = pp.Pruner(model, torch.zeros(2, 1, 8, 8), **settings)
    chosen = OPTIMIZERS[optimizer](pruner)
    if attached:
        pruner.attach(chosen)
    return pruner, model, chosen


def learn(parts: Parts, first: int, last: int) -> None:
    _, model, optimizer = parts
    model.train()
    for number in range(first, last):
        generator = torch.Generator().manual_seed(number)
        images = torch.randn(4, 1, 8, 8, generator=generator)
        labels = torch.randint(10, (4,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


def assert_same(one: Any, other: Any) -> None:
    """Assert that two nested values are bit-equal."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    else:
        assert one == other
