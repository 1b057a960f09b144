"""`polarprune train tiny`, as a test gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from polarprune.cli.app import app


def train_tiny(data: str, out: Path, *options: str) -> Any:
    """Run the command on the CPU; return its exit code and output."""
    given = ["train", "tiny", "--data", data, "--out", str(out), "--device", "cpu", *options]
    return CliRunner().invoke(app, given)
