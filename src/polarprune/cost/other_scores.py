"""Plans by other methods, at an exact budget: what a learned plan has to beat.

Either the same share of every group is kept (`plan_by_score`), or what is above one threshold for
all groups (`plan_by_threshold`); always the channels with the largest scores. Then single channels
are put back as long as the budget allows. `shrink` takes these plans as it takes any other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..channels.graph import FROZEN, Graph, Plan, plan_of
from ..tracing.model_state import named_tensors
from .budget import Budget

_TINY = 1e-12  # the slope of a norm at zero is none


def magnitude_scores(model: nn.Module, graph: Graph) -> Tensor:
    """ℓ2 norm of all weights that make a channel."""
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
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(graph.units, dtype=torch.float64, generator=generator)


def scale_scores(model: nn.Module, graph: Graph) -> Tensor:
    """|γ| of the batch norm behind a channel; the mean, where several are coupled.

    A sum would grow with the number of layers on a residual stream, and be no measure to compare
    with a channel that has one norm. Channels without a batch norm are out of reach: infinite.
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
    """ℓ2 norm of all parameters that go with each unit, by their `axes`: with those of a graph, all
    that make it, follow it and read it; with its `sites`, only those that read it.

    Can be differentiated, and captured in a CUDA graph. All parameters are one vector here, with
    the units of every number beside it: a few large kernels instead of thousands of small ones.
    `sizes`: how many numbers each norm is of.
    """

    def __init__(self, model: nn.Module, units: int, axes: dict[str, dict[int, Tensor]]) -> None:
        found = [
            (p, list(axes[name].items())) for name, p in model.named_parameters() if axes.get(name)
        ]
        self.tensors: list[Tensor] = [tensor for tensor, _ in found]
        self.units = units
        self.slots = [  # `units` itself: none
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
        return torch.cat([tensor.float().flatten() for tensor in self.tensors])

    def _sums(self, numbers: Tensor) -> Tensor:
        sums = numbers.new_zeros(self.units + 1)
        for slots in self.slots:
            sums = sums.index_add(0, slots, numbers)
        return sums[:-1]

    def squares(self) -> Tensor:
        return self._sums(self._vector().square())

    def __call__(self) -> Tensor:
        return (self.squares() + _TINY).sqrt()

    @torch.no_grad()
    def scale(self, factors: Tensor) -> None:
        """Multiply all that a norm is of."""
        factors = torch.cat([factors, factors.new_ones(1)])
        each = torch.stack([factors[slots] for slots in self.slots]).prod(0)
        torch._foreach_mul_(self.tensors, self._apart(each))

    @torch.no_grad()
    def pull(self, strengths: Tensor) -> None:
        """Add `strengths` times the parameters to their gradients, for every norm they are in."""
        strengths = torch.cat([strengths, strengths.new_zeros(1)])
        each = torch.stack([strengths[slots] for slots in self.slots]).sum(0) * self._vector()
        for tensor, more in zip(self.tensors, self._apart(each), strict=True):
            if tensor.grad is not None:
                tensor.grad += more

    def _apart(self, numbers: Tensor) -> list[Tensor]:
        parts = numbers.split([tensor.numel() for tensor in self.tensors])
        return [part.view(t.shape) for part, t in zip(parts, self.tensors, strict=True)]


def _of_each(tensor: Tensor, axis: int, units: Tensor, none: int) -> Tensor:
    """The unit of every number of a tensor, of which one axis has units."""
    shape = [1] * tensor.dim()
    shape[axis] = -1
    units = torch.where(units == FROZEN, none, units).to(tensor.device)
    return units.reshape(shape).expand(tensor.shape).flatten()


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
    for (name, group), width in zip(graph.prunable.items(), n.long().tolist(), strict=True):
        own = scores[group.offset : group.offset + group.size]
        plan[name] = sorted(own.argsort(descending=True, stable=True)[:width].tolist())
    return plan


def plan_by_threshold(graph: Graph, scores: Tensor, **limits: float) -> Plan:
    """Keep the highest scores of all groups together, to `macs=` and/or `params=` of the original.

    What is below the lowest threshold that meets the budget goes; then single channels are put
    back, the highest first, while they fit. Every group keeps what it must; beyond that, a channel
    with a score of 0 goes in any case.
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
    """The units that are kept in any case: of each group as many as must stay."""
    kept = torch.zeros(len(order), dtype=torch.bool)
    for group, least in enumerate(budget.lowest_widths().long().tolist()):
        kept[order[budget.owner[order] == group][:least]] = True
    return kept


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
