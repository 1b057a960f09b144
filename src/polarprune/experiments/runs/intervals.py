"""The difference of two methods, with a 95 % interval by Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ...validation.optional_packages import optional_package

LEVEL = 0.95


class Difference(NamedTuple):
    """The difference of two means; `half` is half of its 95 % interval, None for single runs."""

    mean: float
    half: float | None

    @property
    def sign(self) -> int:
        """Return 1 or -1 if the interval lies on one side of zero, else 0."""
        if self.half is None or abs(self.mean) <= self.half:
            return 0
        return 1 if self.mean > 0 else -1


def difference(one: Sequence[float], other: Sequence[float]) -> Difference:
    """Return mean(one) - mean(other) with its interval: Student's t, with the variance of both.

    Args:
        one: A score for each seed.
        other: The same of another method.
    """
    mean = statistics.fmean(one) - statistics.fmean(other)
    if min(len(one), len(other)) < 2:
        return Difference(mean, None)
    freedom = len(one) + len(other) - 2
    squares = sum((len(scores) - 1) * statistics.variance(scores) for scores in (one, other))
    error = math.sqrt(squares / freedom * (1 / len(one) + 1 / len(other)))
    special = optional_package("scipy.special", needed_for="intervals", extra="cli")
    return Difference(mean, float(special.stdtrit(freedom, (1 + LEVEL) / 2)) * error)
