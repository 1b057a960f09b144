"""The budget: what the limits are, what a channel costs, and which gates have to close for it.

All of this runs on the host, on a copy of α, every few steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..channels.graph import FROZEN, Graph
from ..errors import PruneError
from .resources import Cost, Part

Felt = Callable[[Tensor], Tensor]
_SOON = 4.0  # costliest blocks away from the budget, what will be closed is planned
_NEAR = 0.005  # of the original: what may stay unused before blocks are exchanged for it


@dataclass(frozen=True)
class Blocks:
    """What can close next, in order: entries that close together (one, or `multiple_of`)."""

    group: Tensor
    count: Tensor
    key: Tensor  # effort / price, of the entry that takes most
    member: Tensor  # for every entry of α the block it is in, or -1 if it has to stay


class Budget:
    """Limits on shares of the original cost, on a grid of allowed widths."""

    def __init__(self, graph: Graph, limits: dict[str, float], multiple_of: int = 1) -> None:
        with torch.device("cpu"):  # whatever the user's default is
            self._build(graph, limits, multiple_of)

    def _build(self, graph: Graph, limits: dict[str, float], multiple_of: int) -> None:
        groups = list(graph.prunable.values())
        self.cost: Cost = graph.cost
        self.limits = limits
        self.original = {key: max(value, 1) for key, value in self.cost.original().items()}
        self.owner = torch.tensor([i for i, g in enumerate(groups) for _ in range(g.size)])
        self.multiple = _multiples(graph, multiple_of)
        sizes = self.cost.full.long()
        least = torch.tensor([g.minimum for g in groups])
        blocks = torch.div(least + self.multiple - 1, self.multiple, rounding_mode="floor")
        self.minimum = torch.minimum(blocks * self.multiple, sizes)
        narrow = sizes < self.multiple  # cannot be a multiple at all: whole, or nothing
        self.multiple = torch.where(narrow, sizes, self.multiple)
        self.minimum = torch.where(narrow, sizes * (self.minimum > 0), self.minimum)
        self.is_coarse = bool((self.multiple > 1).any())

    def add(self, key: str, part: Part) -> None:
        """Another resource, which the limits speak of."""
        self.cost.parts[key] = part
        self.original[key] = max(self.cost.original()[key], 1)

    def excess(self, n: Tensor) -> Tensor:
        """How far above its limit the worst resource is, as a share of the original."""
        each = [self.cost.parts[key](n) / self.original[key] - limit
                for key, limit in self.limits.items()]  # fmt: skip
        return torch.stack(each).amax(0)

    def weights(self, n: Tensor) -> dict[str, float]:
        """How much each resource counts in the price: by how far it is from its limit."""
        gaps = {
            key: max(float(self.cost.parts[key](n)) / self.original[key] - limit, 0.0)
            for key, limit in self.limits.items()
        }
        total = sum(gaps.values())
        if total <= 0:
            return {key: 1 / len(gaps) for key in gaps}
        return {key: gap / total for key, gap in gaps.items()}

    def combined(self, n: Tensor) -> tuple[Tensor, Tensor]:
        """Q and b of the weighted, normalised resources: the prices that the gates feel."""
        q = torch.zeros_like(self.cost.parts["macs"].q)
        b = torch.zeros_like(self.cost.parts["macs"].b)
        for key, weight in self.weights(n).items():
            own_q, own_b = self.cost.parts[key].linear(n)
            q = q + own_q * (weight / self.original[key])
            b = b + own_b * (weight / self.original[key])
        return q, b

    def check_reachable(self) -> None:
        """Refuse a budget that no choice of widths can meet."""
        n = self.lowest_widths()
        lowest = {key: float(self.cost.parts[key](n)) / self.original[key] for key in self.limits}
        bad = [
            f"{key}={limit} (the lowest is {math.ceil(lowest[key] * 1e4) / 1e4:.4f})"
            for key, limit in self.limits.items()
            if lowest[key] > limit
        ]
        if bad:
            raise PruneError(
                f"budget out of reach: {', '.join(bad)}. What the rest costs cannot be removed "
                f"from this model; set a higher budget, a smaller multiple_of or fewer keep=[...]."
            )

    def lowest_widths(self) -> Tensor:
        return self.minimum.double()

    def widths(self, alpha: Tensor) -> Tensor:
        return torch.bincount(self.owner[alpha != 0], minlength=len(self.minimum)).double()

    def price(self, n: Tensor) -> Tensor:
        """What one more channel of each group costs, as the gates feel it."""
        q, b = self.combined(n)
        return (q @ n + b).clamp_min(1e-12)

    def blocks(self, alpha: Tensor, effort: Tensor | None = None) -> Blocks:
        """Live entries in blocks, those first that take the least effort (by default |α|) for what
        they save; within a group, the least effort."""
        with torch.device("cpu"):
            return self._sort(alpha, alpha.abs().double() if effort is None else effort)

    def _sort(self, alpha: Tensor, effort: Tensor) -> Blocks:
        n = self.widths(alpha).long()
        price = self.price(n.double())
        order, owner = self._ordered(alpha, effort)
        first = torch.cumsum(n, 0) - n
        rank = torch.arange(len(order)) - first[owner]
        # the first block takes what is over a multiple, the others a multiple each
        shift = (self.multiple - n % self.multiple) % self.multiple
        number = torch.div(rank + shift[owner], self.multiple[owner], rounding_mode="floor")
        may = n[owner] - self.minimum[owner]
        closes = rank < may
        scarce = self.cost.full[owner] / (n[owner] - rank)  # the fewer are left, the dearer
        identity = torch.stack([owner, number])[:, closes]
        found, inverse, count = identity.unique(dim=1, return_inverse=True, return_counts=True)
        top = torch.zeros(found.shape[1], dtype=torch.float64)
        felt = (effort[order] * scarce)[closes]
        top = top.scatter_reduce(0, inverse, felt, "amax", include_self=False)
        key = top / price[found[0]]
        ranking = key.argsort(stable=True)
        place = torch.empty_like(ranking)
        place[ranking] = torch.arange(len(ranking))
        member = torch.full_like(self.owner, FROZEN)
        member[order[closes]] = place[inverse]
        return Blocks(found[0][ranking], count[ranking], key[ranking], member)

    def _ordered(self, alpha: Tensor, effort: Tensor) -> tuple[Tensor, Tensor]:
        """The live entries, group after group, in each the least effort first; and their groups."""
        live = (alpha != 0).nonzero().flatten()
        order = live[effort[live].argsort(stable=True)]
        order = order[self.owner[order].argsort(stable=True)]
        return order, self.owner[order]

    def after(self, n: Tensor, blocks: Blocks, k: int) -> Tensor:
        """Widths when the first k blocks have closed."""
        gone = torch.zeros_like(n).index_add(0, blocks.group[:k], blocks.count[:k].double())
        return n - gone

    def needed(self, n: Tensor, blocks: Blocks, target: float) -> int:
        """How many blocks have to close, in order, for the excess to come down to `target`."""
        low, high = 0, len(blocks.group)
        while low < high:
            middle = (low + high) // 2
            if float(self.excess(self.after(n, blocks, middle))) <= target:
                high = middle
            else:
                low = middle + 1
        return low

    def planned(self, alpha: Tensor, effort: Tensor) -> Tensor:
        """What landing would close, as far as can be told now: as a mask.

        Where blocks are large, only this may close before: the last block may save more than is
        missing, and then others need not close, but what is closed cannot be put back.
        """
        n = self.widths(alpha)
        if float(self.excess(n)) > _SOON * self._largest(n):
            return torch.ones_like(alpha, dtype=torch.bool)
        even = alpha.clone()  # what has begun to close will go
        self.even_out(even, effort)
        blocks = self.blocks(even, effort)
        needed = self.needed(self.widths(even), blocks, 0.0)
        closed = (blocks.member >= 0) & (blocks.member < needed)
        return self._filled(even, torch.where(closed, 0, even), effort) == 0

    def _largest(self, n: Tensor) -> float:
        """What the costliest block saves, where blocks are more than one channel."""
        fewer = n - torch.diag(torch.minimum(self.multiple.double(), n))
        saved = self.excess(n) - self.excess(fewer)
        return float((saved * (self.multiple > 1)).max())

    def land(self, alpha: Tensor, effort: Tensor | None = None) -> Tensor:
        """Close what is still needed, in order, as close to the budget as blocks allow.

        Nothing that was live before and is closed now would fit under the budget.
        """
        before, alpha = alpha, alpha.clone()
        self.even_out(alpha, effort)
        while float(self.excess(self.widths(alpha))) > 0:
            blocks = self.blocks(alpha, effort)
            if not len(blocks.group):
                raise PruneError("the budget cannot be met with the gates that are left")
            for block in self._affordable(self.widths(alpha), blocks):
                alpha[blocks.member == block] = 0
        return self._filled(before, alpha, effort)

    def _filled(self, before: Tensor, alpha: Tensor, effort: Tensor | None = None) -> Tensor:
        """Put back of what was live before as much as fits, or something else that leaves less.

        Within a group those with the least effort close first, so widths say it all.
        """
        ranking = before.abs().double() if effort is None else effort
        places, owner = self._ordered(before, ranking)
        most = self.widths(before)
        first = torch.cumsum(most, 0) - most

        def felt(n: Tensor) -> Tensor:
            """The effort that it took to close the block that each group lost last."""
            last = (first + (most - n - 1).clamp_min(0)).long().clamp_max(len(places) - 1)
            return ranking[places[last]]

        n = self._exchanged(self._put_back(self.widths(alpha), most, felt), most, felt)
        rank = torch.arange(len(places), device="cpu") - first[owner]
        kept = places[rank >= (most - n)[owner]]
        return torch.zeros_like(before).index_copy(0, kept, before[kept])

    def _put_back(self, n: Tensor, most: Tensor, felt: Felt) -> Tensor:
        """Widen one block after another that the budget has room for, most effort first.

        The block that ended the excess may have saved so much that others need not have closed.
        """
        blocks = torch.diag(self.multiple.double())
        while True:
            fits = (self.excess(n + blocks) <= 0) & (n + self.multiple <= most)
            if not bool(fits.any()):
                return n
            n = n + blocks[int(torch.where(fits, felt(n), -1.0).argmax())]

    def _exchanged(self, n: Tensor, most: Tensor, felt: Felt) -> Tensor:
        """Where blocks are large: put one back and close others, if that leaves less unused."""
        blocks = torch.diag(self.multiple.double())
        excess = float(self.excess(n))
        while excess < -_NEAR:
            closed = (n + self.multiple <= most).nonzero().flatten().tolist()
            trials = [self._narrowed(n + blocks[group], group, felt) for group in closed]
            found = [self._put_back(trial, most, felt) for trial in trials if trial is not None]
            left = [float(self.excess(trial)) for trial in found]
            if not left or max(left) < excess + _NEAR / 2:
                break
            n, excess = found[left.index(max(left))], max(left)
        return n

    def _narrowed(self, n: Tensor, stays: int, felt: Felt) -> Tensor | None:
        """Close blocks of other groups until the budget is met; at last the one that is missing."""
        blocks = torch.diag(self.multiple.double())
        while (now := float(self.excess(n))) > 0:
            may = n - self.multiple >= self.minimum
            may[stays] = False
            if not bool(may.any()):
                return None
            excess = self.excess(n - blocks)
            fits = may & (excess <= 0)
            effort = felt(n - self.multiple) / (now - excess).clamp_min(1e-12)
            least = torch.where(fits, excess, -math.inf).argmax()
            n = n - blocks[int(least if bool(fits.any()) else effort.where(may, math.inf).argmin())]
        return n

    def even_out(self, alpha: Tensor, effort: Tensor | None = None) -> None:
        """Widths that are not yet a multiple lose the entries that take the least effort."""
        n = self.widths(alpha).long()
        over = n % self.multiple
        over[n - over < self.minimum] = 0
        places, owner = self._ordered(alpha, alpha.abs().double() if effort is None else effort)
        rank = torch.arange(len(places), device="cpu") - (torch.cumsum(n, 0) - n)[owner]
        alpha[places[rank < over[owner]]] = 0

    def _affordable(self, n: Tensor, blocks: Blocks) -> list[int]:
        """Blocks to close in order, as long as the excess stays; if none, those that end it.

        Time goes down in stairs: what saves nothing by itself closes only with what does.
        """
        chosen: list[int] = []
        best, least, now = [0], -math.inf, float(self.excess(n))
        waiting: dict[int, list[int]] = {}  # of a group: nothing saved yet
        done = set()
        for block, group in enumerate(blocks.group.tolist()):
            if group in done:
                continue
            mine = [*waiting.pop(group, []), block]
            left = n.clone()
            left[group] -= blocks.count[mine].sum()
            excess = float(self.excess(left))
            if excess >= now:
                waiting[group] = mine
            elif excess > 0:
                chosen += mine
                n, now = left, excess
            else:
                done.add(group)
                if excess > least:
                    best, least = mine, excess
        return chosen or best


def _multiples(graph: Graph, multiple_of: int) -> Tensor:
    """How many units of each group make up a multiple, where a unit is several channels."""
    found = dict.fromkeys(graph.prunable, 1)
    groups = list(graph.prunable.values())
    for axes in graph.axes.values():
        for units in axes.values():
            counts = torch.bincount(units[units != FROZEN], minlength=graph.units)
            for group in groups:
                times = int(counts[group.offset])
                if times:
                    need = multiple_of // math.gcd(multiple_of, times)
                    found[group.name] = math.lcm(found[group.name], need)
    return torch.tensor(list(found.values()), dtype=torch.long)
