"""Tests of plain numbers that users pass."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import TypeGuard


def is_number(value: object) -> TypeGuard[float]:
    """Return True for a finite real number; a bool is none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def is_count(value: object) -> TypeGuard[int]:
    """Return True for an integer from 1 on."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1
