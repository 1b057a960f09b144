"""Start the command line, or say what to install if its packages are missing.

This module imports nothing that the core of polarprune does not need.
"""

from __future__ import annotations

import importlib
import sys

_NEEDED = ("typer", "rich")


def main() -> None:
    """Run the `polarprune` command with the arguments of the process.

    Raises:
        SystemExit: Always: with the exit code of the command, or with a message if typer or rich
            is not installed.
    """
    try:
        app = importlib.import_module("polarprune.cli.app").app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _NEEDED:
            raise
        sys.exit(
            f"polarprune: the command line needs {package}. Install it with: "
            f"pip install 'polarprune[cli]'"
        )
    app(prog_name="polarprune")
