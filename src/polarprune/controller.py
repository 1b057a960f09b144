"""How hard the gates are pulled at, and which of them may close: decided on the host, now and then.

R counts exact zeros, so it says nothing while α drifts from 1 to 0. The controller looks at the
drift itself. An entry that does not move although it is pulled at is held by the loss; what holds
it grows as α falls, up to the edge where the slope of the gate is steepest, so the pull that will
take it over the edge can be foretold from where it stands. The live entries are sorted by that
over their price: those go first which the loss holds least for what they cost.

Pulled are all, by the smallest λη that brings those to zero in time that have to close for the cost
to be on its path. Only these may go over the edge: the others wait there. So the cost neither falls
behind its path nor runs ahead of it, whether the loss holds the gates hard or hardly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .budget import Budget
from .gates import PEAK, edge, gate_slope
from .schedule import Schedule

_MARGIN = 0.05  # aims a little beyond zero, or α would creep towards it for ever
_HARDER = 1.2  # than what holds an entry; and at most than before, from one look to the next
_STEEPEST = 100.0  # far from the edge nothing can be foretold
_MEMORY = 0.1  # of the steps: so long it counts what held an entry
_REST = 0.05  # of the steps: so fast the pull fades when nothing has to close


class Aim(NamedTuple):
    """For every entry of α: is it pulled at, and may it reach zero."""

    pulled: Tensor
    closable: Tensor


class Controller:
    """Steers λη along the path of the schedule."""

    def __init__(self, budget: Budget, schedule: Schedule, steps: int, lam: float | None) -> None:
        self.budget, self.schedule, self.steps, self.lam = budget, schedule, steps, lam
        self.rate = 0.0  # λη, the scale of the proximal step
        with torch.device("cpu"):  # whatever the user's default is
            self.hold = torch.zeros(len(budget.owner), dtype=torch.float64)  # pulls withstood
            self._pull = torch.zeros_like(self.hold)  # a step, since the last look
            self._size = torch.ones_like(self.hold)  # |α| then
        self._step = 0

    def look(self, step: int, alpha: Tensor) -> None:
        """Note which entries withstood the pull since the last look."""
        size, passed = alpha.abs(), step - self._step
        if passed:
            self.rate *= max(0.0, 1 - passed / (_REST * self.steps))
            self.hold *= max(0.0, 1 - passed / (_MEMORY * self.steps))
            free = self._pull.clamp_max(self.schedule.cap(self.steps)) * passed
            held = self._size - size < free / 2
            eps = self.schedule.eps(step, self.steps)
            steeper = PEAK / eps**0.5 / gate_slope(size, eps).clamp_min(1e-12)
            most = self._pull * steeper.clamp(1, _STEEPEST)
            self.hold = torch.where(held, most.maximum(self.hold), self.hold)
            self.hold[size <= 1.1 * edge(eps)] = 0  # it has lost, and may be waiting for its turn
        self._step, self._size = step, size

    def effort(self) -> Tensor:
        """The pull that should close an entry within the reaction time: the least goes first."""
        within = self.schedule.ahead(0, self.steps)[0]
        return (self._size + _MARGIN) / within + self.hold

    def aim(self, alpha: Tensor, n: Tensor, *, idle: bool) -> Aim:
        """After a look. `idle`: nothing is pulled at, as the path has not begun or is done."""
        budget, blocks = self.budget, self.budget.blocks(alpha, self.effort())
        price = budget.price(n)[budget.owner]
        usable = 0 if idle else len(blocks.group)
        if idle:
            self.rate = 0.0
        elif self.lam is None:
            most, first = _HARDER * self.rate, float(budget.excess(budget.cost.full))

            def rate(within: int, hold: float) -> float:
                target = first * self.schedule.path(self._step + within, self.steps)
                k = budget.needed(n, blocks, target)
                effort = (self._size + _MARGIN) / within + hold * self.hold
                mine = (blocks.member >= 0) & (blocks.member < k)
                return float((effort / price * mine).max())

            times = self.schedule.ahead(self._step, self.steps)
            free = max(rate(within, 0.0) for within in times)
            self.rate = max(self.rate, free, min(most, rate(times[0], _HARDER)))
            soon = self._step + 2 * times[0]
            turn = budget.needed(n, blocks, first * self.schedule.path(soon, self.steps))
            usable = min(turn, budget.needed(n, blocks, 0.0) - (not budget.is_coarse))
        closable = (blocks.member >= 0) & (blocks.member < usable)
        if budget.is_coarse and usable:
            closable &= budget.planned(alpha, self.effort())
        pulled = (blocks.member >= 0) & (not idle)
        self._pull = self.rate * price * pulled
        return Aim(pulled, closable)

    def state(self) -> dict[str, Any]:
        return {
            "rate": self.rate, "hold": self.hold.clone(), "pull": self._pull.clone(),
            "size": self._size.clone(), "step": self._step,
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        self.rate, self._step = state["rate"], state["step"]
        self.hold, self._pull, self._size = (
            state[key].cpu().clone() for key in ("hold", "pull", "size")
        )
