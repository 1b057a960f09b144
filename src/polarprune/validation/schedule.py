"""Check the numbers of a `Schedule`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import TypeGuard

from ..errors import PruneError
from .numbers import is_number

_FLAGS, _INTEGERS = ("relaxed", "reopens", "spares"), ("sweeps", "every")
_POSITIVE = ("window", "memory", "max_shrink", "sweeps", "every", "alpha_start")


def check_schedule(schedule: object, kind: type) -> None:
    """Require an instance of `Schedule`, which is `kind`."""
    if not isinstance(schedule, kind):
        raise PruneError(f"schedule={schedule!r}: give a polarprune.Schedule(...).")


def checked_fields(given: Mapping[str, object]) -> dict[str, bool | int | float]:
    """Return the fields of a schedule as plain numbers, which a checkpoint can hold.

    Args:
        given: The fields by name, as the user passed them.

    Raises:
        PruneError: If a value has the wrong type or is out of range.
    """
    strange = [f"{name}={value!r}" for name, value in given.items() if not _fits(value, name)]
    if strange:
        raise PruneError(
            f"Schedule: {'; '.join(strange)}. Give numbers, integers for "
            f"{' and '.join(_INTEGERS)}, and True or False for {', '.join(_FLAGS)}."
        )
    numbers = {name: value for name, value in given.items() if _fits(value, name)}
    problems = _out_of_range(numbers)
    if problems:
        raise PruneError(f"Schedule: {'; '.join(problems)}. Correct these numbers.")
    return {name: _plain(name, value) for name, value in numbers.items()}


def _fits(value: object, name: str) -> TypeGuard[float]:
    """Return True if a value has the type of its field."""
    if name in _FLAGS:
        return isinstance(value, bool)
    kind = Integral if name in _INTEGERS else Real
    return isinstance(value, kind) and not isinstance(value, bool)


def _out_of_range(given: Mapping[str, float]) -> list[str]:
    """Describe every number that is out of range."""
    unlimited = ("max_shrink", math.inf)
    problems = [
        f"{name}={value} must be finite and at least 0"
        for name, value in given.items()
        if name not in _FLAGS and (name, value) != unlimited
        if not (is_number(value) and value >= 0)
    ]
    low, high, start, done = (given[k] for k in ("eps_end", "eps_start", "start", "done"))
    if not 0 < low <= high:
        problems.append(f"eps_end={low} must satisfy 0 < eps_end <= eps_start")
    if not 0 <= start < done <= 1:
        problems.append(f"start={start}, done={done} must satisfy 0 <= start < done <= 1")
    if given["decay"] > 1:
        problems.append(f"decay={given['decay']} must be at most 1")
    problems += [f"{name}={given[name]} must be positive" for name in _POSITIVE if given[name] == 0]
    return problems


def _plain(name: str, value: float) -> bool | int | float:
    """Return a number of Python, in place of one of numpy."""
    if type(value) in (bool, int, float):
        return value
    return int(value) if name in _INTEGERS else float(value)
