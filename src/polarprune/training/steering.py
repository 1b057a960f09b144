"""Count the steps of a run, and check the gates on the host at regular steps.

At every check, channels that only closed channels read are closed, the controller selects the gates
that close next, and a row is added to the history. At the deadline the budget is met for good.
"""

from __future__ import annotations

import copy
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
from .settings import RunSettings
from .stepper import Stepper

_CHECKS = 400  # in one run, at most
_BINS = 20
Row = dict[str, Any]  # what one check of the gates found
_LARGE_LANDING = 0.005  # share of the MACs that may close at once without a warning


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        step: The number of optimizer steps done.
        landed: Whether the budget is met for good.
        landing: The gates and the share of the MACs that were closed at once at the deadline.
        history: One row for every check of the gates.
    """

    step: int = 0
    landed: bool = False
    landing: dict[str, float] = field(default_factory=lambda: {"gates": 0, "macs": 0.0})
    history: list[Row] = field(default_factory=list)


class Steering:
    """Steer a run to its budget.

    Args:
        graph: The groups of channels.
        budget: The limits, and the cost of any set of widths.
        stepper: Holds the gates.
        settings: The goal of the run, and the path of the cost and of ε.
        stopwatch: Measures the latency, where that is limited.

    Attributes:
        progress: The progress of the run.
        watchers: Functions that are called with every new row of the history.
    """

    def __init__(
        self,
        graph: Graph,
        budget: Budget,
        stepper: Stepper,
        settings: RunSettings,
        stopwatch: Stopwatch | None,
    ) -> None:
        self.graph, self.budget, self.stepper, self.stopwatch = graph, budget, stepper, stopwatch
        self.schedule, self.steps, self.lam = settings.schedule, settings.steps, settings.lam
        self.deadline = settings.deadline
        self.progress = Progress()
        self.watchers: list[Callable[[Row], object]] = []
        self._controller = Controller(budget, self.schedule, self.steps)
        self._every = max(1, self.steps // _CHECKS)
        self._check_course = CourseCheck(graph, budget, settings)

    @property
    def most_rows(self) -> int:
        """The largest number of rows that the history can have."""
        return self.steps // self._every + 3  # the start, the deadline and the end

    @property
    def is_due(self) -> bool:
        """Whether the host checks the gates after the present step."""
        step = self.progress.step + 1
        return step in (self.schedule.deadline(self.steps), self.steps) or step % self._every == 0

    @property
    def is_done(self) -> bool:
        """Whether all announced steps are done."""
        return self.progress.step >= self.steps

    def count_step(self, gate_lr: float) -> bool:
        """Count a step; check the gates if that is due, and return whether it was."""
        due = self.is_due
        self.progress.step += 1
        self.stepper.set_step(self.progress.step)
        if due:
            self.check(gate_lr)
        if self.is_done:
            self.stepper.keep()
        return due

    def restore(
        self, step: int, landed: bool, landing: dict[str, float], history: list[Row]
    ) -> None:
        """Continue from this progress; the gates were restored before."""
        self.progress = Progress(step, landed, dict(landing), copy.deepcopy(history))
        self.stepper.set_step(step)
        if self.is_done:
            self.stepper.keep()

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
        """Tell the stepper which gates to shrink, and how fast."""
        stepper = self.stepper
        stepper.set_prices(*self.budget.combined(n))
        if self.lam is None:
            worth, rates = stepper.worth.cpu(), stepper.shrink.double().cpu()
            step = self.progress.step
            stepper.set_shrink(self._controller.shrink_rates(step, alpha, worth, rates))
        else:
            spared = self.budget.blocks(alpha).member < 0 if self.schedule.spares else alpha.isnan()
            started = self.progress.step >= self.schedule.begins(self.steps)
            stepper.set_pulled(~spared & started)

    def _without_unread(self, alpha: Tensor) -> Tensor:
        """Close the channels that only closed channels read."""
        settled = self.graph.without_unread(alpha != 0)
        if bool((settled != (alpha != 0)).any()):
            alpha = alpha * settled
            self.stepper.put(alpha)
        return alpha

    def _land(self, alpha: Tensor) -> Tensor:
        """Close gates until the budget is met; warn if these have a large share of the MACs."""
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
