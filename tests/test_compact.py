"""compact(): closed channels are taken out, and training goes on as if nothing had happened."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import NETS, randomise
from test_exact import counted, difference, run
from test_norms import Net
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves, tree_map_only

import polarprune as pp

Optimizers = Callable[[pp.Pruner], torch.optim.Optimizer]


def sgd(pruner: pp.Pruner) -> torch.optim.Optimizer:
    groups = pruner.param_groups(lr=0.01, weight_decay=1e-3)
    return torch.optim.SGD(groups, momentum=0.9, nesterov=True)


def adam(pruner: pp.Pruner) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pruner.param_groups(lr=1e-3, weight_decay=1e-2), amsgrad=True)


def double(inputs: Any) -> Any:
    return tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs)


def close(pruner: pp.Pruner, seed: int, whole: bool = False) -> None:
    """Random gates; with `whole`, all of those that may go."""
    generator = torch.Generator().manual_seed(seed)
    alpha = pruner._flat()
    for group in pruner.graph.open.values():
        shut = torch.rand(group.size, generator=generator) < (1.0 if whole else 0.4)
        shut[: max(group.minimum, int(not whole))] = False
        alpha[group.offset : group.offset + group.size][shut] = 0
    with torch.no_grad():
        pruner._put(alpha)
        pruner._control()  # gates that lost their meaning close too


def trained(
    name: str, make: Optimizers, compact: tuple[int, ...], steps: int = 6, whole: bool = False
) -> tuple[pp.Pruner, list[Tensor], Any]:
    """A run in which gates close at two steps, and which is compacted at others."""
    model, inputs = NETS[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # else other random numbers fall on what is left
    inputs = double(inputs)
    pruner = pp.Pruner(model.double().train(), inputs, lam=1e-9, steps=steps)
    optimizer = make(pruner)
    pruner.attach(optimizer)
    outs: list[Tensor] = []
    for step in range(steps):
        if step in (1, 3):
            close(pruner, step, whole and step == 3)
        if step in compact:
            pruner.compact()
        optimizer.zero_grad()
        found = [x for x in tree_leaves(run(model, inputs)) if x.is_floating_point()]
        outs = [x.detach() for x in found]
        torch.stack([x.square().mean() for x in found]).sum().backward()
        optimizer.step()
    return pruner, outs, inputs


def open_nets() -> list[str]:
    return [name for name in NETS if "frozen" not in name]


@pytest.mark.parametrize("whole", [False, True], ids=["some", "all"])
@pytest.mark.parametrize("name", open_nets())
def test_training_goes_on_as_if_nothing_had_happened(name: str, whole: bool) -> None:
    make = adam if whole else sgd
    try:
        pruner, outs, inputs = trained(name, make, (), whole=whole)
    except pp.PruneError as error:
        assert "no prunable channels" in str(error)
        return
    other, again, _ = trained(name, make, (1, 2, 4), whole=whole)
    for a, b in zip(outs, again, strict=True):
        assert float((a - b).abs().max()) <= 1e-8 * float(a.abs().max())
    assert other.plan() == pruner.plan() and other.cost() == pruner.cost()
    small, same = pruner.export(), other.export()
    for training in (False, True):
        assert difference(small, same, inputs, training=training) <= 1e-8
    assert counted(same, inputs)["params"] == other.cost()["params"]
    live = sum(len(gate.alpha) for gate in other.gates.values())
    left = sum(p.numel() for p in other.model.parameters()) - live
    assert left == other.cost()["params"]
