"""One step of all gates on the device: what the loss says about them, the proximal step, then ε.

Everything that changes during a run is a tensor that is written in place, and nothing is read back:
no step waits for the device, and a CUDA graph can hold it. The host looks in now and then.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..gates.gate import Gate
from .proximal import prox_l0, prox_l1
from .schedule import Schedule


class Stepper:
    """All gates as one vector, of the length they had at first: what was taken out is closed."""

    def __init__(
        self, gates: dict[str, Gate], owner: Tensor, schedule: Schedule, steps: int, *, pulls: bool
    ) -> None:
        """`pulls`: by the paper's proximal step (`lam=`); else gates close by ramps (a budget)."""
        self.gates, self.schedule, self.steps, self.pulls = gates, schedule, steps, pulls
        self.places: Tensor | None = None  # of the gates that are left, once some were taken out
        groups = len(gates)
        self.owner = owner
        self.count = torch.zeros((), dtype=torch.float64)  # steps done
        self.scale = torch.zeros((), dtype=torch.float64)  # λη of the proximal step
        self.q = torch.zeros(groups, groups, dtype=torch.float64)
        self.b = torch.zeros(groups, dtype=torch.float64)
        self.live = torch.ones(len(owner), dtype=torch.bool)
        self.pulled = torch.zeros_like(self.live)  # by the proximal step
        self.alphas: list[nn.Parameter] = [gate.alpha for gate in gates.values()]
        self._first = next(iter(gates.values()))
        self.before = torch.ones(len(owner), dtype=self._first.alpha.dtype)  # this step
        self.ramp = torch.zeros_like(self.before)  # by so much a gate that is to close shrinks
        self.worth = torch.zeros(len(owner), dtype=torch.float64)  # of gates, to the loss
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
        return self._laid_out(torch.cat(list[Tensor](self.alphas)))

    def _laid_out(self, numbers: Tensor) -> Tensor:
        """Numbers of the gates that are left, in the places that all gates had at first."""
        if self.places is None:
            return numbers
        return numbers.new_zeros(len(self.owner)).index_copy(0, self.places, numbers)

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
        alpha = self.flat()
        if not self.schedule.reopens:
            alpha = alpha * self.live  # momentum must not revive what is closed
        if self.pulls:
            alpha = self._capped(self._pulled(alpha))
            closable = self.pulled
        else:
            self._weigh(alpha)
            closable = self.ramp > 0
            alpha = torch.where(closable, self._ramped(alpha), self._capped(alpha))
        if self.schedule.floor:
            least = self.schedule.floor * (self.live & ~closable)
            zero = closable & (alpha.abs() < self.schedule.floor) & self.pulls
            alpha = torch.where(zero, 0, torch.where(alpha.abs() < least, least, alpha))
        self.put(alpha)
        self.ramp *= self.live
        self.count += 1
        self._decay()

    def _weigh(self, alpha: Tensor) -> None:
        """What closing a gate would change in the loss, to first order: (g · ∂L/∂g)², averaged.

        ∂L/∂g follows from the gradient of α; where a caller has thrown that away, from the step
        that the optimizer made of it.
        """
        grads = [a.grad for a in self.alphas]
        if all(grad is None for grad in grads):
            slope = alpha - self.before
        else:
            zeros = [torch.zeros_like(a) if g is None else g
                     for a, g in zip(self.alphas, grads, strict=True)]  # fmt: skip
            slope = self._laid_out(torch.cat(zeros))
        before, eps = self.before.double(), self._eps[0].double()
        change = slope.double() * before * (before * before + eps) / (2 * eps)
        memory = self.schedule.memory_of(self.steps)
        self.worth += (change.square() - self.worth) / (self.count + 1).clamp(max=memory)

    def _ramped(self, alpha: Tensor) -> Tensor:
        """The soft threshold of gates that are to close; the loss cannot open them again."""
        size = torch.minimum(alpha.abs(), self.before.abs()) - self.ramp
        return size.clamp_min(0).copysign(self.before)

    def _pulled(self, alpha: Tensor) -> Tensor:
        """The proximal step of the paper."""
        proximal = prox_l1 if self.schedule.relaxed else prox_l0
        sweeps = self.schedule.sweeps
        shrunk = proximal(alpha, self.owner, self.q, self.b, self.scale, sweeps=sweeps)
        return torch.where(self.pulled, shrunk, alpha)

    def _capped(self, alpha: Tensor) -> Tensor:
        """No farther from where it was than one step may go."""
        cap = self.schedule.cap(self.steps)
        if math.isinf(cap):
            return alpha
        return self.before + (alpha - self.before).clamp(-cap, cap)

    @torch.no_grad()
    def _decay(self) -> None:
        """ε, into the buffers of all gates."""
        eps = self.schedule.eps(self.count, self.steps).to(self._eps[0])
        torch._foreach_copy_(self._eps, [eps] * len(self._eps))

    def state(self) -> dict[str, Any]:
        names = ("count", "scale", "q", "b", "pulled", "ramp", "worth")
        return {name: getattr(self, name).clone() for name in names}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        self.follow()
        for name, value in state.items():
            getattr(self, name).copy_(value)
        self._decay()
