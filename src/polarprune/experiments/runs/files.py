"""Write the files of a run so that a kill or a full disk leaves the old file intact."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from ...errors import PruneError
from ...files.writing import cannot_write, write_text
from ...plain_data import JsonObject


def append(file: Path, line: str) -> None:
    """Append a line to a file: all of it, or nothing if writing fails."""
    size = file.stat().st_size if file.exists() else 0
    try:
        with file.open("a", encoding="utf-8") as log:
            log.write(line)
    except OSError as error:
        with suppress(OSError):
            os.truncate(file, size)
        raise cannot_write(file, error) from error


def write_json(file: Path, content: object) -> None:
    """Replace a file by JSON."""
    write_text(file, json.dumps(content, indent=1) + "\n")


def read_json(file: Path) -> JsonObject:
    """Return the JSON object in a file."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise PruneError(f"{file}: cannot read it ({error}). Choose another folder.") from error
