"""The difference of two methods, with a 95 % interval by Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

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
    return Difference(mean, t_quantile(freedom) * error)


def t_quantile(freedom: int) -> float:
    """Return t with P(|T| < t) = 0.95 for Student's t.

    Args:
        freedom: Degrees of freedom, at least 1.
    """
    low, high = 0.0, 1.0
    while _inside(high, freedom) < LEVEL:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < LEVEL else (low, middle)
    return high


def _inside(t: float, freedom: int) -> float:
    """Return P(|T| < t): the finite sums over powers of the cosine, for odd and even ν."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= (k - 1) / k * math.cos(angle) ** 2
        total += term
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
