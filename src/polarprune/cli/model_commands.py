"""`polarprune inspect`, `export` and `bench`: commands that take the user's own model."""

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
from ..channels.graph import Graph
from ..channels.group_table import state_of
from ..cost.timing import Timing, environment, side_by_side
from ..errors import PruneError
from ..files.deployment import FORMATS, deploy
from ..files.model_file import load, read_card
from ..integrations.factories import make_model
from ..torch_internals.process_settings import cpu_threads
from .arguments import AsJson, ModelArgument, ModelOption, ShapeOptions, inputs_from
from .console import console, device_of, fail, say, say_json
from .lazy import experiments

# --- inspect --------------------------------------------------------------------------------------


def inspect(
    model: ModelArgument,
    shape: ShapeOptions,
    keep: Annotated[list[str] | None, typer.Option(help="names of modules to freeze")] = None,
    as_json: AsJson = False,
) -> None:
    """Show which channels of a model are prunable, which are frozen and why, and what they cost."""
    try:
        graph = trace(make_model(model), inputs_from(shape), keep=keep or ())
    except (PruneError, ImportError, AttributeError, ValueError) as error:
        fail(error)
    if as_json:
        say_json(_graph_facts(graph))
    else:
        console.print(str(graph), soft_wrap=True, markup=False)


def _graph_facts(graph: Graph) -> dict[str, object]:
    """Return what the table of a graph shows, as plain data."""
    prices = graph.cost.prices()
    groups = [
        {
            "name": group.name,
            "channels": group.size,
            "frozen": group.frozen,
            "state": state_of(group),
            "produced_by": group.producers,
            "read_by": group.consumers,
            "price": dict(zip(("macs", "params"), prices.get(group.name, ()), strict=False)),
        }
        for group in graph.groups.values()
    ]
    return {
        "cost": graph.cost.original(),
        "groups": groups,
        "unknown_operations": graph.unknown,
        "notes": graph.notes,
        "more_with_norms": graph.with_norms,
    }


# --- export ---------------------------------------------------------------------------------------


def export(
    file: Annotated[Path, typer.Argument(help="a pruned model: from the zoo, train or save")],
    to: Annotated[Path, typer.Option(help="the file to write: " + ", ".join(FORMATS))],
    shape: ShapeOptions,
    model: ModelOption = "",
) -> None:
    """Write a pruned model as ONNX or torch.export program, and compare it with the model."""
    try:
        small = _pruned(file, model)
        made = deploy(small, inputs_from(shape), to)
    except PruneError as error:
        fail(error)
    fixed = f"batches of this size only ({made.fixed_batch})"
    batch = fixed if made.fixed_batch else "batches of any size"
    say(
        f"{to}: {to.stat().st_size / 2**20:.1f} MiB, {batch}; outputs differ from the model's by "
        f"{made.difference:.1e} of the largest value"
    )


def _pruned(file: Path, model: str) -> nn.Module:
    """Return the model in a file, built by the user's factory or as the network on its card."""
    if model:
        return load(file, model=make_model(model, _classes(file)))
    small: nn.Module = experiments().rebuild(file)[0]
    return small


def _classes(file: Path) -> int | None:
    """Return the number of classes that `train` noted on the card of a file."""
    classes = read_card(file).get("classes")
    return classes if type(classes) is int else None


# --- bench ----------------------------------------------------------------------------------------


def bench(
    model: ModelArgument,
    shape: ShapeOptions,
    small: Annotated[list[Path] | None, typer.Option(help="a pruned file of the model")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    threads: Annotated[int, typer.Option(help="threads on the CPU; 0: the default of torch")] = 0,
    runs: Annotated[int, typer.Option(help="runs of each model, which take turns")] = 60,
    as_json: AsJson = False,
) -> None:
    """Measure the latency of a model and of its pruned versions."""
    try:
        device = device_of(device)
        _check_threads(threads)
        if runs < 1:
            raise PruneError(f"--runs {runs}: give at least 1.")
        models = {name: one.to(device) for name, one in _models(model, small or []).items()}
        inputs = tuple(x.to(device) for x in inputs_from(shape))
        with cpu_threads(threads):
            threads = torch.get_num_threads()
            found = _timed(models, inputs, runs, f"{model}: it does not run on --shape {shape}")
    except PruneError as error:
        fail(error)
    if as_json:
        say_json(_timing_facts(found, runs, device, threads))
        return
    _show_timings(found)
    used = f", {threads} thread{'s' * (threads > 1)}" if device == "cpu" else ""
    console.print(
        f"median of {runs} runs ± half of the distance between the quartiles, batch of "
        f"{next(iter(found.values())).batch}; "
        f"{environment()['machine']}{used}, torch {torch.__version__}",
        markup=False,
    )


def _check_threads(threads: int) -> None:
    if not 0 <= threads <= (os.cpu_count() or 1):
        raise PruneError(f"--threads {threads}: give a number from 0 to {os.cpu_count()}.")


def _models(factory: str, files: Sequence[Path]) -> dict[str, nn.Module]:
    """Return the original and the pruned models by name; files of one name keep their path."""
    classes = _classes(files[0]) if files else None
    models = {factory.rpartition(":")[2]: make_model(factory, classes)}
    names = [file.name for file in files]
    for file in files:
        unique = names.count(file.name) == 1
        models[file.name if unique else str(file)] = load(file, model=make_model(factory, classes))
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
    for column in ("ms", "per s", "MACs", "params", "speedup"):
        table.add_column(column, justify="right", no_wrap=True)
    first = next(iter(found.values()))
    for name, timing in found.items():
        table.add_row(name, *_timing_cells(timing, first))
    console.print(table)


def _timing_cells(timing: Timing, first: Timing) -> list[str]:
    return [
        f"{timing.median:.2f} ± {timing.spread:.2f}",
        f"{timing.throughput:,.0f}",
        f"{timing.macs / 1e6:,.1f}M ({timing.macs / max(first.macs, 1):.1%})",
        f"{timing.params / 1e6:,.2f}M ({timing.params / max(first.params, 1):.1%})",
        f"{first.median / timing.median:.2f}×",
    ]


def _timing_facts(
    found: dict[str, Timing], runs: int, device: str, threads: int
) -> dict[str, object]:
    """Return what the table of timings shows, as plain data."""
    first = next(iter(found.values()))
    models = {
        name: {
            "milliseconds": timing.median,
            "quartiles": timing.quartiles,
            "per_second": timing.throughput,
            "macs": timing.macs,
            "params": timing.params,
            "speedup": first.median / timing.median,
        }
        for name, timing in found.items()
    }
    conditions = {"runs": runs, "batch": first.batch, "device": device}
    return {"models": models, **conditions, "threads": threads, **environment()}
