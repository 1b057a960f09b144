"""Start Python in a new process that can import the tests, the benchmarks and the library."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    """Return the variables of this process, with the repository on Python's search path."""
    folders = [str(ROOT), str(ROOT / "src")]
    given = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders + [given] * bool(given)), **more}
