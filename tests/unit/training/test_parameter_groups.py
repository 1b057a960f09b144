"""Groups for an optimizer: weights, weights without decay, and gates."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import polarprune as pp
from tests.helpers.nets import digits_resnet

pytestmark = pytest.mark.usefixtures("shared_traces")


@pytest.fixture
def pruner() -> pp.Pruner:
    return pp.Pruner(digits_resnet(4), torch.zeros(2, 1, 8, 8), macs=0.5, steps=10)


def names(pruner: pp.Pruner, group: dict[str, list[nn.Parameter]]) -> set[str]:
    known = {id(p): name for name, p in pruner.model.named_parameters()}
    return {known[id(p)] for p in group["params"]}


def test_by_default_all_weights_are_decayed_and_the_gates_are_not(pruner: pp.Pruner) -> None:
    weights, gates = pruner.param_groups(lr=0.1, weight_decay=1e-2)
    assert weights["weight_decay"] == 1e-2 and gates["weight_decay"] == 0
    assert len(weights["params"]) + len(gates["params"]) == len(list(pruner.model.parameters()))


def test_biases_and_norms_get_a_group_without_decay(pruner: pp.Pruner) -> None:
    groups = pruner.param_groups(lr=0.1, weight_decay=1e-2, no_decay=True, betas=(0.9, 0.99))
    weights, plain, gates = groups
    assert [group["weight_decay"] for group in groups] == [1e-2, 0, 0]
    assert all(group["betas"] == (0.9, 0.99) for group in groups)
    assert plain["lr"] == weights["lr"] == 0.1 and gates["lr"] == pytest.approx(0.01)
    assert names(pruner, plain) == {
        name
        for name, _ in pruner.model.named_parameters()
        if ".bn" in name or "downsample.1" in name or name.startswith("0.1.") or name == "4.2.bias"
    }
    together = [id(p) for group in groups for p in group["params"]]
    assert sorted(together) == sorted(id(p) for p in pruner.model.parameters())


def test_patterns_name_parameters_as_they_were_before_the_gates(pruner: pp.Pruner) -> None:
    groups = pruner.param_groups(lr=0.1, no_decay=["1.conv?.weight", "4.2.bias"])
    assert names(pruner, groups[1]) == {
        "1.conv1.parametrizations.weight.original",
        "1.conv2.parametrizations.weight.original",
        "4.2.bias",
    }
    assert "weight_decay" not in groups[0]  # the optimizer's own


def test_every_parameter_of_a_weight_norm_is_kept() -> None:
    first = nn.utils.parametrizations.weight_norm(nn.Linear(8, 6))
    pruner = pp.Pruner(nn.Sequential(first, nn.Linear(6, 2)), torch.zeros(2, 8), macs=0.5, steps=9)
    weights, gates = pruner.param_groups(lr=0.1)
    assert len(weights["params"]) == 5 and len(gates["params"]) == 1


def test_a_pattern_that_matches_nothing_is_refused(pruner: pp.Pruner) -> None:
    with pytest.raises(pp.PruneError, match=r"no parameter matches no_decay='\*\.beta'"):
        pruner.param_groups(lr=0.1, no_decay="*.beta")


def test_an_optimizer_with_a_group_without_decay_is_accepted(pruner: pp.Pruner) -> None:
    optimizer = torch.optim.AdamW(pruner.param_groups(lr=0.1, weight_decay=0.1, no_decay=True))
    pruner.attach(optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0, 0]
