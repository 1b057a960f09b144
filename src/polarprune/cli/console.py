"""What all commands share: how they show a training, where they run, and how they fail."""

from __future__ import annotations

import re
from typing import Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..errors import PruneError

console = Console(emoji=False)


def bar() -> Progress:
    """Of epochs."""
    return Progress(
        TextColumn("{task.description:>10}"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed:.0f}/{task.total} epochs"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[info]}"),
        console=console,
    )


def line(row: dict[str, Any]) -> str:
    """A row of a log."""
    text = f"loss {row['loss']:.3f}"
    if "accuracy" in row:
        text += f"  accuracy {row['accuracy']:.1%}"
    if "macs" in row:
        text += (
            f"  MACs {row['macs']:.1%}  closed {row['closed']}  "
            f"ε {row['eps']:.0e}  λ {row['lam']:.1f}"
        )
    return text


def device_of(name: str) -> str:
    """As torch knows it; what is there, if none is named."""
    if not re.fullmatch(r"|cpu|cuda(:\d+)?", name):
        raise PruneError(f"--device {name}: give cpu or cuda.")
    gpu = torch.cuda.is_available()
    if name.startswith("cuda") and not gpu:
        raise PruneError(f"--device {name}: there is no GPU that torch can use here.")
    return name or ("cuda" if gpu else "cpu")


def fail(error: Exception) -> NoReturn:
    """One line, and no more."""
    to = Console(stderr=True, emoji=False)
    text = " ".join(f"{type(error).__name__}: {error}".splitlines())
    to.print(text, style="red", markup=False, soft_wrap=True)
    raise typer.Exit(1)
