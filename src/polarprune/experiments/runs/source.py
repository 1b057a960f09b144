"""The commit of polarprune's sources, which every card stores."""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE = Path(__file__).parents[2]
VARIABLE = "POLARPRUNE_COMMIT"


def commit(package: Path = PACKAGE) -> str:
    """Return the commit of the sources in a folder.

    Only files of the package count as changes: a run that is stored beside it changes no source.

    Args:
        package: Folder of the package.

    Returns:
        The commit, followed by "+changes" if files in the folder were changed or added since.
        If no git repository tracks the folder: the environment variable POLARPRUNE_COMMIT or,
        if it is not set, the installed version, such as "version 0.1.0".
    """
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None:  # it is tracked
        head = _git(package, "rev-parse", "HEAD")
        if head:
            changes = _git(package, "status", "--porcelain", "--", ".")
            return f"{head}+changes" if changes != "" else head
    return os.environ.get(VARIABLE) or _version()


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints, or None if it fails or is not installed."""
    # In a git hook, GIT_DIR would point to another repository.
    outside = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, env=outside, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _version() -> str:
    try:
        return f"version {version('polarprune')}"
    except PackageNotFoundError:
        return "unknown"
