"""What counts as a number in settings and states."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy
import pytest

from polarprune.validation.numbers import is_number


@pytest.mark.parametrize("value", [0, -3, 0.5, Fraction(1, 3), numpy.float32(2), numpy.int64(4)])
def test_finite_real_numbers_are_numbers(value: object) -> None:
    assert is_number(value)


@pytest.mark.parametrize(
    "value",
    [True, numpy.True_, math.nan, math.inf, -math.inf, 10**400, "1", None, 1j, [1]],
    ids=lambda x: str(x)[:8],
)
def test_anything_else_is_not(value: object) -> None:
    assert not is_number(value)
