"""The folders of the repository, and the stored numbers of each benchmark."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FIGURES = DOCS / "figures"
NUMBERS = Path(__file__).parent / "numbers"


def number_file(name: str) -> Path:
    """Return the JSON file in which a benchmark stores its numbers."""
    return NUMBERS / f"{name}.json"


def read_numbers(name: str) -> dict[str, Any]:
    """Return the stored numbers of a benchmark, or an empty dict if there are none."""
    file = number_file(name)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found


def write_numbers(name: str, content: dict[str, Any], *, sort_keys: bool = True) -> None:
    """Store the numbers of a benchmark."""
    text = json.dumps(content, indent=1, sort_keys=sort_keys) + "\n"
    number_file(name).write_text(text, encoding="utf-8")
