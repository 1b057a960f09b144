"""Plans by other methods, at an exact budget: what a learned plan has to beat.

The same share of every group is kept, the channels with the largest scores; then single channels
are put back as long as the budget allows. `shrink` takes these plans as it takes any other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .budget import Budget
from .groups import WHOLE, Graph, Plan
from .tape import named_tensors


def magnitude_scores(model: nn.Module, graph: Graph) -> Tensor:
    """ℓ2 norm of all weights that make a channel."""
    total = torch.zeros(graph.units, dtype=torch.float64)
    for name, tensor in named_tensors(model):
        for axis, units in graph.axes.get(name, {}).items():
            if axis in graph.sites.get(name, {}) or tensor.dim() < 2:
                continue
            squares = tensor.detach().double().cpu().square().movedim(axis, 0).flatten(1).sum(1)
            mine = units != WHOLE
            total.index_add_(0, units[mine], squares[mine])
    return total.sqrt()


def random_scores(graph: Graph, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(graph.units, dtype=torch.float64, generator=generator)


def plan_by_score(graph: Graph, scores: Tensor, *, multiple_of: int = 1, **limits: float) -> Plan:
    """Keep the highest scores of every group, to `macs=` and/or `params=` of the original."""
    budget = Budget(graph, limits, multiple_of)
    budget.check_reachable()
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        if float(budget.excess(_widths(budget, middle))) <= 0:
            low = middle
        else:
            high = middle
    n = _fill_up(budget, _widths(budget, low))
    plan = {}
    for (name, group), width in zip(graph.open.items(), n.long().tolist(), strict=True):
        own = scores[group.offset : group.offset + group.size]
        plan[name] = sorted(own.argsort(descending=True, stable=True)[:width].tolist())
    return plan


def _widths(budget: Budget, share: float) -> Tensor:
    """The same share of every group, on the grid of allowed widths."""
    n = torch.floor(share * budget.cost.full / budget.multiple) * budget.multiple
    return torch.maximum(n, budget.lowest_widths())


def _fill_up(budget: Budget, n: Tensor) -> Tensor:
    """Put channels back, the narrowest group (by its own measure) first, while they fit."""
    while True:
        for group in (n / budget.cost.full).argsort(stable=True).tolist():
            wider = n.clone()
            wider[group] += budget.multiple[group]
            if wider[group] <= budget.cost.full[group] and float(budget.excess(wider)) <= 0:
                n = wider
                break
        else:
            return n
