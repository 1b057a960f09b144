"""Write files completely or not at all: the old file is kept until the new one is complete."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..errors import PruneError


def make_folder(folder: Path) -> None:
    """Create a folder and its parents.

    Raises:
        PruneError: If the folder cannot be created, for example because it is a file.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = "that is a file" if folder.is_file() else str(error)
        raise PruneError(f"{folder}: {what}; give a folder.") from error


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Give a temporary name to write to, and rename it to `file` after the block.

    Raises:
        PruneError: If the block or the renaming fails to write; `file` is then unchanged.
    """
    special = file.is_symlink() or (file.exists() and not file.is_file())  # such as /dev/stdout
    new = file if special else file.with_name(f"{file.name}.new")
    try:
        yield new
        new.replace(file)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch raises RuntimeError
        if not special:
            with suppress(OSError):
                new.unlink(missing_ok=True)
        raise cannot_write(file, error) from error


def cannot_write(file: Path, error: BaseException) -> PruneError:
    """Return an error with the reason of the operating system, which torch hides in a chain."""
    causes = [error]
    while causes[-1].__context__ is not None:
        causes.append(causes[-1].__context__)
    cause = next((one for one in causes if isinstance(one, OSError)), error)
    reason = cause.strerror if isinstance(cause, OSError) else str(cause).partition("\n")[0]
    return PruneError(
        f"{file}: it cannot be written: {reason}. The file that was there is unchanged: free some "
        f"space or give another path, and run this again."
    )


def write_text(file: Path, text: str) -> None:
    """Write a text file as UTF-8.

    Raises:
        PruneError: If it cannot be written; the file that was there is then unchanged.
    """
    with replacing(file) as new:
        new.write_text(text, encoding="utf-8")


def write_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file with the permissions of any new file.

    safetensors itself makes files that only their owner can read.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        new.touch()
        mode = new.stat().st_mode
        save_file(dict(tensors), str(new), metadata=metadata)
        new.chmod(mode)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
