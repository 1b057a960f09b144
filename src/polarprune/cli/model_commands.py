"""`polarprune inspect`, `export` and `bench`: commands that take a model of the user's own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table
from torch import Tensor, nn

from ..analysis.trace import trace
from ..cost.timing import Timing, environment, side_by_side
from ..errors import PruneError
from ..files.deployment import FORMATS, deploy
from ..files.model_file import load, read_card
from .arguments import ModelArgument, ShapeOptions, inputs_from, model_from
from .console import console, device_of, fail, say
from .lazy import experiments

# --- inspect --------------------------------------------------------------------------------------


def inspect(
    model: ModelArgument,
    shape: ShapeOptions,
    keep: Annotated[list[str] | None, typer.Option(help="names of modules to freeze")] = None,
) -> None:
    """Show which channels of a model are prunable, which are frozen and why, and what they cost."""
    try:
        graph = trace(model_from(model), inputs_from(shape), keep=keep or ())
    except (PruneError, ImportError, AttributeError, ValueError) as error:
        fail(error)
    console.print(str(graph), soft_wrap=True, markup=False)


# --- export ---------------------------------------------------------------------------------------


def export(
    file: Annotated[Path, typer.Argument(help="a pruned model: from the zoo, train or save")],
    to: Annotated[Path, typer.Option(help="the file to write: " + ", ".join(FORMATS))],
    shape: ShapeOptions,
    model: Annotated[
        str, typer.Option(help="package.module:factory of the original model, if it is your own")
    ] = "",
) -> None:
    """Write a pruned model as ONNX or torch.export program, and compare it with the model."""
    try:
        small = load(file, model=model_from(model)) if model else _known_model(file)
        difference, any_batch = deploy(small, inputs_from(shape), to)
    except PruneError as error:
        fail(error)
    batch = "batches of any size" if any_batch else "batches of this size only"
    say(
        f"{to}: {to.stat().st_size / 2**20:.1f} MiB, {batch}; outputs differ from the model's by "
        f"{difference:.1e} of the largest value"
    )


def _known_model(file: Path) -> nn.Module:
    """Return the model in a file whose card names a network of the experiments."""
    network = read_card(file).get("network")
    if not isinstance(network, str) or not experiments().knows(network):
        raise PruneError(f"{file}: unknown network; pass --model package.module:factory.")
    model: nn.Module = experiments().rebuild(file)[0]
    return model


# --- bench ----------------------------------------------------------------------------------------


def bench(
    model: ModelArgument,
    shape: ShapeOptions,
    small: Annotated[list[Path] | None, typer.Option(help="a pruned file of the model")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    threads: Annotated[int, typer.Option(help="threads on the CPU; 0: the default of torch")] = 0,
    runs: Annotated[int, typer.Option(help="runs of each model, which take turns")] = 60,
) -> None:
    """Measure the latency of a model and of its pruned versions."""
    try:
        device = device_of(device)
        _set_threads(threads)
        if runs < 1:
            raise PruneError(f"--runs {runs}: give at least 1.")
        models = {name: one.to(device) for name, one in _models(model, small or []).items()}
        inputs = tuple(x.to(device) for x in inputs_from(shape))
        found = _timed(models, inputs, runs, f"{model}: it does not run on --shape {shape}")
    except PruneError as error:
        fail(error)
    _show_timings(found)
    used = f", {torch.get_num_threads()} threads" if device == "cpu" else ""
    console.print(
        f"median of {runs} runs, batch of {next(iter(found.values())).batch}; "
        f"{environment()['machine']}{used}, torch {torch.__version__}",
        markup=False,
    )


def _set_threads(threads: int) -> None:
    if not 0 <= threads <= (os.cpu_count() or 1):
        raise PruneError(f"--threads {threads}: give a number from 0 to {os.cpu_count()}.")
    torch.set_num_threads(threads or torch.get_num_threads())


def _models(factory: str, files: Sequence[Path]) -> dict[str, nn.Module]:
    """Return the original and the pruned models by name; files of one name keep their path."""
    models = {factory.rpartition(":")[2]: model_from(factory)}
    names = [file.name for file in files]
    for file in files:
        unique = names.count(file.name) == 1
        models[file.name if unique else str(file)] = load(file, model=model_from(factory))
    return models


def _timed(
    models: dict[str, nn.Module], inputs: tuple[Tensor, ...], runs: int, failure: str
) -> dict[str, Timing]:
    try:
        return side_by_side(models, inputs, runs=runs)
    except Exception as error:  # the user's model may raise anything
        raise PruneError(f"{failure}: {error!r}. Give the shape of a valid input.") from error


def _show_timings(found: dict[str, Timing]) -> None:
    table = Table(box=None, padding=(0, 1))
    table.add_column("model", overflow="fold")  # names may be long
    for column in ("ms", "per second", "MACs", "params", "speedup"):
        table.add_column(column, justify="right", no_wrap=True)
    first = next(iter(found.values()))
    for name, timing in found.items():
        table.add_row(name, *_timing_cells(timing, first))
    console.print(table)


def _timing_cells(timing: Timing, first: Timing) -> list[str]:
    return [
        f"{timing.median:.2f}",
        f"{timing.throughput:,.0f}",
        f"{timing.macs / 1e6:,.1f} M ({timing.macs / max(first.macs, 1):.1%})",
        f"{timing.params / 1e6:,.2f} M ({timing.params / max(first.params, 1):.1%})",
        f"{first.median / timing.median:.2f} ×",
    ]
