"""`kernel-gates` and `naive-sl0`: gates g(‖w‖) of the weights instead of learned gates g(α).

The paper compares with both: "not introducing α", and smoothed ℓ0 as a plain regularizer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...channels.graph import Plan
from ...cost.other_scores import UnitNorms
from ...gates.folding import plain
from ...gates.gate import Gate, gate_value
from ...gates.install import insert_gates
from .expected_cost import ExpectedCostMethod


class ExternalGate(Gate):
    """Gates whose values are set from outside: those of this step, or the last ones."""

    last: Tensor

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.alpha.requires_grad_(False)
        self.register_buffer("last", torch.ones(size))
        self.now: Tensor | None = None

    def values(self) -> Tensor:
        if self.now is not None and self.training and torch.is_grad_enabled():
            return self.now
        return self.last


class KernelNormMethod(ExpectedCostMethod):
    """Base of both methods: g(‖w‖), where ‖w‖ is the norm of all weights that read a channel.

    Every channel has its own ε, which starts at a tenth of its ‖w‖².
    """

    def set_up(self) -> None:
        super().set_up()
        self.norms = UnitNorms(self.model, self.graph.units, self.graph.sites)
        self.eps_start = self.norms().detach().square() / 10
        schedule = self.settings.schedule
        self.decay = math.log(schedule.eps_end / schedule.eps_start) / self.steps

    def values(self) -> Tensor:
        """Return all gates; they start at 1 / 1.1."""
        eps = self.eps_start * torch.exp(self.decay * self.adjuster.step)
        return gate_value(self.norms(), eps)

    def open_shares(self) -> list[Tensor]:
        return list(self.values().split([group.size for group in self.graph.prunable.values()]))

    def push_and_rise(self) -> tuple[float, float]:
        return self.own.kernel_push, self.own.kernel_rise

    def plan(self) -> Plan:
        """Order channels by ‖w‖² / ε: at the end, the gates are too close to 1 to tell apart."""
        return self.keep_above_threshold((self.norms().square() / self.eps_start).detach())

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "first": self.eps_start}


class NaiveSL0(KernelNormMethod):
    """Uses g as a regularizer, as smoothed ℓ0 was first proposed: loss + λ · R(g(‖w‖)).

    λ is fixed. If it followed a path, ε would decay meanwhile, and gates that are still open could
    no longer be moved. Near zero the slope is 1/√ε and makes kernels oscillate, as the paper found.
    """

    def adjust(self, shares: Tensor) -> Tensor:
        return super().adjust(shares).fill_(self.own.naive_sl0)


class KernelGates(KernelNormMethod):
    """Gates the forward pass by g(‖w‖), and shrinks the weights in the proximal step."""

    def set_up(self) -> None:
        super().set_up()
        self.gates = {
            name: ExternalGate(group.size).to(self.device)
            for name, group in self.graph.prunable.items()
        }
        insert_gates(self.model, self.graph, dict(self.gates), self.all_channels())
        sizes = torch.tensor([group.size for group in self.graph.prunable.values()])
        self.group_index = torch.arange(len(sizes)).repeat_interleave(sizes).to(self.device)
        self.closed = torch.zeros(self.graph.units, dtype=torch.bool, device=self.device)
        self._store_values()

    @torch.no_grad()
    def _store_values(self) -> None:
        """Give the gates the values that eval mode uses."""
        for gate, values in zip(self.gates.values(), self.open_shares(), strict=True):
            gate.now = None
            gate.last.copy_(values)

    def before_forward(self) -> None:
        for gate, values in zip(self.gates.values(), self.open_shares(), strict=True):
            gate.now = values

    def penalty(self) -> None:
        return None

    def adjust(self, shares: Tensor) -> Tensor:
        """Return λ: adjusted, or the fixed one of the settings.

        With a fixed λ, the plan at the end removes what is still above the budget.
        """
        lam = super().adjust(shares)
        return lam.fill_(self.own.kernel_lam) if self.own.kernel_lam else lam

    @torch.no_grad()
    def after_step(self, rate: Tensor | float) -> None:
        """Shrink all kernels by λ · rate · the price of their channel; close those that reach 0."""
        widths = torch.stack([values.sum() for values in self.open_shares()]).double()
        prices = [
            (cost.q @ widths + cost.b) / self.original[key] for key, cost in self.costs.items()
        ]
        price = torch.stack(prices).sum(0)[self.group_index]
        shrink = self.adjust(self.expected_shares()) * rate * price / self.norms()
        factors = (1 - shrink).clamp_min(0).float()
        self.closed |= factors == 0  # permanently: momentum would open the channel again
        self.norms.scale(factors.masked_fill(self.closed, 0.0))
        self._store_values()

    def trained_model(self) -> nn.Module:
        return plain(self.model.eval())

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "closed": self.closed}
