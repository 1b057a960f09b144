"""Types of plain data, which JSON can hold: cards, reports, rows of a log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

JsonObject = dict[str, Any]
RowHandler = Callable[[JsonObject], None]  # called with every row of a log
