"""`Schedule`: the numbers that steer ε and the cost over a training run."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from ..validation.schedule import checked_fields


@dataclass(frozen=True)
class Schedule:
    """How ε decays, how the cost decreases, and how gates move.

    ε(t) = eps_start · (eps_end / eps_start)^(t / steps); the paper's three experiments all end near
    5e-8. With a budget, the cost follows half a cosine from `start` to `done` and has reached the
    budget then; the rest of the training only adapts the weights. With `lam=`, the proximal step
    shrinks all gates until the end.

    Args:
        eps_start: ε at the start.
        eps_end: ε at the end.
        start: when gates begin to close, as a fraction of the steps.
        done: when the budget is met, as a fraction of the steps.
        window: how long a gate takes to close, as a fraction of the steps.
        memory: the fraction of the steps over which the worth of a gate is averaged.
        sweeps: N of Algorithm 1.
        relaxed: use the ℓ1 norm in the proximal step, as the paper does; otherwise the ℓ0 norm.
        alpha_start: α at the start.
        max_shrink: how far α may move in one step, times the number of steps.
        floor: the smallest |α| of a gate that is not closed; at the end its value is above 0.95.
        gate_lr: the gates' learning rate, as a fraction of that of the weights.
        decay: if not 0, ε is multiplied by it every `every` steps, and `eps_end` is not used.
        every: the number of steps between two such decays.
        reopens: closed gates may open again by momentum.
        spares: the proximal step spares the last channels that connect input and output.

    Raises:
        PruneError: if a number is out of range.

    Example:
        >>> schedule = Schedule(done=0.4)
        >>> schedule.deadline(steps=1000)
        400
        >>> f"{schedule.eps(step=1000, steps=1000):.0e}"
        '5e-08'
    """

    eps_start: float = 0.1
    eps_end: float = 5e-8
    start: float = 0.0
    done: float = 0.5
    window: float = 0.02
    memory: float = 0.01
    sweeps: int = 1
    relaxed: bool = True
    alpha_start: float = 1.0
    max_shrink: float = 10.0
    floor: float = 1e-3
    gate_lr: float = 0.1
    decay: float = 0.0
    every: int = 1
    reopens: bool = False
    spares: bool = True

    @classmethod
    def paper(cls, decay: float = 0.96, every: int = 1, **others: Any) -> Schedule:
        """Return the schedule of the paper's proximal step, for `lam=`, without any additions.

        No gate is spared, no motion is capped, nothing is rounded to zero, and a closed gate may
        open again. `export` refuses a network whose input no longer reaches its output.

        Args:
            decay: the factor of ε.
            every: the number of steps between two decays; `len(loader)` for one in every epoch.
            **others: other fields of `Schedule`.

        Example:
            >>> Schedule.paper(decay=0.96, every=100).eps(step=250, steps=1000)
            0.09216
        """
        plain = {"max_shrink": math.inf, "floor": 0.0, "reopens": True, "spares": False}
        return cls(**{"decay": decay, "every": every, **plain, **others})

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in checked_fields(given).items():
            object.__setattr__(self, name, value)  # a checkpoint cannot hold numpy's numbers

    def eps(self, step: int, steps: int) -> float:
        """Return ε after this many steps."""
        step = min(step, steps)
        if self.decay:
            return self.eps_start * self.decay ** (step // self.every)
        ratio: float = (self.eps_end / self.eps_start) ** (step / steps)
        return self.eps_start * ratio

    def begins(self, steps: int) -> int:
        """Return the step at which gates begin to close."""
        return math.floor(self.start * steps)

    def deadline(self, steps: int) -> int:
        """Return the step at which the budget is met for good."""
        return max(1, self.begins(steps) + 1, math.floor(self.done * steps))

    def cap(self, steps: int) -> float:
        """Return how far α may move in one step."""
        return self.max_shrink / steps

    def window_of(self, steps: int) -> int:
        """Return how many steps a gate takes to close."""
        return max(1, round(self.window * steps))

    def memory_of(self, steps: int) -> int:
        """Return the number of steps, at least 20, over which worth is averaged."""
        return max(20, round(self.memory * steps))

    def path(self, step: float, steps: int) -> float:
        """Return the part of the way to the budget that remains: 1 at first, 0 when done."""
        begins, last = self.begins(steps), self.deadline(steps)
        first = begins + min(
            self.window_of(steps), (last - begins) / 2
        )  # no gate has closed before
        if step <= first:
            return 1.0
        if step >= last:
            return 0.0
        return 0.5 * (1 + math.cos(math.pi * (step - first) / (last - first)))
