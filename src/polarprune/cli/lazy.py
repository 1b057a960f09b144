"""Commands of the experiments, imported only when one of them is used.

The experiments bring data sets, networks and training loops that `inspect`, `export` and the other
commands of the library do not need. This is the only place that imports them.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import typer
from typer.core import TyperGroup

# Name of each command of the experiments, and the line that `polarprune --help` shows for it.
LAZY_COMMANDS = {
    "train": "Train a network, prune it to a budget while it trains, and score the small network.",
    "sweep": "Prune one network to several budgets, and score the small network at each of them.",
    "referee": "Say whether pruning is worth it: compare it with a thin network and other methods.",
    "eval": "Rebuild a pruned network from its file and score it.",
}


def experiments() -> ModuleType:
    """Import and return `polarprune.cli.experiments`."""
    return importlib.import_module("polarprune.cli.experiments")


class LazyGroup(TyperGroup):
    """A group of commands that imports those of the experiments when one of them is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Replace the placeholders by the real commands, then resolve as usual."""
        if args and args[0] in LAZY_COMMANDS:
            self.commands.update(typer.main.get_group(experiments().app).commands)
        return super().resolve_command(ctx, args)


def add_placeholders(app: typer.Typer) -> None:
    """Register the commands of the experiments by name and help text alone."""
    for name, text in LAZY_COMMANDS.items():
        app.command(name, help=text)(_placeholder)


def _placeholder() -> None:
    raise AssertionError("LazyGroup replaces this command before it is called")
