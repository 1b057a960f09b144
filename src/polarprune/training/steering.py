"""Count the steps of a run, and check the gates on the host at regular steps.

At every check, channels that only closed channels read are closed, the controller selects the gates
that close next, and a row is added to the history. At the deadline the budget is met for good.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..channels.graph import Graph
from ..cost.budget import Budget
from ..cost.stopwatch import Stopwatch
from ..gates.gate import gate_value
from .controller import Controller
from .course_check import CourseCheck
from .schedule import Schedule
from .stepper import Stepper

_CHECKS = 400  # in one run, at most
_BINS = 20
Row = dict[str, Any]  # what one check of the gates found
_LARGE_LANDING = 0.005  # share of the MACs that may close at once without a warning


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        step: optimizer steps done.
        landed: whether the budget is met for good.
        landing: the gates and the share of the MACs that were closed at once at the deadline.
        history: one row for every check of the gates.
    """

    step: int = 0
    landed: bool = False
    landing: dict[str, float] = field(default_factory=lambda: {"gates": 0, "macs": 0.0})
    history: list[Row] = field(default_factory=list)


class Steering:
    """Steer a run to its budget.

    Args:
        graph: the groups of channels.
        budget: the limits, and the cost of any set of widths.
        stepper: the gates.
        schedule: the path of the cost and of ε.
        steps: the number of optimizer steps of the run.
        lam: λ of the paper's plain mode, or None with a budget.
        stopwatch: measures the latency, where that is limited.

    Attributes:
        progress: how far the run is.
        watchers: functions that are called with every new row of the history.
    """

    def __init__(
        self,
        graph: Graph,
        budget: Budget,
        stepper: Stepper,
        schedule: Schedule,
        steps: int,
        *,
        lam: float | None,
        stopwatch: Stopwatch | None,
    ) -> None:
        self.graph, self.budget, self.stepper = graph, budget, stepper
        self.schedule, self.steps, self.lam, self.stopwatch = schedule, steps, lam, stopwatch
        self.progress = Progress()
        self.watchers: list[Callable[[Row], object]] = []
        self._controller = Controller(budget, schedule, steps)
        self._every = max(1, steps // _CHECKS)
        self._check_course = CourseCheck(
            graph, budget, schedule, steps, deadline=self.deadline, timed=stopwatch is not None
        )

    @property
    def deadline(self) -> int:
        """The step at which the budget is met, or 0 without a budget."""
        return self.schedule.deadline(self.steps) if self.lam is None else 0

    @property
    def most_rows(self) -> int:
        """How many rows the history has at most: also at the start, the deadline and the end."""
        return self.steps // self._every + 3

    @property
    def is_due(self) -> bool:
        """True if the host checks the gates after the present step."""
        step = self.progress.step + 1
        return step in (self.schedule.deadline(self.steps), self.steps) or step % self._every == 0

    def count_step(self, gate_lr: float) -> bool:
        """Count a step; check the gates if that is due, and return whether it was."""
        due = self.is_due
        self.progress.step += 1
        self.stepper.set_step(self.progress.step)
        if due:
            self.check(gate_lr)
        return due

    @torch.no_grad()
    def check(self, gate_lr: float) -> None:
        """Check the gates: land if that is due, select what closes next, and record a row."""
        alpha = self.stepper.last().double().cpu()
        if self.lam is None and self.progress.step >= self.deadline:
            alpha = alpha if self.progress.landed else self._land(alpha)
        elif self.lam is not None and self.progress.step == self.steps:
            self.budget.round_widths_down(alpha)
            self.stepper.put(alpha)
        if not self.schedule.reopens:
            alpha = self._without_unread(alpha)
        n = self.budget.widths(alpha)
        if self.stopwatch is not None and not self.progress.landed:
            self.stopwatch.time_if_changed(n)
        self._select(alpha, n)
        self._record(alpha, n, gate_lr)
        self._check_course(self.progress.step, n, gate_lr, landed=self.progress.landed)

    def _select(self, alpha: Tensor, n: Tensor) -> None:
        """Tell the stepper what to do with each gate."""
        stepper = self.stepper
        for own, new in zip((stepper.q, stepper.b), self.budget.combined(n), strict=True):
            own.copy_(new)
        if self.lam is None:
            worth, rates = stepper.worth.cpu(), stepper.shrink.double().cpu()
            step = self.progress.step
            stepper.shrink.copy_(self._controller.shrink_rates(step, alpha, worth, rates))
        else:
            spared = self.budget.blocks(alpha).member < 0 if self.schedule.spares else alpha.isnan()
            started = self.progress.step >= self.schedule.begins(self.steps)
            stepper.pulled.copy_(~spared & started)

    def _without_unread(self, alpha: Tensor) -> Tensor:
        """Close the channels that only closed channels read."""
        settled = self.graph.without_unread(alpha != 0)
        if bool((settled != (alpha != 0)).any()):
            alpha = alpha * settled
            self.stepper.put(alpha)
        return alpha

    def _land(self, alpha: Tensor) -> Tensor:
        """Close the channels that are still above the budget; warn if these are more than a few."""
        before = self.graph.cost.share(self.budget.widths(alpha))["macs"]
        landed = (self.stopwatch or self.budget).land(alpha, self.stepper.worth.cpu())
        removed = before - self.graph.cost.share(self.budget.widths(landed))["macs"]
        gates = int(((alpha != 0) & (landed == 0)).sum())
        self.progress.landing = {"gates": gates, "macs": removed}
        if removed > _LARGE_LANDING and self.stopwatch is None:
            warnings.warn(
                f"{gates} gates with {removed:.1%} of the MACs were closed at once to meet the "
                f"budget at step {self.progress.step}. Were gates changed from outside?",
                stacklevel=2,
            )
        self.stepper.put(landed)
        self.progress.landed = True
        return landed

    def _record(self, alpha: Tensor, n: Tensor, gate_lr: float) -> None:
        eps = self.schedule.eps(self.progress.step, self.steps)
        values = gate_value(alpha, eps)
        share = self.graph.cost.share(n)
        row = {
            "step": self.progress.step,
            **{key: value for key, value in share.items() if key != "memory"},
            "closed": int((alpha == 0).sum()),
            "between": int(((values > 0) & (values <= 0.5)).sum()),
            "eps": eps,
            "lam": self._lambda(n, gate_lr),
            "histogram": torch.histc(values, _BINS, 0, 1).int().tolist(),
        }
        self.progress.history.append(row)
        for watcher in self.watchers:
            watcher(dict(row))

    def _lambda(self, n: Tensor, gate_lr: float) -> float:
        """Return λ; with a budget, the λ whose proximal step would shrink gates as fast."""
        if self.lam is not None:
            return self.lam
        per_price = self.stepper.shrink.double().cpu() / self.budget.price(n)[self.budget.owner]
        return float(per_price.max()) / gate_lr if gate_lr else 0.0
