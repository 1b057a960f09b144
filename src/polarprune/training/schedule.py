"""`Schedule`: the numbers that steer ε and the cost over a training run."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from ..validation.schedule import checked_fields


@dataclass(frozen=True)
class Schedule:
    """The decay of ε, the path of the cost, and the motion of the gates over a training run.

    ε(t) = eps_start · (eps_end / eps_start)^(t / steps); the paper's three experiments all end near
    5e-8. With a budget, the cost follows half a cosine from `start` to `done` and has reached the
    budget then; the rest of the training only adapts the weights. With `lam=`, the proximal step
    shrinks all gates until the end.

    Args:
        eps_start: ε at the start.
        eps_end: ε at the end.
        start: When gates begin to close, as a fraction of the steps.
        done: When the budget is met, as a fraction of the steps.
        window: How long a gate takes to close, as a fraction of the steps.
        memory: The fraction of the steps over which the worth of a gate is averaged.
        sweeps: N of Algorithm 1.
        relaxed: Use the ℓ1 norm in the proximal step, as the paper does; otherwise the ℓ0 norm.
        alpha_start: α at the start.
        max_shrink: How far α may move in one step, times the number of steps.
        floor: The smallest |α| of a gate that is not closed; at the end its value is above 0.95.
        gate_lr: The gates' learning rate, as a fraction of that of the weights.
        decay: If not 0, ε is multiplied by it every `every` steps, and `eps_end` is not used.
        every: The number of steps between two such decays.
        reopens: Closed gates may open again by momentum.
        spares: The proximal step spares the last channels that connect input and output.

    Raises:
        PruneError: If a number is out of range.

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
        """Return the schedule of the paper's proximal step, for `lam=`.

        It has none of our additions: no gate is spared, no motion is capped, nothing is rounded to
        zero, and a closed gate may open again. `export` refuses a network whose input no longer
        reaches its output.

        Args:
            decay: The factor of ε.
            every: The number of steps between two decays; `len(loader)` for one in every epoch.
            **others: Other fields of `Schedule`.

        Returns:
            A schedule.

        Raises:
            PruneError: If a number is out of range.

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
        """Return ε after some steps.

        Args:
            step: The number of steps done. After the last step, ε stays as it is.
            steps: The number of optimizer steps of the training.

        Returns:
            ε.

        Example:
            >>> Schedule().eps(step=0, steps=1000)
            0.1
        """
        step = min(step, steps)
        if self.decay:
            return self.eps_start * self.decay ** (step // self.every)
        ratio: float = (self.eps_end / self.eps_start) ** (step / steps)
        return self.eps_start * ratio

    def begins(self, steps: int) -> int:
        """Return the step at which gates begin to close.

        Args:
            steps: The number of optimizer steps of the training.

        Returns:
            The number of steps done by then.

        Example:
            >>> Schedule(start=0.1).begins(steps=1000)
            100
        """
        return math.floor(self.start * steps)

    def deadline(self, steps: int) -> int:
        """Return the step at which the budget is met for good.

        Args:
            steps: The number of optimizer steps of the training.

        Returns:
            The number of steps done by then, at least 1.

        Example:
            >>> Schedule(done=0.5).deadline(steps=1000)
            500
        """
        return max(1, self.begins(steps) + 1, math.floor(self.done * steps))

    def cap(self, steps: int) -> float:
        """Return how far α may move in one step.

        Args:
            steps: The number of optimizer steps of the training.

        Returns:
            The largest change of α; infinite if there is no limit.

        Example:
            >>> Schedule(max_shrink=10.0).cap(steps=1000)
            0.01
        """
        return self.max_shrink / steps

    def window_of(self, steps: int) -> int:
        """Return how many steps a gate takes to close.

        Args:
            steps: The number of optimizer steps of the training.

        Returns:
            The number of steps, at least 1.

        Example:
            >>> Schedule(window=0.02).window_of(steps=1000)
            20
        """
        return max(1, round(self.window * steps))

    def memory_of(self, steps: int) -> int:
        """Return the number of steps over which the worth of a gate is averaged.

        Args:
            steps: The number of optimizer steps of the training.

        Returns:
            The number of steps, at least 20.

        Example:
            >>> Schedule(memory=0.05).memory_of(steps=1000)
            50
        """
        return max(20, round(self.memory * steps))

    def path(self, step: float, steps: int) -> float:
        """Return how much of the way from the original cost to the budget remains.

        Args:
            step: The number of steps done.
            steps: The number of optimizer steps of the training.

        Returns:
            A fraction: 1 until the first gates have closed, 0 when the budget is met.

        Example:
            >>> Schedule(done=0.5).path(step=500, steps=1000)
            0.0
        """
        begins, last = self.begins(steps), self.deadline(steps)
        # No gate has closed before the first window is over.
        first = begins + min(self.window_of(steps), (last - begins) / 2)
        if step <= first:
            return 1.0
        if step >= last:
            return 0.0
        return 0.5 * (1 + math.cos(math.pi * (step - first) / (last - first)))
