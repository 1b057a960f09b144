"""Plans by other methods, at an exact budget: what a learned plan has to beat.

Either the same share of every group is kept (`plan_by_score`), or what is above one threshold for
all groups (`plan_by_threshold`); always the channels with the largest scores. Then single channels
are put back as long as the budget allows. `shrink` takes these plans as it takes any other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .budget import Budget
from .compact import plan_of
from .groups import WHOLE, Graph, Plan
from .tape import named_tensors

_TINY = 1e-12  # the slope of a norm at zero is none


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


def scale_scores(model: nn.Module, graph: Graph) -> Tensor:
    """|γ| of the batch norm behind a channel; the mean, where several are coupled.

    A sum would grow with the number of layers on a residual stream, and be no measure to compare
    with a channel that has one norm. Channels without a batch norm are out of reach: infinite.
    """
    total, count = torch.zeros(2, graph.units, dtype=torch.float64)
    for path, module in model.named_modules():
        units = graph.axes.get(f"{path}.weight" if path else "weight", {}).get(0)
        if isinstance(module, _BatchNorm) and module.affine and units is not None:
            mine = units != WHOLE
            scales = module.weight.detach().double().cpu().abs()
            total.index_add_(0, units[mine], scales[mine])
            count.index_add_(0, units[mine], torch.ones_like(scales[mine]))
    return torch.where(count > 0, total / count, torch.inf)


class UnitNorms:
    """ℓ2 norm of all parameters that go with each unit: those that make it, follow it and read it;
    with `axes=graph.sites` only of those that read it.

    Can be differentiated, and captured in a CUDA graph. `sizes`: how many numbers each norm is of.
    """

    def __init__(
        self, model: nn.Module, graph: Graph, axes: dict[str, dict[int, Tensor]] | None = None
    ) -> None:
        axes = graph.axes if axes is None else axes
        self.parts: list[tuple[Tensor, int, Tensor]] = []
        self.sizes = torch.zeros(graph.units + 1, device=next(model.parameters()).device)
        for name, tensor in model.named_parameters():
            for axis, units in axes.get(name, {}).items():
                slots = torch.where(units == WHOLE, graph.units, units).to(tensor.device)
                self.parts.append((tensor, axis, slots))
                each = torch.full_like(slots, tensor.numel() // len(slots), dtype=torch.float32)
                self.sizes.index_add_(0, slots, each)
        self.sizes = self.sizes[:-1]

    def __call__(self) -> Tensor:
        squares = self.sizes.new_zeros(len(self.sizes) + 1)  # the last: of what stays whole
        for tensor, axis, slots in self.parts:
            mine = tensor.float().square().movedim(axis, 0).reshape(len(slots), -1).sum(1)
            squares = squares.index_add(0, slots, mine)
        return (squares[:-1] + _TINY).sqrt()

    @torch.no_grad()
    def scale(self, factors: Tensor) -> None:
        """Multiply all that a norm is of."""
        factors = torch.cat([factors, factors.new_ones(1)])
        for tensor, axis, slots in self.parts:
            shape = [1] * tensor.dim()
            shape[axis] = -1
            tensor.mul_(factors[slots].reshape(shape))


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
