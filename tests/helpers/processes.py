"""Start Python in a new process that can import the tests, the benchmarks and the library."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
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


def run_module(module: str, folder: Path) -> None:
    """Run `python -m MODULE FOLDER` in a new process, and wait for it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, str(folder)],
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def fork_two(task: Callable[[], object]) -> bool:
    """Run a task in two forks that find each other; return whether both ended well.

    They have what this process has imported, which takes longer than most tasks. If one of them
    fails, the other is killed, as torchrun does it.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    gc.freeze()  # else a collection in a fork would copy all that they share
    running = {fork(task, {**shared, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"}
    gc.unfreeze()
    codes = []
    while running:
        pid, status = os.wait()
        if pid not in running:  # another child of this process
            continue
        running.discard(pid)
        codes.append(os.waitstatus_to_exitcode(status))
        for other in running if codes[-1] else ():
            os.kill(other, signal.SIGKILL)
    return codes == [0, 0]


def fork(task: Callable[[], object], variables: dict[str, str]) -> int:
    """Run a task in a fork with these environment variables; return the fork's number."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(variables)
        task()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
