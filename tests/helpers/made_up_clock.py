"""A clock that replaces real time; it is exact, and the same on every machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polarprune.cost import stopwatch
from tests.helpers.nets import digits_resnet

IMAGES = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def layer_time(module: nn.Module) -> float:
    """Return the time of a layer, which computes 8 channels at a time, plus a constant per call."""
    if isinstance(module, nn.Conv2d):
        wide = 8 * math.ceil(module.in_channels / 8) * 8 * math.ceil(module.out_channels / 8)
        return 0.02 + 1e-3 * wide / module.stride[0] ** 2
    return 0.01 if isinstance(module, (nn.Linear, nn.BatchNorm2d)) else 0.0


class Clock:
    """A replacement for real time. `rest` is time that belongs to no module."""

    def __init__(self, rest: float = 0.0, slower: float = 1.0) -> None:
        self.rest, self.slower, self.models = rest, slower, 0

    def total(self, model: nn.Module) -> float:
        taken = sum(layer_time(module) for module in model.modules())
        return taken + self.rest + (self.slower - 1) * taken * (self.models > 14)

    def take_turns(
        self, models: Mapping[str, nn.Module], example: Any, *, runs: int, warm_up: int = 3
    ) -> dict[str, list[float]]:
        self.models += len(models) > 1
        return {
            name: [self.total(model) if name == "after" else sum_of(model) + self.rest] * runs
            for name, model in models.items()
        }

    def by_module(self, watch: Any, model: nn.Module, names: list[str]) -> Tensor:
        modules = dict(model.named_modules())
        return torch.tensor([layer_time(modules[name]) for name in names], dtype=torch.float64)


def sum_of(model: nn.Module) -> float:
    return sum(layer_time(module) for module in model.modules())


def wound_up(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(stopwatch, "take_turns", clock.take_turns)
    monkeypatch.setattr(
        stopwatch.Stopwatch, "_module_times", lambda self, m, names: clock.by_module(self, m, names)
    )
    return clock


def net() -> nn.Module:
    torch.manual_seed(0)
    return digits_resnet(width=32)
