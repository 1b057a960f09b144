"""The few numbers that steer ε and λ over a training run."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from .errors import PruneError


@dataclass(frozen=True)
class Schedule:
    """How ε decays and how the cost goes down.

    ε(t) = eps_start · (eps_end / eps_start)^(t / steps): the paper's three recipes all end near
    5e-8. With a budget, gates are closed from `start` on, each within `window`; the cost goes down
    along half a cosine and has reached the budget at `done` (fractions of the steps). The rest of
    the training is left to the weights. With `lam=`, all gates are pulled at all the time.
    """

    eps_start: float = 0.1
    eps_end: float = 5e-8
    start: float = 0.0
    done: float = 0.5
    window: float = 0.02  # so long, as a fraction of the steps, a gate takes to close
    memory: float = 0.01  # over so many of the last steps what a gate is worth is averaged
    sweeps: int = 1  # N of Algorithm 1
    relaxed: bool = True  # ℓ1 in the proximal step, as in the paper; or ℓ0 as it is
    alpha_start: float = 1.0
    max_shrink: float = 10.0  # of α in one step (growth too), times the steps
    floor: float = 1e-3  # a live |α| is never smaller, so that at the end its gate is above 0.95
    gate_lr: float = 0.1  # of the weights' rate
    decay: float = 0.0  # ε is multiplied by it `every` so many steps; 0: as above
    every: int = 1
    reopens: bool = False  # closed gates may open again, by momentum
    spares: bool = True  # the last channels that connect input and output are not pulled at

    @classmethod
    def paper(cls, decay: float = 0.96, every: int = 1, **others: Any) -> Schedule:
        """The proximal step as published, for `lam=`, and nothing else.

        ε is multiplied by `decay` every so many steps (an epoch: `every=len(loader)`). No gate is
        spared, no motion is capped, nothing is rounded to zero, and a closed gate may open again. A
        network that falls apart is refused at export.
        """
        plain = {"max_shrink": math.inf, "floor": 0.0, "reopens": True, "spares": False}
        return cls(**{"decay": decay, "every": every, **plain, **others})

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        strange = [f"{name}={value!r}" for name, value in given.items() if not _fits(name, value)]
        if strange:
            raise PruneError(
                f"Schedule: {'; '.join(strange)}. Give numbers, a whole one as sweeps, and True or "
                f"False as relaxed."
            )
        problems = [
            f"{name}={value}"
            for name, value in given.items()
            if name != "relaxed" and not (is_number(value) and value >= 0)
        ]
        if not 0 < self.eps_end <= self.eps_start:
            problems.append(f"eps_end={self.eps_end} (want 0 < eps_end <= eps_start)")
        if not 0 <= self.start < self.done <= 1:
            problems.append(f"start={self.start}, done={self.done} (want 0 <= start < done <= 1)")
        positive = (self.reaction, self.floor, self.max_shrink, self.sweeps, self.alpha_start)
        if min(positive) <= 0:
            problems.append("reaction, floor, max_shrink, sweeps, alpha_start must be positive")
        if problems:
            raise PruneError("Schedule: " + "; ".join(problems) + ". Correct these numbers.")
        for name, value in given.items():
            if type(value) not in (bool, int, float):  # of numpy: checkpoints hold plain numbers
                object.__setattr__(self, name, int(value) if name == "sweeps" else float(value))

    def eps(self, step: int, steps: int) -> float:
        return float(self.eps_start * (self.eps_end / self.eps_start) ** min(step / steps, 1.0))

    def begins(self, steps: int) -> int:
        return math.floor(self.start * steps)

    def deadline(self, steps: int) -> int:
        """The step at which the budget is met for good."""
        return max(1, self.begins(steps) + 1, math.floor(self.done * steps))

    def cap(self, steps: int) -> float:
        """How far α may shrink in one step."""
        return self.max_shrink / steps

    def path(self, step: float, steps: int) -> float:
        """The part of the way to the budget that is still to go: 1 at the start, 0 when done."""
        last = self.deadline(steps)
        closing = min(steps / self.max_shrink, (last - self.begins(steps)) / 2)
        first = self.begins(steps) + closing  # no gate can be closed earlier
        if step <= first:
            return 1.0
        if step >= last:
            return 0.0
        return 0.5 * (1 + math.cos(math.pi * (step - first) / (last - first)))

    def ahead(self, step: int, steps: int) -> list[int]:
        """How many steps λ looks ahead along the path: from the reaction time to the deadline."""
        left = self.deadline(steps) - step
        times = [max(1, math.ceil(self.reaction * steps))]
        while times[-1] < left:
            times.append(min(2 * times[-1], left))
        return times


def _fits(name: str, value: Any) -> bool:
    """Is it of the kind that the field is for?"""
    if name == "relaxed":
        return isinstance(value, bool)
    kind = Integral if name == "sweeps" else Real
    return isinstance(value, kind) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """True for finite ones that are no bool."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False
