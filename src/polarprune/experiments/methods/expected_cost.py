"""Methods whose λ is adjusted so that the expected cost follows the same path as polarprune's."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from ...channels.graph import Plan
from ...cost.resources import Quadratic
from .base import PlannedMethod


def expected_share(cost: Quadratic, original: float, open_shares: list[Tensor]) -> Tensor:
    """Return E[R(n)] / R₀ if each channel of a group is kept with its own probability p.

    E[n_k n_l] = E[n_k] E[n_l] for two groups; for a group with itself the variance Σ p(1 - p) is
    added.
    """
    n = torch.stack([p.sum() for p in open_shares]).to(cost.q)
    variance = torch.stack([(p * (1 - p)).sum() for p in open_shares]).to(cost.q)
    share: Tensor = (cost(n) + 0.5 * (cost.q.diagonal() * variance).sum()) / original
    return share


class LambdaAdjuster:
    """Adjusts λ: push · distance from the path + rise · the mean distance over the run.

    All state is in tensors on the device that are written in place.

    Args:
        path: The planned cost at every step.
        push: Weight of the current distance.
        rise: Weight of the accumulated distance.
    """

    def __init__(self, path: Tensor, push: float, rise: float) -> None:
        self.path, self.push, self.rise = path, push, rise
        self.step = torch.zeros(1, dtype=torch.long, device=path.device)
        self.sum, self.lam = path.new_zeros(1), path.new_zeros(1)

    @torch.no_grad()
    def update(self, share: Tensor) -> Tensor:
        """Return λ for this step, given the current cost, and advance by one step."""
        gap = share - self.path.index_select(0, self.step)
        self.sum.add_(gap * (self.rise / len(self.path))).clamp_(min=0)
        self.lam.copy_((self.sum + self.push * gap).clamp(min=0))
        self.step.add_(1).clamp_(max=len(self.path) - 1)
        return self.lam


class ExpectedCostMethod(PlannedMethod):
    """Adds λ · E[cost] to the loss and adjusts λ.

    The expected cost falls along the path that polarprune takes and stays at the budget.
    """

    def set_up(self) -> None:
        super().set_up()
        parts, self.original = self.graph.cost.parts, self.graph.cost.original()
        self.costs = {
            key: Quadratic(parts[key].q.to(self.device), parts[key].b.to(self.device), parts[key].c)
            for key in self.limits
        }
        path = [self.settings.schedule.path(step, self.steps) for step in range(self.steps)]
        planned = torch.tensor(path, dtype=torch.float64, device=self.device)
        self.adjuster = LambdaAdjuster(planned, *self.push_and_rise())

    def push_and_rise(self) -> tuple[float, float]:
        """Return the two weights of `LambdaAdjuster`."""
        return self.own.l0_push, self.own.l0_rise

    @abstractmethod
    def open_shares(self) -> list[Tensor]:
        """Return, for every group, the probability or share from 0 to 1 of each of its channels."""

    def expected_shares(self) -> Tensor:
        """Return the expected cost of each budgeted resource, as a share of the original."""
        open_shares = self.open_shares()
        shares = [
            expected_share(cost, self.original[key], open_shares)
            for key, cost in self.costs.items()
        ]
        return torch.stack(shares)

    def adjust(self, shares: Tensor) -> Tensor:
        """Return λ for the resource that is furthest from its budget.

        The distance is 1 at the start and 0 at the budget.
        """
        limits = zip(shares, self.limits.values(), strict=True)
        distances = [(share - limit) / (1 - limit) for share, limit in limits]
        return self.adjuster.update(torch.stack(distances).amax())

    def penalty(self) -> Tensor | None:
        shares = self.expected_shares()
        return (self.adjust(shares) * shares.sum()).sum().float()

    def log_entries(self) -> dict[str, object]:
        shares = zip(self.limits, self.expected_shares().tolist(), strict=True)
        return {f"expected_{key}": share for key, share in shares} | {
            "lam": float(self.adjuster.lam)
        }

    def state(self) -> dict[str, Tensor]:
        return {"step": self.adjuster.step, "sum": self.adjuster.sum}

    def plan(self) -> Plan:
        return self.keep_above_threshold(torch.cat(self.open_shares()).detach())
