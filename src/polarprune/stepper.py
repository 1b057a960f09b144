"""One step of all gates on the device: the proximal step, then ε.

Everything that changes during a run is a tensor that is written in place, and nothing is read back:
no step waits for the device, and a CUDA graph can hold it. The host looks in now and then.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .gates import Gate
from .prox import prox_l1
from .schedule import Schedule


class Stepper:
    """All gates as one vector, of the length they had at first: what was taken out is closed."""

    def __init__(
        self, gates: dict[str, Gate], owner: Tensor, schedule: Schedule, steps: int
    ) -> None:
        self.gates, self.schedule, self.steps = gates, schedule, steps
        self.places: Tensor | None = None  # of the gates that are left, once some were taken out
        groups = len(gates)
        self.owner = owner
        self.count = torch.zeros((), dtype=torch.float64)  # steps done
        self.scale = torch.zeros((), dtype=torch.float64)  # λη
        self.q = torch.zeros(groups, groups, dtype=torch.float64)
        self.b = torch.zeros(groups, dtype=torch.float64)
        self.live = torch.ones(len(owner), dtype=torch.bool)
        self.pulled = torch.zeros_like(self.live)  # shrink
        self.closable = torch.zeros_like(self.live)  # may shrink to nothing
        self.follow()

    def follow(self) -> None:
        """Move to where the gates are."""
        device = self.alphas()[0].device
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))

    def alphas(self) -> list[nn.Parameter]:
        return [gate.alpha for gate in self.gates.values()]

    def flat(self) -> Tensor:
        alpha = torch.cat([alpha.detach() for alpha in self.alphas()])
        if self.places is None:
            return alpha
        return alpha.new_zeros(len(self.owner)).index_copy(0, self.places, alpha)

    @torch.no_grad()
    def put(self, alpha: Tensor) -> None:
        alphas = self.alphas()
        alpha = alpha.to(alphas[0])
        self.live.copy_(alpha != 0)
        left = alpha if self.places is None else alpha[self.places]
        torch._foreach_copy_(list[Tensor](alphas), list(left.split([len(a) for a in alphas])))

    @torch.no_grad()
    def __call__(self) -> None:
        alpha = self.flat() * self.live  # momentum must not revive what is closed
        shrunk = prox_l1(
            alpha,
            self.owner,
            self.q,
            self.b,
            self.scale,
            sweeps=self.schedule.sweeps,
            cap=self.schedule.cap(self.steps),
        )
        alpha = torch.where(self.pulled, shrunk, alpha)
        least = torch.full_like(alpha, self.schedule.floor).copysign(alpha) * self.live
        least = least.masked_fill(self.closable, 0.0)
        self.put(torch.where(alpha.abs() < self.schedule.floor, least, alpha))
        self.count += 1
        self._decay()

    def _decay(self) -> None:
        """ε = start · (end / start)^(t / steps), into the buffers of all gates."""
        ratio = math.log(self.schedule.eps_end / self.schedule.eps_start)
        progress = (self.count / self.steps).clamp(max=1.0)
        held = [gate.eps for gate in self.gates.values()]
        eps = (self.schedule.eps_start * torch.exp(ratio * progress)).to(held[0])
        torch._foreach_copy_(held, [eps] * len(held))

    def state(self) -> dict[str, Any]:
        names = ("count", "scale", "q", "b", "pulled", "closable")
        return {name: getattr(self, name).clone() for name in names}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            getattr(self, name).copy_(value)
        self._decay()
