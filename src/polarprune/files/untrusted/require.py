"""The one way in which a check of a file fails."""

from __future__ import annotations

from ...errors import PruneError


def require(condition: object, message: str) -> None:
    """Raise a `PruneError` with the message unless the condition holds."""
    if not condition:
        raise PruneError(message)
