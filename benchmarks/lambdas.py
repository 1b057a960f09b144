"""λ for a long run in the paper's plain mode, from short ones."""

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any


def lambda_for(share: float, cards: Iterable[dict[str, Any]], epochs: int) -> float:
    """The λ that should leave a share of the MACs.

    The way that unopposed gates go is λ times the sum of the learning rates, which grows with the
    epochs. So λ of a short run counts as λ · (its epochs) / `epochs`. Between two runs log λ is
    linear in the share that is left; outside, the nearest run's λ is taken. It is a first guess:
    what a long run leaves is in its card.

    Args:
        share: of the MACs, that is to be left.
        cards: of runs with a fixed λ that differ in nothing else.
        epochs: of the long run.

    Returns:
        λ for the long run.

    Raises:
        ValueError: there are no cards.
    """
    known = sorted(
        (card["macs_share"], math.log(card["budget"]["lam"] * card["recipe"]["epochs"] / epochs))
        for card in cards
    )
    if not known:
        raise ValueError("no short runs to read λ from")
    for (low, first), (high, last) in pairwise(known):
        if low <= share <= high:
            part = (share - low) / (high - low) if high > low else 0.5
            return math.exp(first + part * (last - first))
    return math.exp(known[0][1] if share < known[0][0] else known[-1][1])
