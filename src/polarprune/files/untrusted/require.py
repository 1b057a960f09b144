"""Raise the error for a file that fails a check."""

from __future__ import annotations

from ...errors import PruneError


def require(condition: object, message: str) -> None:
    """Raise a `PruneError` with the message unless the condition holds."""
    if not condition:
        raise PruneError(message)
