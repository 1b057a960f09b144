"""Writing the files of a run so that a kill or a full disk leaves the old file intact."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ...errors import PruneError

Json = dict[str, Any]  # a JSON object, such as a card or a row of a log


def make_folder(folder: Path) -> None:
    """Create a folder and those above it, if they do not exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is a file" if folder.is_file() else str(error)
        raise PruneError(f"{folder}: cannot create this folder: {reason}.") from error


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Context manager: yield a temporary name, and rename it to `file` once it is written.

    Raises:
        PruneError: The file cannot be written. The old one is kept.
    """
    special = file.is_symlink() or (file.exists() and not file.is_file())  # such as /dev/stdout
    new = file if special else file.with_name(f"{file.name}.new")
    try:
        yield new
        new.replace(file)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch raises a RuntimeError
        if not special:
            with suppress(OSError):
                new.unlink(missing_ok=True)
        raise _not_written(file, error) from error


def append(file: Path, line: str) -> None:
    """Append a line to a file: all of it, or nothing if writing fails."""
    size = file.stat().st_size if file.exists() else 0
    try:
        with file.open("a", encoding="utf-8") as log:
            log.write(line)
    except OSError as error:
        with suppress(OSError):
            os.truncate(file, size)
        raise _not_written(file, error) from error


def _not_written(file: Path, error: BaseException) -> PruneError:
    """Return an error with the operating system's reason, which torch does not repeat."""
    causes = [error]
    while causes[-1].__context__ is not None:
        causes.append(causes[-1].__context__)
    cause = next((one for one in causes if isinstance(one, OSError)), error)
    reason = cause.strerror if isinstance(cause, OSError) else str(cause).partition("\n")[0]
    return PruneError(
        f"{file}: it cannot be written: {reason}. The files of the run are kept as they were. Free "
        f"some space or choose another folder, and run this again."
    )


def write_text(file: Path, text: str) -> None:
    """Replace a file by a text."""
    with replacing(file) as new:
        new.write_text(text, encoding="utf-8")


def write_json(file: Path, content: object) -> None:
    """Replace a file by JSON."""
    write_text(file, json.dumps(content, indent=1) + "\n")


def read_json(file: Path) -> Json:
    """Return the JSON object in a file."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise PruneError(f"{file}: cannot read it ({error}). Choose another folder.") from error
