"""Output that all commands share: the console, progress bars, log lines and errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..errors import PruneError
from ..plain_data import JsonObject

console = Console(emoji=False)


def say(text: str) -> None:
    """Print a text as it is: without markup, colours or line breaks."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def say_json(found: object) -> None:
    """Print plain data as JSON on stdout."""
    typer.echo(json.dumps(found, indent=2, ensure_ascii=False))


@contextmanager
def texts_on_stderr(wanted: bool) -> Iterator[None]:
    """Context manager: with `--json`, print everything that `say_json` does not print on stderr."""
    before, console.stderr = console.stderr, wanted or console.stderr
    try:
        yield
    finally:
        console.stderr = before


def bar() -> Progress:
    """Return a progress bar that counts epochs."""
    return Progress(
        TextColumn("{task.description:>10}"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed:.0f}/{task.total} epochs"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[info]}"),
        console=console,
    )


_SCORES = {"accuracy": ".1%", "mIoU": ".1%", "perceptual loss": ".4g", "validation loss": ".4f"}


def line(row: JsonObject) -> str:
    """Format a row of a training log."""
    text = f"loss {row['loss']:.3f}"
    for measure, form in _SCORES.items():
        if measure in row:
            text += f"  {measure} {row[measure]:{form}}"
    if "macs" in row:
        text += (
            f"  MACs {row['macs']:.1%}  closed {row['closed']}  "
            f"ε {row['eps']:.0e}  λ {row['lam']:.1f}"
        )
    return text


def device_of(name: str) -> str:
    """Return the device of that name, or the best available one for an empty name.

    Raises:
        PruneError: If torch cannot use the device.
    """
    if not re.fullmatch(r"|cpu|cuda(:\d+)?", name):
        raise PruneError(f"--device {name}: give cpu or cuda.")
    gpu = torch.cuda.is_available()
    if name.startswith("cuda") and not gpu:
        raise PruneError(f"--device {name}: torch finds no GPU; give cpu.")
    return name or ("cuda" if gpu else "cpu")


def fail(error: Exception) -> NoReturn:
    """Print an error as one line on stderr and end the command with exit code 1."""
    stderr = Console(stderr=True, emoji=False)
    text = " ".join(f"{type(error).__name__}: {error}".splitlines())
    stderr.print(text, style="red", markup=False, soft_wrap=True)
    raise typer.Exit(1)
