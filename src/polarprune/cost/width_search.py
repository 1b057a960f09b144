"""Search over widths: use the part of a budget that landing left unused.

Here every family has one width, because all of its groups must be equally wide.

Landing closes blocks in order until the budget is met. The last block may save much more than was
missing, so the widths here are changed block by block until little of the budget is unused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

_NEAR = 0.005  # share of the original cost that may stay unused before blocks are swapped


class SearchLimits(Protocol):
    """The part of a budget that a search uses; `FamilyLimits` has it."""

    multiple: Tensor
    minimum: Tensor

    def excess(self, n: Tensor) -> Tensor:
        """Return how far above its limit the worst resource is."""


class WidthSearch:
    """Widen and narrow families of groups by whole blocks, within a budget.

    Args:
        limits: The budget.
        most: The widths before landing, which the search does not exceed.
        importance: Widths n -> for each family, the importance of the block that it lost last.
    """

    def __init__(
        self, limits: SearchLimits, most: Tensor, importance: Callable[[Tensor], Tensor]
    ) -> None:
        self.limits, self.most, self.importance = limits, most, importance
        self.blocks = torch.diag(limits.multiple.double())  # row k: one block of family k

    def widen(self, n: Tensor) -> Tensor:
        """Add blocks while one of them fits, the most important first."""
        while True:
            fits = (self.limits.excess(n + self.blocks) <= 0) & self._was_wider(n)
            if not bool(fits.any()):
                return n
            n = n + self.blocks[int(torch.where(fits, self.importance(n), -1.0).argmax())]

    def swap(self, n: Tensor) -> Tensor:
        """Add a block that does not fit and close others, as long as less stays unused.

        This matters where blocks are large. Where little is unused, `n` is returned as it is.
        """
        excess = float(self.limits.excess(n))
        while excess < -_NEAR:
            closed = self._was_wider(n).nonzero().flatten().tolist()
            trials = [self._narrow(n + self.blocks[family], family) for family in closed]
            found = [self.widen(trial) for trial in trials if trial is not None]
            left = [float(self.limits.excess(trial)) for trial in found]
            if not left or max(left) < excess + _NEAR / 2:
                break
            n, excess = found[left.index(max(left))], max(left)
        return n

    def _was_wider(self, n: Tensor) -> Tensor:
        """Return which families had at least one block more before landing."""
        return n + self.limits.multiple <= self.most

    def _narrow(self, n: Tensor, family: int) -> Tensor | None:
        """Close blocks of other families than this until the budget is met; None if it cannot be.

        The block with the least importance for its saving closes first. As soon as one block is
        enough, the one that leaves the least unused closes.
        """
        while (now := float(self.limits.excess(n))) > 0:
            may = n - self.limits.multiple >= self.limits.minimum
            may[family] = False
            if not bool(may.any()):
                return None
            excess = self.limits.excess(n - self.blocks)
            enough = may & (excess <= 0)
            if bool(enough.any()):
                chosen = torch.where(enough, excess, -math.inf).argmax()
            else:
                saved = (now - excess).clamp_min(1e-12)
                key = self.importance(n - self.limits.multiple) / saved
                chosen = key.where(may, math.inf).argmin()
            n = n - self.blocks[int(chosen)]
        return n
