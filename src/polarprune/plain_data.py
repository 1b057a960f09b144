"""The type of plain data, which JSON can hold: cards, reports, rows of a log."""

from __future__ import annotations

from typing import Any

JsonObject = dict[str, Any]
