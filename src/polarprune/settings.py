"""What a Pruner is asked for, checked before anything is changed."""

from __future__ import annotations

import math
from typing import Any

from .errors import PruneError
from .groups import Graph


def check_settings(
    wanted: dict[str, float | None],
    lam: float | None,
    steps: int,
    multiple_of: int,
    compact: str | None,
) -> dict[str, float]:
    if compact not in (None, "auto"):
        raise PruneError(f'compact={compact!r}: give "auto", or call pruner.compact() yourself.')
    limits = {key: value for key, value in wanted.items() if value is not None}
    if lam is not None and limits:
        raise PruneError(
            f"conflicting settings: lam={lam} leaves the ratio open, {' and '.join(limits)} set "
            f"it. Give a budget or lam, not both."
        )
    if lam is None and not limits:
        raise PruneError("no goal: give a budget (macs=0.5, params=0.3) or lam=...")
    for key, value in limits.items():
        if not isinstance(value, (int, float)) or not 0 < value < 1:
            raise PruneError(
                f"{key}={value!r}: a budget is a fraction of the original, between 0 and 1 "
                f"(macs=0.5 is half of the MACs)."
            )
    if lam is not None and not (isinstance(lam, (int, float)) and 0 < lam < math.inf):
        raise PruneError(f"lam={lam!r}: must be positive and finite.")
    if not _whole(steps):
        raise PruneError(f"steps={steps!r}: give the number of optimizer steps of the training.")
    if not _whole(multiple_of):
        raise PruneError(f"multiple_of={multiple_of!r}: must be a positive whole number.")
    return limits


def _whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def check_prunable(graph: Graph) -> None:
    if not graph.open:
        reasons = dict.fromkeys(g.reason for g in graph.groups.values()) or ["there are none"]
        raise PruneError(
            "no prunable channels: every group stays whole ("
            + "; ".join(list(reasons)[:3])
            + "). Print polarprune.trace(model, example) for the whole list."
        )
