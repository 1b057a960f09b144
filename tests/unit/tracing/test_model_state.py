"""A run restores everything, without copying weights that nothing writes to."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polarprune as pp
from polarprune.tracing.model_state import restored


class Adapter(nn.Linear):
    """A layer whose `train` adds a correction to its weight and removes it again."""

    def __init__(self, way: str) -> None:
        torch.manual_seed(0)
        super().__init__(6, 6)
        self.way, self.merged = way, False
        self.correction = nn.Parameter(torch.randn(6, 6))

    def train(self, mode: bool = True) -> Adapter:
        super().train(mode)
        if self.merged == mode:
            self.merged = not mode
            sign = -1.0 if mode else 1.0
            if self.way == "in place":
                self.weight.data += sign * self.correction.data
            elif self.way == "through a view":
                self.weight.data[:, 1:].add_(self.correction.data[:, 1:], alpha=sign)
            else:
                self.weight.data = self.weight.data + sign * self.correction.data
        return self

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if self.merged else out + nn.functional.linear(x, self.correction)


@pytest.mark.parametrize("way", ["in place", "through a view", "new memory"])
def test_weights_that_a_custom_train_writes_are_put_back_bit_by_bit(way: str) -> None:
    model = nn.Sequential(Adapter(way), nn.ReLU(), nn.Linear(6, 2))
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    pp.trace(model, torch.randn(2, 6))
    assert model.training and not model[0].merged
    assert all(torch.equal(x, before[name]) for name, x in model.named_parameters())


def test_weights_that_nothing_writes_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `train` of one's own is no reason: large models are run many times."""

    class Own(nn.Linear):
        def train(self, mode: bool = True) -> Own:
            super().train(mode)
            return self

    model, clone, cloned = Own(4, 4), Tensor.clone, list[Any]()

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        cloned.append(tensor)
        return clone(tensor, *args, **kwargs)

    monkeypatch.setattr(Tensor, "clone", counting)
    with restored(model, training=False):
        model(torch.zeros(1, 4))
    assert not cloned


def test_what_a_custom_train_wrote_before_it_failed_is_put_back() -> None:
    class Failing(Adapter):
        def train(self, mode: bool = True) -> Failing:
            super().train(mode)
            random.random(), torch.rand(1)
            raise ValueError("no mode for me")

    model = Failing("in place")
    model.merged = True
    weight, states = model.weight.detach().clone(), (random.getstate(), torch.get_rng_state())
    with pytest.raises(ValueError, match="no mode"), restored(model, True):
        pass
    assert torch.equal(model.weight, weight) and model.merged
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])
