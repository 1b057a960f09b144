"""Tests of plain numbers."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any


def is_number(value: Any) -> bool:
    """True for finite ones that are no bool."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False
