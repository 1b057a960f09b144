"""The few numbers that steer ε and λ over a training run."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from ..errors import PruneError
from ..validation.numbers import is_number


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
                f"Schedule: {'; '.join(strange)}. Give numbers, whole ones as "
                f"{' and '.join(_WHOLE)}, and True or False as {', '.join(_FLAGS)}."
            )
        problems = [
            f"{name}={value}"
            for name, value in given.items()
            if name not in _FLAGS and not (is_number(value) and value >= 0)
            and (name, value) != ("max_shrink", math.inf)
        ]  # fmt: skip
        if not 0 < self.eps_end <= self.eps_start:
            problems.append(f"eps_end={self.eps_end} (want 0 < eps_end <= eps_start)")
        if not 0 <= self.start < self.done <= 1:
            problems.append(f"start={self.start}, done={self.done} (want 0 <= start < done <= 1)")
        if self.decay > 1:
            problems.append(f"decay={self.decay} (want at most 1)")
        if min(given[name] for name in _POSITIVE) <= 0:
            problems.append(f"{', '.join(_POSITIVE)} must be positive")
        if problems:
            raise PruneError("Schedule: " + "; ".join(problems) + ". Correct these numbers.")
        for name, value in given.items():
            if type(value) not in (bool, int, float):  # of numpy: checkpoints hold plain numbers
                object.__setattr__(self, name, int(value) if name in _WHOLE else float(value))

    def eps(self, step: int, steps: int) -> float:
        """Return ε after so many steps."""
        step = min(step, steps)
        if self.decay:
            return self.eps_start * self.decay ** (step // self.every)
        ratio: float = (self.eps_end / self.eps_start) ** (step / steps)
        return self.eps_start * ratio

    def begins(self, steps: int) -> int:
        return math.floor(self.start * steps)

    def deadline(self, steps: int) -> int:
        """The step at which the budget is met for good."""
        return max(1, self.begins(steps) + 1, math.floor(self.done * steps))

    def cap(self, steps: int) -> float:
        """How far α may shrink in one step."""
        return self.max_shrink / steps

    def window_of(self, steps: int) -> int:
        """How many steps a gate takes to close."""
        return max(1, round(self.window * steps))

    def memory_of(self, steps: int) -> int:
        """Over how many steps is averaged what a gate is worth: enough, even in a short run."""
        return max(20, round(self.memory * steps))

    def path(self, step: float, steps: int) -> float:
        """The part of the way to the budget that is still to go: 1 at the start, 0 when done."""
        begins, last = self.begins(steps), self.deadline(steps)
        first = begins + min(self.window_of(steps), (last - begins) / 2)  # nothing closes earlier
        if step <= first:
            return 1.0
        if step >= last:
            return 0.0
        return 0.5 * (1 + math.cos(math.pi * (step - first) / (last - first)))


_FLAGS, _WHOLE = ("relaxed", "reopens", "spares"), ("sweeps", "every")
_POSITIVE = ("window", "memory", "max_shrink", "sweeps", "every", "alpha_start")


def _fits(name: str, value: Any) -> bool:
    """Is it of the kind that the field is for?"""
    if name in _FLAGS:
        return isinstance(value, bool)
    kind = Integral if name in _WHOLE else Real
    return isinstance(value, kind) and not isinstance(value, bool)
