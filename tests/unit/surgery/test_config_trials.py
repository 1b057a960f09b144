"""Whether a config can express a cut is known before anything is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import polarprune as pp
from polarprune.surgery.config_trials import ConfigTrials
from tests.helpers.sized_nets import EvenSizes, Perceptrons, perceptrons

X = torch.randn(4, 6)
BLOCKS = ("blocks.0.0", "blocks.1.0")


def trials(model: nn.Module, example: Any = X) -> ConfigTrials:
    return ConfigTrials(model, example, pp.trace(model, example))


def test_a_config_for_widths_is_found_without_a_cut() -> None:
    model = perceptrons()
    found = trials(model).config_for({"blocks.0.0": 4, "blocks.1.0": 4, "stages.1": 3})
    assert (found.inner, found.stages) == (4, [8, 3])
    assert (model.config.inner, model.config.stages) == (10, [8, 8])


def test_widths_that_one_number_cannot_tell_are_refused_with_the_reason() -> None:
    found = trials(perceptrons())
    assert found.refusal(dict.fromkeys(BLOCKS, 3)) == ""
    assert "inner is one number for all blocks" in found.refusal({"blocks.0.0": 3, "blocks.1.0": 4})


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_scale_that_follows_from_a_width_is_found_by_the_arithmetic(device: str) -> None:
    model, x = perceptrons(scaled=1e-7).to(device), X.to(device)
    found = trials(model, x)
    assert "depends on its sizes: mul in model" in found.refusal({"stages.0": 3})
    assert found.refusal({"stages.1": 3}) == ""
    assert trials(perceptrons().to(device), x).refusal({"stages.0": 3}) == ""


def test_a_constant_that_follows_from_a_width_is_found() -> None:
    class WithConstant(Perceptrons):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.register_buffer("shift", torch.full((3,), config.inner / 7), persistent=False)

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) + self.shift

    found = trials(WithConstant(perceptrons().config))
    assert "WithConstant computes shift from a size" in found.refusal(dict.fromkeys(BLOCKS, 3))
    assert found.refusal({"stages.1": 3}) == ""


def test_further_widths_that_a_config_refuses_are_listed() -> None:
    found = trials(perceptrons(EvenSizes))
    configs = {width: found.config_for(dict.fromkeys(BLOCKS, width)) for width in (8, 4)}
    refused = found.refused_widths(configs, [2, 5, 6, 7])
    assert refused.keys() == {5, 7} and "inner has to be even" in refused[5]


def test_further_widths_with_which_the_class_cannot_be_built_are_listed_with_its_error() -> None:
    class NotTwo(Perceptrons):
        def __init__(self, config: Any) -> None:
            if config.inner == 2:
                raise ValueError("inner=2 is too small")
            super().__init__(config)

    found = trials(NotTwo(perceptrons().config))
    configs = {width: found.config_for(dict.fromkeys(BLOCKS, width)) for width in (8, 4)}
    refused = found.refused_widths(configs, [2, 6])
    assert refused == {2: "NotTwo cannot be built: ValueError: inner=2 is too small"}


def test_a_part_of_the_model_may_have_the_config() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = perceptrons(scaled=0.1)

        def forward(self, x: torch.Tensor) -> Any:
            return self.model(x)

    found = trials(Wrapper())
    config = found.config_for({"model.stages.1": 3})
    assert config.stages == [8, 3]
    assert "depends on its sizes" in found.refusal({"model.stages.0": 3})


def test_a_model_without_a_config_is_refused() -> None:
    with pytest.raises(pp.PruneError, match=r"no module in it has a config.*polarprune.save"):
        trials(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)))
