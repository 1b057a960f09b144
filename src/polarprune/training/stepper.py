"""Move all gates by one step on the device.

After every optimizer step the stepper records how much the loss needs each gate, then shrinks
gates: those selected by the controller (with a budget), or all of them by the paper's proximal step
(with `lam=`). Everything that changes during a run is a tensor that is written in place, and
nothing is read back. No step waits for the device, and a CUDA graph can hold it. The host counts
the steps (`Steering`) and writes what depends on the count (`set_step`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..gates.gate import Gate
from ..gates.sharding import have_pieces, unsharded_vector, write_pieces
from ..torch_internals.parallel import is_distributed
from .proximal import prox_l0, prox_l1
from .schedule import Schedule

_SAVED = ("scale", "q", "b", "pulled", "shrink", "worth")


class Stepper:
    """Holds all gates as one vector, and moves them; removed channels count as closed.

    Args:
        gates: The gate of each group, by group name.
        owner: For every entry of the vector, the number of its group.
        schedule: The numbers that steer ε and α.
        steps: The number of optimizer steps of the run.
        proximal: Whether to take the paper's proximal step (`lam=`). Otherwise the gates close
            that the controller selects.
    """

    def __init__(
        self,
        gates: dict[str, Gate],
        owner: Tensor,
        schedule: Schedule,
        steps: int,
        *,
        proximal: bool,
    ) -> None:
        self.gates, self.schedule, self.steps, self.proximal = gates, schedule, steps, proximal
        self.kept: Tensor | None = None  # positions of the gates left after a compaction
        groups = len(gates)
        self.owner = owner
        self.scale = torch.zeros((), dtype=torch.float64)  # λη of the proximal step
        self.q = torch.zeros(groups, groups, dtype=torch.float64)
        self.b = torch.zeros(groups, dtype=torch.float64)
        self.is_open = torch.ones(len(owner), dtype=torch.bool)  # not closed
        self.pulled = torch.zeros_like(self.is_open)  # entries that the proximal step may shrink
        self.alphas: list[nn.Parameter] = [gate.alpha for gate in gates.values()]
        self._first = next(iter(gates.values()))
        self.before = torch.ones(len(owner), dtype=self._first.alpha.dtype)  # α before this step
        self.final = self.before  # α after the last step
        self.shrink = torch.zeros_like(self.before)  # how much a closing gate shrinks in a step
        self.worth = torch.zeros(len(owner), dtype=torch.float64)  # how much the loss needs a gate
        self.weight = torch.ones((), dtype=torch.float64)  # of the newest value in that average
        self.eps = torch.ones((), dtype=self._first.eps.dtype)
        self._buffers: list[Tensor] = []
        self.follow_device()
        self.put(schedule.alpha_start * self.before)
        self.set_step(0)

    def follow_device(self) -> None:
        """Move to the device of the gates; moving a model replaces its buffers."""
        device = self._first.alpha.device
        moved = not self._buffers or self._first.eps is not self._buffers[0]
        if not moved and self.owner.device == device:
            return
        self._buffers = [gate.eps for gate in self.gates.values()]
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))

    def follow_gates(self) -> None:
        """Use the parameters that the gates have now: `fully_shard` replaces them."""
        self.alphas = [gate.alpha for gate in self.gates.values()]
        self.follow_device()

    def keep_only(self, present: Tensor) -> None:
        """Continue with these gates; the others were removed from the model."""
        self.kept = present.nonzero().flatten().to(self.owner.device)

    @torch.no_grad()
    def flat(self) -> Tensor:
        """Return α of all gates, with zeros for those that were removed."""
        return self._at_original_positions(unsharded_vector(self.alphas))

    @torch.no_grad()
    def last(self) -> Tensor:
        """Return α of all gates after the last step; no other process is needed."""
        return self.before.clone() if is_distributed(self.alphas[0]) else self.flat()

    def _at_original_positions(self, values: Tensor) -> Tensor:
        if self.kept is None:
            return values
        return values.new_zeros(len(self.owner)).index_copy(0, self.kept, values)

    @torch.no_grad()
    def put(self, alpha: Tensor) -> None:
        """Write α of all gates."""
        first = self.alphas[0]
        alpha = alpha.to(first.device, first.dtype)
        self.is_open.copy_(alpha != 0)
        self.before.copy_(alpha)
        write_pieces(self.alphas, self._pieces(alpha))

    def keep(self) -> None:
        """Store the present α for `hold`."""
        self.final = self.before.clone()

    def hold(self) -> None:
        """Write α as it was at the last `keep`."""
        self.follow_device()
        self.put(self.final)

    @torch.no_grad()
    def has_own_gates(self) -> bool:
        """Return whether the gates of the model have the values that were written last."""
        self.follow_device()
        return have_pieces(self.alphas, self._pieces(self.before))

    def _pieces(self, values: Tensor) -> tuple[Tensor, ...]:
        """Split one vector of the original length into those of the gates that are left."""
        left = values if self.kept is None else values[self.kept]
        pieces: tuple[Tensor, ...] = left.split([part.numel() for part in self.alphas])
        return pieces

    @torch.no_grad()
    def set_step(self, step: int) -> None:
        """Write what depends on the number of steps: ε, and the weight of the next gradient."""
        self.eps.fill_(self.schedule.eps(step, self.steps))
        torch._foreach_copy_(self._buffers, [self.eps] * len(self._buffers))
        self.weight.fill_(1 / min(step + 1, self.schedule.memory_of(self.steps)))

    def set_prices(self, q: Tensor, b: Tensor) -> None:
        """Write the resource model of the proximal step."""
        self.q.copy_(q)
        self.b.copy_(b)

    def set_scale(self, scale: float | Tensor) -> None:
        """Write λη of the proximal step."""
        self.scale.fill_(scale)

    def set_pulled(self, pulled: Tensor) -> None:
        """Write which gates the proximal step may shrink."""
        self.pulled.copy_(pulled)

    def set_shrink(self, rates: Tensor) -> None:
        """Write how much each gate shrinks in a step."""
        self.shrink.copy_(rates)

    @torch.no_grad()
    def __call__(self) -> None:
        """Move the gates after one optimizer step."""
        alpha = self.flat()
        if not self.schedule.reopens:
            alpha = alpha * self.is_open  # momentum must not reopen a closed gate
        if self.proximal:
            alpha = self._capped(self._proximal_step(alpha))
            closing = self.pulled
        else:
            self._update_worth(alpha)
            closing = self.shrink > 0
            alpha = torch.where(closing, self._shrunk(alpha), self._capped(alpha))
        if self.schedule.floor:
            alpha = self._with_floor(alpha, closing)
        self.put(alpha)
        self.shrink *= self.is_open

    def _update_worth(self, alpha: Tensor) -> None:
        """Average (g · ∂L/∂g)²: what closing a gate would change in the loss, to first order.

        ∂L/∂g follows from the gradient of α, or from the optimizer's step where the caller has
        discarded the gradients.
        """
        grads = [a.grad for a in self.alphas]
        if all(grad is None for grad in grads):
            slope = alpha - self.before
        else:
            present = [
                torch.zeros_like(a) if grad is None else grad
                for a, grad in zip(self.alphas, grads, strict=True)
            ]
            slope = self._at_original_positions(unsharded_vector(present))
        before, eps = self.before.double(), self.eps.double()
        change = slope.double() * before * (before * before + eps) / (2 * eps)
        self.worth += (change.square() - self.worth) * self.weight

    def _shrunk(self, alpha: Tensor) -> Tensor:
        """Return α with a smaller magnitude; the loss cannot open a closing gate again."""
        size = torch.minimum(alpha.abs(), self.before.abs()) - self.shrink
        return size.clamp_min(0).copysign(self.before)

    def _proximal_step(self, alpha: Tensor) -> Tensor:
        """Return α after Algorithm 1 of the paper."""
        proximal = prox_l1 if self.schedule.relaxed else prox_l0
        sweeps = self.schedule.sweeps
        shrunk = proximal(alpha, self.owner, self.q, self.b, self.scale, sweeps=sweeps)
        return torch.where(self.pulled, shrunk, alpha)

    def _capped(self, alpha: Tensor) -> Tensor:
        """Return α, with a limit to how far it moves in one step."""
        cap = self.schedule.cap(self.steps)
        if math.isinf(cap):
            return alpha
        return self.before + (alpha - self.before).clamp(-cap, cap)

    def _with_floor(self, alpha: Tensor, closing: Tensor) -> Tensor:
        """Keep gates that are not closed above the floor; the proximal step closes the others."""
        least = self.schedule.floor * (self.is_open & ~closing)
        zero = closing & (alpha.abs() < self.schedule.floor) & self.proximal
        return torch.where(zero, 0, torch.where(alpha.abs() < least, least, alpha))

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a resumed run needs."""
        return {name: getattr(self, name).clone() for name in _SAVED}

    @torch.no_grad()
    def restore(self, alpha: Tensor, state: Mapping[str, Tensor]) -> None:
        """Restore α of all gates, and what `state` returned."""
        self.put(alpha)
        self.follow_device()
        for name, value in state.items():
            getattr(self, name).copy_(value)
