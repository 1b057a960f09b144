"""When numbers differ by more than chance: the rules that all tables and captions use."""

import statistics
from collections.abc import Sequence

SIGMAS = 2.0


def smallest_difference(seeds: Sequence[float]) -> float:
    """Return the smallest difference that tells two single runs apart: 2 √2 standard deviations.

    Args:
        seeds: Results of at least two runs that differ only in the seed.

    Returns:
        Two standard deviations of the difference of two such runs.
    """
    return SIGMAS * 2**0.5 * statistics.stdev(seeds)


def is_sudden(changes: Sequence[float], here: slice) -> bool:
    """Return whether a part of a run has a larger change than the rest of it.

    Args:
        changes: Changes from each epoch to the next.
        here: The part, as a slice of `changes`.

    Returns:
        True if the largest change in the part is more than two standard deviations above the mean
        of all other changes.
    """
    rest = [*changes[: here.start], *changes[here.stop :]]
    return max(changes[here]) > statistics.mean(rest) + SIGMAS * statistics.stdev(rest)
