"""One step of all gates on the device: the proximal step, then ε.

Everything that changes during a run is a tensor that is written in place, and nothing is read back:
no step waits for the device, and a CUDA graph can hold it. The host looks in now and then.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .gates import Gate, edge
from .prox import prox_l0, prox_l1
from .schedule import Schedule

_LONGEST = 1000.0  # times as long as the optimizer makes them, steps of gates may become


class Stepper:
    """All gates as one vector, of the length they had at first: what was taken out is closed."""

    def __init__(
        self,
        gates: dict[str, Gate],
        owner: Tensor,
        schedule: Schedule,
        steps: int,
        *,
        lengthen: bool,
    ) -> None:
        self.gates, self.schedule, self.steps = gates, schedule, steps
        self.lengthen = lengthen
        self.places: Tensor | None = None  # of the gates that are left, once some were taken out
        groups = len(gates)
        self.owner = owner
        self.count = torch.zeros((), dtype=torch.float64)  # steps done
        self.scale = torch.zeros((), dtype=torch.float64)  # λη
        self.pace = torch.zeros((), dtype=torch.float64)  # how far the loss moves a live gate
        self.q = torch.zeros(groups, groups, dtype=torch.float64)
        self.b = torch.zeros(groups, dtype=torch.float64)
        self.live = torch.ones(len(owner), dtype=torch.bool)
        self.pulled = torch.zeros_like(self.live)  # shrink
        self.closable = torch.zeros_like(self.live)  # may shrink to nothing
        self.alphas: list[nn.Parameter] = [gate.alpha for gate in gates.values()]
        self._first = next(iter(gates.values()))
        self.before = torch.ones(len(owner), dtype=self._first.alpha.dtype)  # this step
        self._eps: list[Tensor] = []
        self.follow()
        self.put(schedule.alpha_start * self.before)
        self._decay()

    def follow(self) -> None:
        """Move to where the gates are; a model that is moved gets other buffers."""
        device = self._first.alpha.device
        if self._eps and self._first.eps is self._eps[0] and self.owner.device == device:
            return
        self._eps = [gate.eps for gate in self.gates.values()]
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))

    def take_out(self, present: Tensor) -> None:
        """Only these of all gates are left."""
        self.places = present.nonzero().flatten().to(self.owner.device)

    @torch.no_grad()
    def flat(self) -> Tensor:
        alpha = torch.cat(list[Tensor](self.alphas))
        if self.places is None:
            return alpha
        return alpha.new_zeros(len(self.owner)).index_copy(0, self.places, alpha)

    @torch.no_grad()
    def put(self, alpha: Tensor) -> None:
        alpha = alpha.to(self.alphas[0])
        self.live.copy_(alpha != 0)
        self.before.copy_(alpha)
        left = alpha if self.places is None else alpha[self.places]
        pieces = left.split([part.numel() for part in self.alphas])
        torch._foreach_copy_(list[Tensor](self.alphas), list(pieces))

    @torch.no_grad()
    def __call__(self) -> None:
        alpha = self.flat() * self.live  # momentum must not revive what is closed
        if self.lengthen:
            alpha = torch.where(self.pulled, self._lengthened(alpha), alpha)
        proximal = prox_l1 if self.schedule.relaxed else prox_l0
        shrunk = proximal(
            alpha,
            self.owner,
            self.q,
            self.b,
            self.scale,
            sweeps=self.schedule.sweeps,
        )
        alpha = torch.where(self.pulled, shrunk, alpha)
        cap = self.schedule.cap(self.steps)
        alpha = self.before + (alpha - self.before).clamp(-cap, cap)
        waits = torch.minimum(edge(self._eps[0]), self.before.abs())  # until it is closable
        least = waits.clamp_min(self.schedule.floor).masked_fill(self.closable, self.schedule.floor)
        stays = (least * ~self.closable * self.live).copysign(alpha)
        self.put(torch.where(alpha.abs() < least, stays, alpha))
        self.count += 1
        self._decay()

    def _lengthened(self, alpha: Tensor) -> Tensor:
        """The loss moves the gates as far in a run as they may go, whatever rate they learn at.

        Their steps are as long as the optimizer makes them: Adam's as long as its rate, SGD's as
        long as the gradients are large. A pull of a fixed length would leave the loss no say in the
        one case, and itself none in the other; so all steps are multiplied by one number that makes
        them, on average over the gates and the last hundredth of the run, as long as the cap.
        """
        moved = alpha - self.before
        length = moved.abs().sum().double() / self.live.sum().clamp_min(1)
        memory = max(1, self.steps // 100)
        self.pace += (length - self.pace) / (self.count + 1).clamp(max=memory)
        times = self.schedule.cap(self.steps) / self.pace.clamp_min(1e-12)
        return self.before + moved * times.clamp(1, _LONGEST).to(moved.dtype)

    @torch.no_grad()
    def _decay(self) -> None:
        """ε = start · (end / start)^(t / steps), into the buffers of all gates."""
        ratio = math.log(self.schedule.eps_end / self.schedule.eps_start)
        progress = (self.count / self.steps).clamp(max=1.0)
        eps = (self.schedule.eps_start * torch.exp(ratio * progress)).to(self._eps[0])
        torch._foreach_copy_(self._eps, [eps] * len(self._eps))

    def state(self) -> dict[str, Any]:
        names = ("count", "scale", "pace", "q", "b", "pulled", "closable")
        return {name: getattr(self, name).clone() for name in names}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        self.follow()
        for name, value in state.items():
            getattr(self, name).copy_(value)
        self._decay()
