"""`l0`: hard-concrete gates (Louizos, Welling, Kingma, 2018, "Learning sparse neural networks …").

A gate is σ((log u - log(1 - u) + log α) / β) with u uniform, stretched to γ … ζ and clamped to
0 … 1. It is exactly 0 or 1 with some probability, and differentiable. After training, σ(log α)
replaces the random number.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...channels.graph import Plan
from ...gates.folding import plain
from ...gates.gate import Gate
from ...gates.install import insert_gates
from ..settings import MethodSettings
from .base import Groups
from .expected_cost import ExpectedCostMethod

_EDGE = 1e-6  # distance of random numbers from 0 and 1


class HardConcrete(Gate):
    """A vector of hard-concrete gates; `alpha` holds log α.

    The random numbers are drawn once a step, so that all weights that read a channel see the same
    gate.
    """

    noise: Tensor

    def __init__(self, size: int, own: MethodSettings) -> None:
        super().__init__(size)
        self.own = own
        nn.init.constant_(self.alpha, math.log((1 - own.l0_drop) / own.l0_drop))
        self.register_buffer("noise", torch.full_like(self.alpha, 0.5).detach(), persistent=False)

    def draw(self) -> None:
        """Draw the random numbers of a step."""
        self.noise.uniform_()

    def values(self) -> Tensor:
        """Return the random gates of this step in train mode, the final ones in eval mode."""
        if not self.training:
            return self.final_values()
        return self._stretch(
            torch.sigmoid((self.noise.logit(_EDGE) + self.alpha) / self.own.l0_beta)
        )

    def final_values(self) -> Tensor:
        """Return the gates without random numbers."""
        return self._stretch(torch.sigmoid(self.alpha))

    def _stretch(self, x: Tensor) -> Tensor:
        low, high = self.own.l0_gamma, self.own.l0_zeta
        return (x * (high - low) + low).clamp(0, 1)

    def open_probability(self) -> Tensor:
        """Return P(z ≠ 0) = σ(log α - β log(-γ/ζ))."""
        own = self.own
        return torch.sigmoid(self.alpha - own.l0_beta * math.log(-own.l0_gamma / own.l0_zeta))


class L0(ExpectedCostMethod):
    """Hard-concrete gates; zeros are removed first, then the least likely channels."""

    def set_up(self) -> None:
        super().set_up()
        self.gates = {
            name: HardConcrete(group.size, self.own).to(self.device)
            for name, group in self.graph.prunable.items()
        }
        insert_gates(self.model, self.graph, dict(self.gates), self.all_channels())

    def param_groups(self, model: nn.Module, lr: float, weight_decay: float) -> Groups:
        alphas = [gate.alpha for gate in self.gates.values()]
        ids = {id(alpha) for alpha in alphas}
        weights = [p for p in model.parameters() if id(p) not in ids]
        return [
            {"params": weights, "lr": lr, "weight_decay": weight_decay},
            {"params": alphas, "lr": lr * self.own.l0_lr, "weight_decay": 0.0},
        ]

    def before_forward(self) -> None:
        for gate in self.gates.values():
            gate.draw()

    def open_shares(self) -> list[Tensor]:
        return [gate.open_probability() for gate in self.gates.values()]

    def trained_model(self) -> nn.Module:
        return plain(self.model.eval())

    def plan(self) -> Plan:
        gates = self.gates.values()
        scores = [gate.open_probability() * (gate.final_values() > 0) for gate in gates]
        return self.keep_above_threshold(torch.cat(scores).detach())
