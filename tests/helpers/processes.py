"""Start Python in a new process that can import the tests, the benchmarks and the library."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 120.0  # seconds to wait for a process of a busy machine


def environment(**more: str) -> dict[str, str]:
    """Return the variables of this process, with the repository on Python's search path."""
    folders = [str(ROOT), str(ROOT / "src")]
    given = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders + [given] * bool(given)), **more}


def wait_for_file(file: Path, process: subprocess.Popen[bytes], log: Path | None = None) -> None:
    """Wait until a process has made a file; fail with its log if it ends before."""
    end = time.monotonic() + LIMIT
    while not file.exists():
        said = log.read_text() if log else ""
        assert process.poll() is None and time.monotonic() < end, said
        time.sleep(0.02)
