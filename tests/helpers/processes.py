"""Start Python in a new process that can import the tests, the benchmarks and the library."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
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


def run_in_two_processes(module: str, folder: Path) -> None:
    """Run `python -m MODULE FOLDER` in two processes that find each other, and wait for both."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module, str(folder)],
            env=environment(**shared, RANK=str(rank), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], said
