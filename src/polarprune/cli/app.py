"""The `polarprune` command: the list of its subcommands."""

from __future__ import annotations

import typer

from .lazy import LazyGroup, add_placeholders
from .model_commands import bench, export, inspect
from .report_commands import demo, report

app = typer.Typer(
    cls=LazyGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


@app.callback()
def _polarprune() -> None:
    """Prune PyTorch models to a preset budget while they train."""


app.command()(demo)
app.command()(inspect)
add_placeholders(app)
app.command()(export)
app.command()(bench)
app.command()(report)
