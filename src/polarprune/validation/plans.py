"""Check what users say about groups: plans, names of groups, and patterns of such names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from numbers import Integral

from ..errors import PruneError


def checked_plan(plan: object, sizes: Mapping[str, int]) -> dict[str, list[int]]:
    """Check a plan against the sizes of the prunable groups and return it as plain lists.

    Args:
        plan: What the user gave: a mapping from group names to the channels to keep.
        sizes: The number of channels of every prunable group.

    Returns:
        The same plan as a dict of lists of int.

    Raises:
        PruneError: The plan is not a mapping, names an unknown group, or holds a wrong index.
    """
    if not isinstance(plan, Mapping):
        raise PruneError(
            f"plan: got {type(plan).__name__}, expected a dict; use group names and the channels "
            f"to keep, such as {{'layer1': [0, 2, 5]}}."
        )
    return {name: _channels(name, given, sizes) for name, given in plan.items()}


def check_groups(argument: str, names: Iterable[str], groups: Iterable[str]) -> None:
    """Refuse names of groups that do not exist."""
    known = set(groups)
    for name in names:
        if name not in known:
            raise PruneError(
                f"{argument}: no group is named {name!r}. print(polarprune.trace(model, example)) "
                f"lists the groups."
            )


def check_uniform(
    uniform: bool | Iterable[str], found: Collection[str], prunable: Iterable[str]
) -> None:
    """Refuse `uniform=True` without families of groups, and patterns without one.

    Args:
        uniform: True, or patterns of names of groups.
        found: The positions, or the patterns, that several groups have in common.
        prunable: The names of the prunable groups.
    """
    if isinstance(uniform, bool):
        if not found:
            raise PruneError(
                "uniform=True: no two prunable groups are at the same position of repeated blocks, "
                "that is of modules in a ModuleList, Sequential or ModuleDict. Give patterns of "
                "names of groups, such as uniform=['block*.conv1'], or leave uniform out."
            )
        return
    for pattern in uniform:
        if pattern not in found:
            some = ", ".join(list(prunable)[:4])
            raise PruneError(
                f"uniform: {pattern!r} matches no two prunable groups of the same size; a group "
                f"belongs to the first pattern that matches it. Give patterns of names of groups "
                f"({some}, …: print(polarprune.trace(model, example)) lists them), or uniform=True."
            )


def _channels(name: str, given: object, sizes: Mapping[str, int]) -> list[int]:
    """Return the channels to keep of one group."""
    if name not in sizes:
        raise PruneError(
            f"plan: unknown or frozen group {name!r}. Use prunable groups: {', '.join(sizes)}."
        )
    kept = _integers(name, given)
    if kept and not 0 <= min(kept) <= max(kept) < sizes[name]:
        raise PruneError(
            f"plan: group {name!r} has {sizes[name]} channels; use indices from 0 to "
            f"{sizes[name] - 1}."
        )
    return kept


def _integers(name: str, given: object) -> list[int]:
    """Return the items of a list or tensor; refuse everything but integers."""
    tolist = getattr(given, "tolist", None)
    kept = tolist() if callable(tolist) else given
    if not isinstance(kept, Iterable) or isinstance(kept, str):
        raise PruneError(
            f"plan: group {name!r} got {given!r}; use a list of the channels to keep, such as "
            f"[0, 2, 5]."
        )
    found = list(kept)
    if set(map(type, found)) <= {int}:
        return found
    if not all(isinstance(index, Integral) and not isinstance(index, bool) for index in found):
        raise PruneError(
            f"plan: group {name!r} got {str(found[:3])[1:-1]}, …; use the indices of the channels "
            f"to keep, such as [0, 2, 5] (for a mask: mask.nonzero().flatten())."
        )
    return [int(index) for index in found]
