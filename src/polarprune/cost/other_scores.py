"""Make plans from other scores at an exact budget: the baselines for a learned plan.

A plan keeps the channels with the largest scores. `plan_by_score` keeps the same fraction of every
group, and `plan_by_threshold` applies one threshold to all groups. Both then add single channels
while the budget allows it. `shrink` accepts these plans like any other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..channels.graph import FROZEN, Graph, Plan, plan_of
from ..tracing.model_state import named_tensors
from .budget import Budget

_TINY = 1e-12  # avoids the undefined gradient of a norm at zero


def magnitude_scores(model: nn.Module, graph: Graph) -> Tensor:
    """Return for each unit the ℓ2 norm of all weights that compute it."""
    total = torch.zeros(graph.units, dtype=torch.float64)
    for name, tensor in named_tensors(model):
        for axis, units in graph.axes.get(name, {}).items():
            if axis in graph.sites.get(name, {}) or tensor.dim() < 2:
                continue
            squares = tensor.detach().double().cpu().square().movedim(axis, 0).flatten(1).sum(1)
            mine = units != FROZEN
            total.index_add_(0, units[mine], squares[mine])
    return total.sqrt()


def random_scores(graph: Graph, seed: int) -> Tensor:
    """Return a random score for each unit."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(graph.units, dtype=torch.float64, generator=generator)


def scale_scores(model: nn.Module, graph: Graph) -> Tensor:
    """Return for each unit the mean |γ| of the batch norms that scale it.

    The mean is used because a sum would grow with the number of layers on a residual stream. A
    channel without a batch norm gets an infinite score, so it is kept as long as possible.
    """
    total, count = torch.zeros(2, graph.units, dtype=torch.float64)
    for path, module in model.named_modules():
        units = graph.axes.get(f"{path}.weight" if path else "weight", {}).get(0)
        if isinstance(module, _BatchNorm) and module.affine and units is not None:
            mine = units != FROZEN
            scales = module.weight.detach().double().cpu().abs()
            total.index_add_(0, units[mine], scales[mine])
            count.index_add_(0, units[mine], torch.ones_like(scales[mine]))
    return torch.where(count > 0, total / count, torch.inf)


class UnitNorms:
    """The ℓ2 norm of the parameters of each unit.

    The norms are differentiable, and can be captured in a CUDA graph. All parameters are
    concatenated into one vector, with the units of every element beside it: a few large kernels
    replace thousands of small ones.

    Args:
        model: The model that holds the parameters.
        units: The number of units.
        axes: For each parameter, the units along its axes. With `graph.axes`, a norm covers all
            parameters that compute, follow or read a unit; with `graph.sites`, only those that
            read it.

    Attributes:
        sizes: The number of elements in each norm.
    """

    def __init__(self, model: nn.Module, units: int, axes: dict[str, dict[int, Tensor]]) -> None:
        found = [
            (p, list(axes[name].items())) for name, p in model.named_parameters() if axes.get(name)
        ]
        self.tensors: list[Tensor] = [tensor for tensor, _ in found]
        self.units = units
        self.slots = [  # the value `units` stands for no unit
            torch.cat(
                [
                    _of_each(tensor, *own[k], units)
                    if k < len(own)
                    else torch.full((tensor.numel(),), units, device=tensor.device)
                    for tensor, own in found
                ]
            )
            for k in range(max(len(own) for _, own in found))
        ]
        self.sizes = self._sums(torch.ones_like(self._vector()))

    def _vector(self) -> Tensor:
        """Return all parameters as one vector."""
        return torch.cat([tensor.float().flatten() for tensor in self.tensors])

    def _sums(self, numbers: Tensor) -> Tensor:
        """Add up one number per element for each unit."""
        sums = numbers.new_zeros(self.units + 1)
        for slots in self.slots:
            sums = sums.index_add(0, slots, numbers)
        return sums[:-1]

    def squares(self) -> Tensor:
        """Return the squared norm of each unit."""
        return self._sums(self._vector().square())

    def __call__(self) -> Tensor:
        """Return the norm of each unit."""
        return (self.squares() + _TINY).sqrt()

    @torch.no_grad()
    def scale(self, factors: Tensor) -> None:
        """Multiply the parameters of each unit by its factor, in place."""
        factors = torch.cat([factors, factors.new_ones(1)])
        each = torch.stack([factors[slots] for slots in self.slots]).prod(0)
        torch._foreach_mul_(self.tensors, self._split(each))

    @torch.no_grad()
    def pull(self, strengths: Tensor) -> None:
        """Add to the gradients the parameters times the strengths of all their units."""
        strengths = torch.cat([strengths, strengths.new_zeros(1)])
        each = torch.stack([strengths[slots] for slots in self.slots]).sum(0) * self._vector()
        for tensor, more in zip(self.tensors, self._split(each), strict=True):
            if tensor.grad is not None:
                tensor.grad += more

    def _split(self, numbers: Tensor) -> list[Tensor]:
        """Split a vector into tensors with the shapes of the parameters."""
        parts = numbers.split([tensor.numel() for tensor in self.tensors])
        return [part.view(t.shape) for part, t in zip(parts, self.tensors, strict=True)]


def _of_each(tensor: Tensor, axis: int, units: Tensor, none: int) -> Tensor:
    """Return the unit of every element of a tensor with units along one axis."""
    shape = [1] * tensor.dim()
    shape[axis] = -1
    units = torch.where(units == FROZEN, none, units).to(tensor.device)
    return units.reshape(shape).expand(tensor.shape).flatten()


def plan_by_score(
    graph: Graph,
    scores: Tensor,
    *,
    multiple_of: int | str = 1,
    **limits: float,
) -> Plan:
    """Return a plan that keeps the same fraction of every group, the highest scores first.

    Args:
        graph: The graph of the model.
        scores: One score for each unit.
        multiple_of: The widths of groups are multiples of this number.
        limits: The budget as fractions of the original cost, such as `macs=0.5`.
    """
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
    for (name, group), width in zip(graph.prunable.items(), n.long().tolist(), strict=True):
        own = scores[group.offset : group.offset + group.size]
        plan[name] = sorted(own.argsort(descending=True, stable=True)[:width].tolist())
    return plan


def plan_by_threshold(graph: Graph, scores: Tensor, **limits: float) -> Plan:
    """Return a plan that keeps the channels above one threshold for all groups.

    The threshold is the lowest one that meets the budget. Single channels below it are then added
    while they fit, the highest score first. Every group keeps its minimum; beyond that, channels
    with a score of 0 are always removed.

    Args:
        graph: The graph of the model.
        scores: One score for each unit.
        limits: The budget as fractions of the original cost, such as `macs=0.5`.
    """
    budget = Budget(graph, limits)
    budget.check_reachable()
    scores = scores.double().cpu()
    order = scores.argsort(descending=True, stable=True)
    must = _best_of_each(budget, order)
    rest = order[~must[order] & (scores[order] > 0)]

    def fits(units: Tensor) -> bool:
        kept = must.index_fill(0, units, True)
        return float(budget.excess(budget.widths(kept))) <= 0

    low, high = 0, len(rest)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(rest[:middle]) else (low, middle - 1)
    chosen = rest[:low]
    for unit in rest[low:].split(1):
        more = torch.cat([chosen, unit])
        chosen = more if fits(more) else chosen
    return plan_of(graph, must.index_fill(0, chosen, True))


def _best_of_each(budget: Budget, order: Tensor) -> Tensor:
    """Return a mask of the units that are always kept: the best ones of each group."""
    kept = torch.zeros(len(order), dtype=torch.bool)
    for group, least in enumerate(budget.lowest_widths().long().tolist()):
        kept[order[budget.owner[order] == group][:least]] = True
    return kept


def _widths(budget: Budget, share: float) -> Tensor:
    """Return widths that keep the same fraction of every group, rounded down to allowed widths."""
    n = torch.floor(share * budget.cost.full / budget.multiple) * budget.multiple
    return torch.maximum(n, budget.lowest_widths())


def _fill_up(budget: Budget, n: Tensor) -> Tensor:
    """Widen families of groups while the budget allows it, the smallest fraction first."""
    families, full = budget.families, budget.cost.full
    while True:
        for family in (n / full)[families.first].argsort(stable=True).tolist():
            wider = torch.where(families.number == family, n + budget.multiple, n)
            if bool((wider <= full).all()) and float(budget.excess(wider)) <= 0:
                n = wider
                break
        else:
            return n
