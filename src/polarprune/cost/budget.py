"""The budget: limits on resources, prices of channels, and the gates that must close.

Widths and blocks. The widths n are the numbers of channels that each prunable group still has, in
the order of `graph.prunable`. A group closes in blocks of `multiple` channels, so that all widths
are multiples in the end. With `multiple_of=1` a block is one channel. Within a group, the channels
of the least importance are in the first block. Importance is |α|, or what a gate is worth to the
loss.

Families. Groups that must keep equal widths form a family (`Graph.families`) and close together: a
block of a family has the same number of channels of each of its groups, the least important of
each. Every other group is a family of its own. Widths in a family differ only after
`Graph.without_unread`, for a few steps, while a layer that reads the family closes. Channels by
which a group is wider than the narrowest of its family are then in no block; landing closes them.

Excess and prices. The excess of widths is the largest, over all resources, of share - limit, where
a share is cost / original cost; the budget is met when it is at most 0. The price of a channel is
what it costs at the present widths. Resources are weighted by how far each is above its limit.

Order. Blocks close in the order of importance / price, both added up over the groups of a family.
Importance is multiplied here by original width / remaining width, so that a narrow group loses its
last channels late.

Landing. `land` closes blocks in that order until the excess is at most 0. It skips a block that
would end the excess as long as smaller blocks can close instead. The last block may save more than
was missing; `WidthSearch` then gives channels back as long as they fit.

All of this runs on the host, on a copy of α, every few steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..channels.graph import FROZEN, Graph
from ..errors import PruneError
from ..tracing.model_state import on_host
from .families import FamilyIndex, FamilyLimits
from .resources import Cost, Resource
from .width_search import WidthSearch

FAST, WIDE = 8, 64  # "auto": wide groups keep multiples of 8 channels, which kernels process fast
_SOON = 4.0  # within this many of the costliest blocks of the budget, landing is planned


@dataclass(frozen=True)
class Blocks:
    """The blocks that may close, in the order in which to close them."""

    family: Tensor  # number of the family of each block
    count: Tensor  # channels of each group of the family in each block
    key: Tensor  # importance / price, where importance is that of the top channel of each group
    member: Tensor  # for every entry of α the number of its block, or -1 if it must not close


class Budget:
    """Limits on shares of the original cost, and the widths that are allowed.

    Args:
        graph: The traced model.
        limits: Resource -> largest share of its original cost.
        multiple_of: Every width has to be a multiple of this; "auto": of 8 in groups of at least 64
            channels.

    Attributes:
        owner: For every entry of α, the number of its group.
        families: Which groups keep equal widths.
        multiple: For every group, how many of its units close at once.
        minimum: For every group, the least allowed width.
        is_coarse: Whether some blocks are larger than one unit.
    """

    def __init__(self, graph: Graph, limits: dict[str, float], multiple_of: int | str = 1) -> None:
        with on_host():
            self._build(graph, limits, multiple_of)

    def _build(self, graph: Graph, limits: dict[str, float], multiple_of: int | str) -> None:
        groups = list(graph.prunable.values())
        self.cost: Cost = graph.cost
        self.limits = limits
        self.original = {key: max(value, 1) for key, value in self.cost.original().items()}
        self.owner = torch.tensor([i for i, g in enumerate(groups) for _ in range(g.size)])
        self.families = FamilyIndex(list(graph.prunable), graph.families.values())
        self.multiple = self._one_multiple(multiples(graph, multiple_of))
        sizes = self.cost.full.long()
        least = torch.tensor([g.minimum for g in groups])
        least = self.families.of_groups(self.families.most(least))
        blocks = torch.div(least + self.multiple - 1, self.multiple, rounding_mode="floor")
        self.minimum = torch.minimum(blocks * self.multiple, sizes)
        # A group narrower than one multiple closes entirely or not at all.
        narrow = sizes < self.multiple
        self.multiple = torch.where(narrow, sizes, self.multiple)
        self.minimum = torch.where(narrow, sizes * (self.minimum > 0), self.minimum)
        self.is_coarse = bool((self.multiple > 1).any()) or self.families.several
        self._by_family = FamilyLimits(self)

    def _one_multiple(self, multiple: Tensor) -> Tensor:
        """Return for every group the least common multiple in its family."""
        found = [1] * len(self.families.first)
        for family, own in zip(self.families.number.tolist(), multiple.tolist(), strict=True):
            found[family] = math.lcm(found[family], own)
        return self.families.of_groups(torch.tensor(found))

    def add(self, key: str, part: Resource) -> None:
        """Add a resource to which the limits refer."""
        self.cost.parts[key] = part
        self.original[key] = max(self.cost.original()[key], 1)

    # --- limits and prices ------------------------------------------------------------------------

    def excess(self, n: Tensor) -> Tensor:
        """Return how far above its limit the worst resource is, as a share of the original.

        Takes one set of widths, or one in each row.
        """
        shares = {key: self.cost.parts[key](n) / self.original[key] for key in self.limits}
        return torch.stack([shares[key] - limit for key, limit in self.limits.items()]).amax(0)

    def weights(self, n: Tensor) -> dict[str, float]:
        """Return the weight of each resource in the price: how far it is above its limit."""
        gaps = {
            key: max(float(self.cost.parts[key](n)) / self.original[key] - limit, 0.0)
            for key, limit in self.limits.items()
        }
        total = sum(gaps.values())
        if total <= 0:
            return {key: 1 / len(gaps) for key in gaps}
        return {key: gap / total for key, gap in gaps.items()}

    def combined(self, n: Tensor) -> tuple[Tensor, Tensor]:
        """Return Q and b of the price Qn + b, over all resources with their weights."""
        q = torch.zeros_like(self.cost.parts["macs"].q)
        b = torch.zeros_like(self.cost.parts["macs"].b)
        for key, weight in self.weights(n).items():
            own_q, own_b = self.cost.parts[key].linear(n)
            q = q + own_q * (weight / self.original[key])
            b = b + own_b * (weight / self.original[key])
        return q, b

    def savings(self, n: Tensor) -> Tensor:
        """Return for each family by how much one block less would lower the excess."""
        fewer = n - self.families.totals(torch.diag(torch.minimum(self.multiple.double(), n)))
        return self.excess(n) - self.excess(fewer)

    def price(self, n: Tensor) -> Tensor:
        """Return the price of a channel of each group at widths `n`."""
        q, b = self.combined(n)
        return (q @ n + b).clamp_min(1e-12)

    def check_reachable(self) -> None:
        """Raise a `PruneError` if no allowed widths meet the budget."""
        n = self.lowest_widths()
        lowest = {key: float(self.cost.parts[key](n)) / self.original[key] for key in self.limits}
        bad = [
            f"{key}={limit} (the lowest is {math.ceil(lowest[key] * 1e4) / 1e4:.4f})"
            for key, limit in self.limits.items()
            if lowest[key] > limit
        ]
        if bad:
            raise PruneError(
                f"budget out of reach: {', '.join(bad)}. The rest of this model cannot be removed; "
                f"set a higher budget, a smaller multiple_of or fewer keep=[...]"
                + (", or leave uniform out." if self.families.several else ".")
            )

    # --- widths and blocks ------------------------------------------------------------------------

    def lowest_widths(self) -> Tensor:
        """Return the least allowed width of every group."""
        return self.minimum.double()

    def widths(self, alpha: Tensor) -> Tensor:
        """Return how many gates of each group are not closed."""
        return torch.bincount(self.owner[alpha != 0], minlength=len(self.minimum)).double()

    def blocks(self, alpha: Tensor, importance: Tensor | None = None) -> Blocks:
        """Return the blocks that may close, in order; importance is |α| by default."""
        with on_host():
            return self._sort(alpha, _importance(alpha, importance))

    def _sort(self, alpha: Tensor, importance: Tensor) -> Blocks:
        families, widths = self.families, self.widths(alpha).long()
        level = families.least(widths)
        n = families.of_groups(level)
        order, owner, rank = self._ranked(alpha, widths, importance)
        closes = rank < (widths - self.minimum)[owner]
        if families.several:
            rank = rank - (widths - n)[owner]  # below 0: the group is wider than its family
            closes &= rank >= 0
        order, owner, rank = order[closes], owner[closes], rank[closes]
        number, is_top = self._block_numbers(n, owner, rank)
        many = self._count_blocks(level)
        block = families.of_groups(many.cumsum(0) - many)[owner] + number
        family = torch.arange(len(level)).repeat_interleave(many)
        count = block.bincount()
        if families.several:
            count = torch.div(count, families.sizes[family], rounding_mode="floor")
        scarcity = self.cost.full[owner] / (n[owner] - rank)  # grows as few channels are left
        top = torch.zeros(len(family), dtype=torch.float64)
        top.index_add_(0, block, torch.where(is_top, importance[order] * scarcity, 0.0))
        key = top / families.totals(self.price(widths.double()))[family]
        ranking = key.argsort(stable=True)
        position = torch.empty_like(ranking)
        position[ranking] = torch.arange(len(ranking))
        member = torch.full_like(self.owner, FROZEN)
        member[order] = position[block]
        return Blocks(family[ranking], count[ranking], key[ranking], member)

    def _count_blocks(self, level: Tensor) -> Tensor:
        """Return how many blocks the families have above their minimums, at these widths."""
        multiple = self._by_family.multiple
        wide = (level - self._by_family.minimum).clamp_min(0)
        return torch.div(wide + multiple - 1, multiple, rounding_mode="floor")

    def _block_numbers(self, n: Tensor, owner: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
        """Return the block number of each channel, and whether it is the last channel of its block.

        Blocks are numbered within each group, and ranks grow with importance. The first block of a
        group has the channels above a multiple, every other one has `multiple` channels.
        """
        multiple = self.multiple[owner]
        shifted = rank + ((self.multiple - n % self.multiple) % self.multiple)[owner]
        return torch.div(shifted, multiple, rounding_mode="floor"), (shifted + 1) % multiple == 0

    def _ranked(
        self, alpha: Tensor, n: Tensor, importance: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sort the entries of α that are not closed, of these widths, by group and importance.

        Returns:
            Their indices, their groups, and their ranks in their groups (0: least important).
        """
        kept_units = (alpha != 0).nonzero().flatten()
        order = kept_units[importance[kept_units].argsort(stable=True)]
        order = order[self.owner[order].argsort(stable=True)]
        owner, first = self.owner[order], torch.cumsum(n, 0) - n
        return order, owner, torch.arange(len(order), device="cpu") - first[owner]

    def after(self, n: Tensor, blocks: Blocks, k: int) -> Tensor:
        """Return the widths when the first `k` blocks are closed."""
        gone = n.new_zeros(len(self.families.first))
        gone.index_add_(0, blocks.family[:k], blocks.count[:k].double())
        return n - self.families.of_groups(gone)

    def needed(self, n: Tensor, blocks: Blocks, target: float) -> int:
        """Return how many blocks have to close, in order, for an excess of at most `target`."""
        low, high = 0, len(blocks.family)
        while low < high:
            middle = (low + high) // 2
            if float(self.excess(self.after(n, blocks, middle))) <= target:
                high = middle
            else:
                low = middle + 1
        return low

    # --- landing ----------------------------------------------------------------------------------

    def land(self, alpha: Tensor, importance: Tensor | None = None) -> Tensor:
        """Return α with as many gates closed as the budget needs, as close to it as blocks allow.

        No block that is closed here would fit into the budget.
        """
        before, alpha = alpha, alpha.clone()
        self.round_widths_down(alpha, importance)
        while float(self.excess(self.widths(alpha))) > 0:
            blocks = self.blocks(alpha, importance)
            if not len(blocks.family):
                raise PruneError(
                    "the budget cannot be met: every group is at its minimum. Set a higher budget."
                )
            for block in self._next_to_close(self.families.least(self.widths(alpha)), blocks):
                alpha[blocks.member == block] = 0
        return self._use_what_is_left(before, alpha, importance)

    def planned(self, alpha: Tensor, importance: Tensor) -> Tensor:
        """Return a mask of the gates that landing would close, as far as it is known now.

        Where blocks are large, only these may close before landing. The last block may save more
        than is missing, so that others need not close, but a closed gate cannot be restored.
        """
        n = self.widths(alpha)
        if float(self.excess(n)) > _SOON * self._largest_saving(n):
            return torch.ones_like(alpha, dtype=torch.bool)
        rounded = alpha.clone()
        self.round_widths_down(rounded, importance)
        blocks = self.blocks(rounded, importance)
        needed = self.needed(self.widths(rounded), blocks, 0.0)
        closed = (blocks.member >= 0) & (blocks.member < needed)
        landed = self._use_what_is_left(rounded, torch.where(closed, 0, rounded), importance)
        return landed == 0

    def round_widths_down(self, alpha: Tensor, importance: Tensor | None = None) -> None:
        """Close the least important gates above a multiple and above the family, in place.

        A group that would fall below its minimum keeps its width.
        """
        n = self.widths(alpha).long()
        over = n % self.multiple
        over[n - over < self.minimum] = 0
        over = n - self.families.of_groups(self.families.least(n - over))
        order, owner, rank = self._ranked(alpha, n, _importance(alpha, importance))
        alpha[order[rank < over[owner]]] = 0

    def _largest_saving(self, n: Tensor) -> float:
        """Return what the costliest block saves, of blocks with more than one unit."""
        is_large = self._by_family.multiple * self.families.sizes > 1
        return float((self.savings(n) * is_large).max())

    def _next_to_close(self, n: Tensor, blocks: Blocks) -> list[int]:
        """Return blocks to close in order while the excess stays positive; `n` is for families.

        If every block would end the excess, return the one that leaves the least unused. Latency
        falls in steps: a block that saves nothing closes only together with one that does.
        """
        chosen: list[int] = []
        limits = self._by_family
        best, least, now = [0], -math.inf, float(limits.excess(n))
        waiting: dict[int, list[int]] = {}  # family -> blocks that save nothing yet
        done = set()  # families whose next block would end the excess
        for block, family in enumerate(blocks.family.tolist()):
            if family in done:
                continue
            mine = [*waiting.pop(family, []), block]
            left = n.clone()
            left[family] -= blocks.count[mine].sum()
            excess = float(limits.excess(left))
            if excess >= now:
                waiting[family] = mine
            elif excess > 0:
                chosen += mine
                n, now = left, excess
            else:
                done.add(family)
                if excess > least:
                    best, least = mine, excess
        return chosen or best

    def _use_what_is_left(
        self, before: Tensor, alpha: Tensor, importance: Tensor | None = None
    ) -> Tensor:
        """Return α with gates of `before` restored, so that little of the budget stays unused.

        Within a group the least important gates close first, so the widths determine the result.
        """
        importance, families = _importance(before, importance), self.families
        most = self.widths(before)
        order, owner, rank = self._ranked(before, most.long(), importance)
        first = torch.cumsum(most, 0) - most

        def importance_of_last_closed(level: Tensor) -> Tensor:
            n = families.of_groups(level)
            last = (first + (most - n - 1).clamp_min(0)).long().clamp_max(len(order) - 1)
            return families.totals(importance[order[last]])

        search = WidthSearch(self._by_family, families.least(most), importance_of_last_closed)
        level = search.swap(search.widen(families.least(self.widths(alpha))))
        kept = order[rank >= (most - families.of_groups(level))[owner]]
        return torch.zeros_like(before).index_copy(0, kept, before[kept])


def _importance(alpha: Tensor, importance: Tensor | None) -> Tensor:
    """Return the given importance, or |α|."""
    return alpha.abs().double() if importance is None else importance


def multiples(graph: Graph, multiple_of: int | str) -> Tensor:
    """Return for each group how many units make up a multiple; a unit may be several channels."""
    wanted = {
        name: (FAST if group.size >= WIDE else 1) if isinstance(multiple_of, str) else multiple_of
        for name, group in graph.prunable.items()
    }
    found = dict.fromkeys(graph.prunable, 1)
    groups = list(graph.prunable.values())
    for axes in graph.axes.values():
        for units in axes.values():
            counts = torch.bincount(units[units != FROZEN], minlength=graph.units)
            for group in groups:
                times = int(counts[group.offset])
                if times:
                    own = wanted[group.name]
                    need = own // math.gcd(own, times)
                    found[group.name] = math.lcm(found[group.name], need)
    return torch.tensor(list(found.values()), dtype=torch.long)
