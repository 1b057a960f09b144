"""Estimates λ for a long run with the published proximal step from short runs."""

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any


def lambda_for(share: float, cards: Iterable[dict[str, Any]], epochs: int) -> float:
    """Estimate the λ that leaves a share of the MACs in a long run.

    Without a gradient, a gate moves by λ times the sum of the learning rates, which grows with the
    epochs. So λ of a short run counts as λ · (its epochs) / `epochs`. Between two runs, log λ is
    interpolated linearly in the remaining share. This is a first estimate; the card of the long run
    has the share that it leaves.

    Args:
        share: The share of the MACs to leave.
        cards: Cards of runs that differ only in their fixed λ.
        epochs: Length of the long run.

    Returns:
        λ for the long run.

    Raises:
        ValueError: The share is not between those of two short runs.
    """
    known = sorted(
        (card["macs_share"], math.log(card["budget"]["lam"] * card["recipe"]["epochs"] / epochs))
        for card in cards
    )
    for (low, first), (high, last) in pairwise(known):
        if low <= share <= high:
            part = (share - low) / (high - low) if high > low else 0.5
            return math.exp(first + part * (last - first))
    left = ", ".join(f"{other:.2%}" for other, _ in known)
    raise ValueError(f"{share:.2%} is not between the shares that short runs leave ({left})")
