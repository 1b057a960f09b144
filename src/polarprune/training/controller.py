"""Which gates close next: decided on the host, now and then.

The cost follows a path down to the budget. Shrinking a gate takes a fixed time (`Schedule.window`),
so at every look the controller asks which gates have to be closed when that time is over, and lets
them shrink. Those go first whose channels the loss needs least for what they cost. All others are
left to the loss, so that at any time only a few gates are half-open and the network adapts to
their loss while it trains.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cost.budget import Blocks, Budget
from .schedule import Schedule

_MORE = 1e-4  # than exactly what closes a gate in time: numbers are rounded


class Controller:
    """Keeps the cost on the path of the schedule."""

    def __init__(self, budget: Budget, schedule: Schedule, steps: int) -> None:
        self.budget, self.schedule, self.steps = budget, schedule, steps

    def ramps(self, step: int, alpha: Tensor, worth: Tensor, ramp: Tensor) -> Tensor:
        """By how much each gate is to shrink in every step from now on; 0: it is left alone.

        Args:
            step: the number of steps done.
            alpha: of all gates.
            worth: what each of them is worth to the loss.
            ramp: what was returned last. A gate that shrinks goes on shrinking.
        """
        begins, deadline = self.schedule.begins(self.steps), self.schedule.deadline(self.steps)
        if not begins <= step < deadline:
            return torch.zeros_like(ramp)
        within = min(self.schedule.window_of(self.steps), deadline - step)
        left = torch.where(ramp > 0, 0, alpha)  # when those have closed that shrink now
        if step + within >= deadline:
            closing = (self.budget.land(left, worth) == 0) & (left != 0)
        else:
            closing = self._due(step + within, left, worth)
        return torch.where(closing, (1 + _MORE) * alpha.abs() / within, ramp)

    def _due(self, step: int, alpha: Tensor, worth: Tensor) -> Tensor:
        """What has to close for the cost to be on its path then; nothing that ends the excess."""
        budget, n = self.budget, self.budget.widths(alpha)
        first = float(budget.excess(budget.cost.full))
        target = first * self.schedule.path(step, self.steps)
        if float(budget.excess(n)) <= target:
            return torch.zeros_like(alpha, dtype=torch.bool)
        blocks = budget.blocks(alpha, worth)
        last = budget.needed(n, blocks, 0.0) - (not budget.is_coarse)
        count = min(self._nearest(n, blocks, target), last)
        closing = (blocks.member >= 0) & (blocks.member < count)
        return closing & budget.planned(alpha, worth) if budget.is_coarse else closing

    def _nearest(self, n: Tensor, blocks: Blocks, target: float) -> int:
        """How many blocks to close so that the cost is as near to its path as blocks allow.

        The last block crosses the path. An expensive channel would cross it by points, so that
        block waits if the cost is nearer to the path without it.
        """
        count = self.budget.needed(n, blocks, target)
        if count == 0 or self.budget.is_coarse:
            return count
        before, after = (
            abs(float(self.budget.excess(self.budget.after(n, blocks, k))) - target)
            for k in (count - 1, count)
        )
        return count - 1 if before < after else count
