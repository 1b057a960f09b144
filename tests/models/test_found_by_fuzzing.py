"""Networks that `make fuzz` once failed on, after it had shrunk them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import polarprune as pp
from polarprune.analysis.trial_cuts import trial_plan
from tests.helpers.training import cut_error


class UnreadGru(nn.Module):
    """Two groups of two channels meet in a layer that holds both numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 12, bias=False), nn.Linear(12, 2)
        self.gru = nn.GRU(2, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        self.gru(self.second(first))  # nobody reads it, but it has to run
        return first


def test_narrow_groups_of_one_width_are_told_apart() -> None:
    torch.manual_seed(0)
    model, x = UnreadGru().double().eval(), torch.randn(2, 6, 10, dtype=torch.float64)
    graph = pp.trace(model, x)
    assert {name: group.size for name, group in graph.prunable.items()} == {"second": 2, "gru": 2}
    for plan in ({"second": [1]}, {"gru": [0]}, {"second": [0], "gru": [1]}):
        small = pp.shrink(model, graph, plan)
        assert small.gru.input_size == len(plan.get("second", [0, 1]))
        assert small.gru.hidden_size == len(plan.get("gru", [0, 1]))
        assert torch.equal(small(x), model(x))


class OnePerGroup(nn.Module):
    """One output for each group of a transposed convolution, which also reads the model's input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.second = nn.ConvTranspose2d(9, 3, 2, stride=2, groups=3)
        self.third = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.third(self.second(torch.cat([x, self.first(x)], 1)))
        return out


def test_a_transposed_convolution_with_one_output_for_each_group_is_followed() -> None:
    torch.manual_seed(0)
    x, more = (torch.randn(n, 3, 6, 6, dtype=torch.float64) for n in (2, 3))
    model = OnePerGroup().double().eval()
    graph = pp.trace(model, x)
    assert {name: group.size for name, group in graph.prunable.items()} == {"third.0": 8}
    assert cut_error(model, graph, (x,), (more,)) < 1e-10


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_first_trial_plans_cut_every_group(seed: int) -> None:
    """`reshape(-1, 36, heads, width)` runs on with a smaller batch: only a cut shows it."""
    model = nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 2))
    graph = pp.trace(model, torch.randn(2, 6))
    plan = trial_plan(graph, seed)
    assert [graph.groups[name].size for name in plan] == [2, 3, 4]
    assert all(len(kept) < graph.groups[name].size for name, kept in plan.items())


def test_a_bare_norm_of_frozen_channels_keeps_its_number_of_channels(tmp_path: Path) -> None:
    """Inside it the batch lies beside the channels; a file with that number was refused."""
    torch.manual_seed(0)

    def make() -> nn.Module:
        norm = nn.InstanceNorm2d(3, track_running_stats=True)
        return nn.Sequential(norm, nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1)).eval()

    model, x = make(), torch.randn(4, 3, 6, 6)
    graph = pp.trace(model, x)
    small = pp.shrink(model, graph, {"1": [0, 5]})
    assert small.get_submodule("0").num_features == 3
    pp.save(small, tmp_path / "small.safetensors")
    assert torch.equal(pp.load(tmp_path / "small.safetensors", model=make()).eval()(x), small(x))
