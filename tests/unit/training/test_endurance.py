"""Broken runs resume bit-equal to uninterrupted ones (`make endurance` breaks more of them)."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.helpers.processes import environment

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are broken in forks")


def endured(*kinds: str, **options: int) -> None:
    """Run a trial of each kind, in a process that may fork."""
    command = [sys.executable, "-m", "tests.helpers.endurance"]
    command += ["--trials", str(len(kinds)), *(f"--only={kind}" for kind in kinds)]
    command += [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    counts = re.search(r"^all +(\d+) +(\d+)", done.stdout, re.MULTILINE)
    assert counts and counts[1] == counts[2] == str(len(kinds))


def test_a_killed_run_resumes_bit_equal() -> None:
    endured("killed", "killed in a write", "train killed in a write")


def test_a_full_disk_loses_nothing() -> None:
    endured("full disk loop", "full disk save", "full disk train", "diverged")


def test_many_steps_take_no_more_memory() -> None:
    endured("many steps", steps=2000)
