"""Small trainings on random images, and cuts at random, that several test files share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polarprune as pp
from polarprune.channels.graph import Graph
from polarprune.gates.folding import fold

Batch = tuple[Tensor, Tensor]


def batches(count: int, channels: int = 3, size: int = 16, number: int = 8) -> list[Batch]:
    """Return random images with random labels, the same for the same arguments."""
    generator = torch.Generator().manual_seed(count)
    return [
        (
            torch.randn(number, channels, size, size, generator=generator),
            torch.randint(10, (number,), generator=generator),
        )
        for _ in range(count)
    ]


def sgd(pruner: pp.Pruner, lr: float = 0.05, **options: Any) -> torch.optim.Optimizer:
    groups = pruner.param_groups(lr=lr, weight_decay=5e-4)
    return torch.optim.SGD(groups, **{"momentum": 0.9, "nesterov": True, **options})


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterable[Batch],
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Train with a user's loop, in which nothing refers to pruning."""
    model.train()
    for images, labels in data:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        after_step()


def prune(
    model: nn.Module, steps: int, *, channels: int = 3, size: int = 16, **settings: Any
) -> Any:
    """Build a pruner, train on random images for all of its steps, and return it."""
    data = batches(steps, channels, size)
    pruner = pp.Pruner(model, data[0][0][:2], steps=steps, **settings)
    optimizer = sgd(pruner)
    pruner.attach(optimizer)
    train(model, optimizer, data)
    return pruner


def share(pruner: pp.Pruner) -> dict[str, float]:
    """Return what is left, as fractions of the original."""
    before = pruner.graph.cost.original()
    return {key: value / before[key] for key, value in pruner.cost().items()}


def alphas(pruner: pp.Pruner) -> Tensor:
    return torch.cat([gate.alpha.detach().clone() for gate in pruner.gates.values()])


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_state(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether two states are bit-equal, in the order of their keys, too; NaN equals NaN."""
    return list(one) == list(other) and all(
        a.dtype == b.dtype and torch.equal(a.nan_to_num(7e7), b.nan_to_num(7e7))
        for a, b in zip(one.values(), other.values(), strict=True)
    )


def random_plan(graph: Graph, seed: int) -> dict[str, list[int]]:
    """Return a random plan: seed 0 keeps as few channels as possible, other seeds any number."""
    generator = torch.Generator().manual_seed(seed)
    plan = {}
    for name, group in graph.prunable.items():
        most = group.size + 1 if seed else group.minimum + 1
        count = int(torch.randint(group.minimum, most, (), generator=generator))
        plan[name] = sorted(torch.randperm(group.size, generator=generator)[:count].tolist())
    return plan


@torch.no_grad()
def cut_error(model: nn.Module, graph: Graph, *examples: Any, plans: int = 4) -> float:
    """Return how far random cuts are from the model in which the same channels are masked.

    `model` is in float64 and eval mode; each example is a tuple of arguments.
    """
    worst = 0.0
    for seed in range(plans):
        plan = random_plan(graph, seed)
        small = pp.shrink(model, graph, plan)
        masked = copy.deepcopy(model)
        fold(masked, graph, graph.kept_units(plan).double())
        for given in examples:
            one, other = masked(*given), small(*given)
            assert one.shape == other.shape and one.isfinite().all()
            worst = max(worst, float((one - other).abs().max() / one.abs().max()))
    return worst
