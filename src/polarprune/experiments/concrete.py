"""Other gates where ours would be, and how λ is steered with them.

Hard-concrete gates (Louizos, Welling, Kingma: Learning sparse neural networks through L0
regularization, 2018): a gate is σ((log u - log(1 - u) + log α) / β) with u uniform, stretched to
γ … ζ and cut off at 0 and 1. It is exactly 0 or 1 with some chance, and can be differentiated.
Afterwards σ(log α) takes the place of the random number.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..cost.resources import Quadratic
from ..gates.gate import Gate
from .recipes import Controls

_EDGE = 1e-6  # random numbers keep away from 0 and 1


class HardConcrete(Gate):
    """One vector of gates; `alpha` is log α here. The random numbers are drawn once a step, so that
    all weights that read a channel see the same gate."""

    noise: Tensor

    def __init__(self, size: int, numbers: Controls, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(size, dtype=dtype)
        self.numbers = numbers
        nn.init.constant_(self.alpha, math.log((1 - numbers.l0_drop) / numbers.l0_drop))
        self.register_buffer("noise", torch.full_like(self.alpha, 0.5).detach(), persistent=False)

    def draw(self) -> None:
        self.noise.uniform_()

    def values(self) -> Tensor:
        """In train mode the gates of this step."""
        if not self.training:
            return self.settled()
        where = (self.noise.logit(_EDGE) + self.alpha) / self.numbers.l0_beta
        return self._stretched(torch.sigmoid(where))

    def settled(self) -> Tensor:
        """The gates that stay when nothing is drawn any more."""
        return self._stretched(torch.sigmoid(self.alpha))

    def _stretched(self, x: Tensor) -> Tensor:
        low, high = self.numbers.l0_gamma, self.numbers.l0_zeta
        return (x * (high - low) + low).clamp(0, 1)

    def chance(self) -> Tensor:
        """P(z ≠ 0) = σ(log α - β log(-γ/ζ))"""
        n = self.numbers
        return torch.sigmoid(self.alpha - n.l0_beta * math.log(-n.l0_gamma / n.l0_zeta))


class Borrowed(Gate):
    """Gates whose values come from elsewhere: those of this step, or the last."""

    last: Tensor

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.alpha.requires_grad_(False)
        self.register_buffer("last", torch.ones(size))
        self.now: Tensor | None = None

    def values(self) -> Tensor:
        learning = self.training and torch.is_grad_enabled() and self.now is not None
        return self.now if learning else self.last  # type: ignore[return-value]


def expected_share(cost: Quadratic, whole: float, chances: list[Tensor]) -> Tensor:
    """E[R(n)] / R₀, where every unit of a group is there with its own chance p.

    E[n_k n_l] = E[n_k] E[n_l], and for a group with itself the variance Σ p(1 - p) on top.
    """
    n = torch.stack([p.sum() for p in chances]).to(cost.q)
    spread = torch.stack([(p * (1 - p)).sum() for p in chances]).to(cost.q)
    share: Tensor = (cost(n) + 0.5 * (cost.q.diagonal() * spread).sum()) / whole
    return share


class Steering:
    """λ, so that what is expected follows a path: push · distance + rise · its mean over the run.

    `path` has what is wanted at every step. All are tensors on the device, written in place.
    """

    def __init__(self, path: Tensor, push: float, rise: float) -> None:
        self.path, self.push, self.rise = path, push, rise
        self.step = torch.zeros(1, dtype=torch.long, device=path.device)
        self.sum, self.lam = path.new_zeros(1), path.new_zeros(1)

    @torch.no_grad()
    def follow(self, share: Tensor) -> Tensor:
        """λ for this step."""
        gap = share - self.path.index_select(0, self.step)
        self.sum.add_(gap * (self.rise / len(self.path))).clamp_(min=0)
        self.lam.copy_((self.sum + self.push * gap).clamp(min=0))
        self.step.add_(1).clamp_(max=len(self.path) - 1)
        return self.lam
