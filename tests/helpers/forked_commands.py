"""Run the command line in forks of a test, which need not import torch and the library again."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import IO

from polarprune.cli.app import app
from tests.helpers.processes import fork


class ForkedCommand:
    """Stands in for `subprocess.Popen`: runs `python -m polarprune` in a fork of this process.

    The fork knows the networks and settings that a test has added.
    """

    def __init__(
        self, command: Sequence[str], *, env: dict[str, str], stdout: IO[str], **_: object
    ) -> None:
        assert command[:3] == [sys.executable, "-m", "polarprune"]
        self.returncode: int | None = None
        self._number = fork(partial(run_command, command[3:], stdout.fileno()), env)

    def poll(self) -> int | None:
        """Return the exit code, or None while the fork runs."""
        if self.returncode is None:
            number, status = os.waitpid(self._number, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if number else None
        return self.returncode


def run_command(arguments: Sequence[str], output: int) -> None:
    """Run a command; all that it prints goes to a file."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    try:
        app(arguments, prog_name="polarprune")
    except SystemExit as ended:
        if ended.code:
            raise
