"""Warn once in a run that is going to miss its budget."""

from __future__ import annotations

import warnings

from torch import Tensor

from ..channels.graph import Graph
from ..cost.budget import Budget
from .settings import RunSettings

_LAG = 0.1  # warn of a run that is behind its path by this share of the way to the budget
_BLOCKS = 4  # this many of the costliest channels or blocks may be missing without a report
_PATIENCE = 3  # checks in a row
_OVER = 0.02  # of the highest learning rate: schedulers go below that at the end of a training


class CourseCheck:
    """Compares a run with its schedule at every check of the gates.

    Args:
        graph: The groups of channels.
        budget: The limits, and the cost of any set of widths.
        settings: The goal of the run, and the path of the cost.
    """

    def __init__(self, graph: Graph, budget: Budget, settings: RunSettings) -> None:
        self.graph, self.budget, self.schedule = graph, budget, settings.schedule
        self.steps, self.deadline = settings.steps, settings.deadline
        # A new measurement of the latency may change how much is missing.
        self.timed = "latency" in settings.limits
        self._highest_rate = 0.0
        self._late_checks = 0
        self._warned = False

    def __call__(self, step: int, n: Tensor, rate: float, *, landed: bool) -> None:
        """Warn if this check of the gates shows a problem, unless a warning was given before.

        Args:
            step: The number of steps done.
            n: The widths of the groups.
            rate: The learning rate of the gates.
            landed: Whether the budget was met for good.
        """
        self._highest_rate = max(self._highest_rate, rate)
        if self._warned:
            return
        if landed:
            problem = self._reopened(n)
        else:
            problem = self._ends_early(step, rate) or self._lags(step, n)
        if problem:
            self._warned = True
            warnings.warn(f"step {step} of {self.steps}: {problem}.", stacklevel=2)

    def _reopened(self, n: Tensor) -> str:
        """Describe gates that opened after the landing."""
        if self.timed or float(self.budget.excess(n)) <= 0:
            return ""
        return (
            f"the budget was met before, but the model has {self._left(n)} of its MACs now, "
            f"because gates were changed from outside. Load the pruner's state with the weights"
        )

    def _ends_early(self, step: int, rate: float) -> str:
        """Describe a training that seems to end before the budget is met."""
        highest = self._highest_rate
        if step >= self.deadline or highest == 0 or rate > _OVER * highest:
            return ""
        low = f"{rate / highest:.1%} of its highest value" if rate else "0"
        return (
            f"the learning rate is {low}, but the budget will only be met at step {self.deadline}. "
            f"If the training ends now, set steps to the number of optimizer steps that are really "
            f"taken (several processes and gradient accumulation make them fewer)"
        )

    def _lags(self, step: int, n: Tensor) -> str:
        """Describe a cost that does not follow its path."""
        if self.timed or not self.deadline:
            return ""
        missing = float(self.budget.excess(n))
        way = float(self.budget.excess(self.budget.cost.full))
        planned = way * self.schedule.path(step, self.steps)
        late = missing - planned > _LAG * way
        late = late and missing - planned > _BLOCKS * float(self.budget.savings(n).max())
        self._late_checks = self._late_checks + 1 if late else 0
        if self._late_checks < _PATIENCE:
            return ""
        return (
            f"the cost does not follow its path: {self._left(n)} of the MACs are left, and the "
            f"budget has to be met at step {self.deadline}. Other code seems to overwrite the "
            f"gates. Do not change gates from outside; capture a CUDA graph after attach(), with "
            f"optimizer.step() in it"
        )

    def _left(self, n: Tensor) -> str:
        return f"{self.graph.cost.share(n)['macs']:.3f}"
