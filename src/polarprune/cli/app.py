"""The `polarprune` command: the list of its subcommands."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from .console import say
from .lazy import LazyGroup, add_placeholders
from .model_commands import bench, export, inspect
from .report_commands import demo, report

app = typer.Typer(
    cls=LazyGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"polarprune {_version()}")
        raise typer.Exit


def _version() -> str:
    try:
        return version("polarprune")
    except PackageNotFoundError:
        return "(not installed)"


@app.callback()
def _polarprune(
    _: Annotated[
        bool,
        typer.Option("--version", help="print the version", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Prune PyTorch models to a preset budget while they train."""


app.command()(demo)
app.command()(inspect)
add_placeholders(app)
app.command()(export)
app.command()(bench)
app.command()(report)
