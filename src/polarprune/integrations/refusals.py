"""Refuse options of a framework that a pruner cannot follow."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import PruneError


def refuse(where: str, wrong: Mapping[str, object]) -> None:
    """Raise for the first problem that was found.

    Args:
        where: The class or function of the user's call; the message begins with it.
        wrong: What is wrong and the remedy, and whether it is so.

    Raises:
        PruneError: If anything is wrong.
    """
    for problem, found in wrong.items():
        if found:
            raise PruneError(f"{where}: {problem}")
