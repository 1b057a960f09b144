"""Choose the gates that close next, and how fast they shrink, in place of a fixed λ.

The host calls the controller a few hundred times in a run. A gate takes a fixed number of steps to
close (`Schedule.window`). At every call the controller

1. predicts the cost when the gates that shrink now have closed,
2. compares it with the cost that the schedule prescribes one window from now,
3. selects gates to make up the difference, those with the least worth to the loss per unit of cost,
4. lets these shrink by |α| / window in every step. The loss trains all other gates as usual.

Example: the window is 50 steps, and the schedule prescribes 80 % of the MACs for step 350. At step
300 the gates that shrink now lead to 82 %. So gates with 2 % of the MACs are selected. If α is 1,
it shrinks by 0.02 in each of the next 50 steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cost.budget import Blocks, Budget
from .schedule import Schedule

_MARGIN = 1e-4  # shrink a little faster than needed, so that rounding leaves no gate open


class Controller:
    """Keep the cost on the path of the schedule.

    Args:
        budget: The limits, and the cost of any set of widths.
        schedule: The path of the cost over the steps.
        steps: The number of optimizer steps of the run.
    """

    def __init__(self, budget: Budget, schedule: Schedule, steps: int) -> None:
        self.budget, self.schedule, self.steps = budget, schedule, steps

    def shrink_rates(self, step: int, alpha: Tensor, worth: Tensor, rates: Tensor) -> Tensor:
        """Return how much each gate shrinks in every following step; 0 if only the loss moves it.

        Args:
            step: The number of steps done.
            alpha: α of all gates.
            worth: How much the loss needs each gate.
            rates: The last result. A gate that shrinks continues to shrink.
        """
        start, deadline = self.schedule.begins(self.steps), self.schedule.deadline(self.steps)
        if not start <= step < deadline:
            return torch.zeros_like(rates)
        duration = min(self.schedule.window_of(self.steps), deadline - step)
        remaining = torch.where(rates > 0, 0, alpha)  # after the gates that shrink now have closed
        if step + duration >= deadline:
            closing = (self.budget.land(remaining, worth) == 0) & (remaining != 0)
        else:
            closing = self._due(step + duration, remaining, worth)
        return torch.where(closing, (1 + _MARGIN) * alpha.abs() / duration, rates)

    def _due(self, step: int, alpha: Tensor, worth: Tensor) -> Tensor:
        """Return a mask of the gates that must be closed at `step` for the cost to be on the path.

        Before the landing, no gate closes that would bring the cost below the budget.
        """
        budget, n = self.budget, self.budget.widths(alpha)
        original_excess = float(budget.excess(budget.cost.full))
        target = original_excess * self.schedule.path(step, self.steps)
        if float(budget.excess(n)) <= target:
            return torch.zeros_like(alpha, dtype=torch.bool)
        blocks = budget.blocks(alpha, worth)
        most = budget.needed(n, blocks, 0.0) - (not budget.is_coarse)
        count = min(self._nearest(n, blocks, target), most)
        closing = (blocks.member >= 0) & (blocks.member < count)
        return closing & budget.planned(alpha, worth) if budget.is_coarse else closing

    def _nearest(self, n: Tensor, blocks: Blocks, target: float) -> int:
        """Return how many blocks to close so that the cost is as near to its path as possible.

        The last block crosses the path. An expensive channel may cross it by several percent, so
        that block waits if the cost is nearer to the path without it.
        """
        count = self.budget.needed(n, blocks, target)
        if count == 0 or self.budget.is_coarse:
            return count
        before, after = (
            abs(float(self.budget.excess(self.budget.after(n, blocks, k))) - target)
            for k in (count - 1, count)
        )
        return count - 1 if before < after else count
