"""When numbers differ by more than chance: the rules that all tables and sentences use."""

import statistics
from collections.abc import Sequence

SIGMAS = 2.0


def far(seeds: Sequence[float]) -> float:
    """The least difference that tells two single runs apart: 2 √2 standard deviations.

    Args:
        seeds: results of runs that differ in nothing but the seed, at least two.

    Returns:
        Two standard deviations of the difference of two such runs.
    """
    return SIGMAS * 2**0.5 * statistics.stdev(seeds)


def is_sudden(changes: Sequence[float], here: slice) -> bool:
    """Is one of the changes in a part of a run larger than those in the rest of it?

    Args:
        changes: from each epoch to the next.
        here: the part, as a slice of `changes`.

    Returns:
        True if the largest change in the part is more than two standard deviations above the mean
        of all other changes.
    """
    rest = [*changes[: here.start], *changes[here.stop :]]
    return max(changes[here]) > statistics.mean(rest) + SIGMAS * statistics.stdev(rest)
