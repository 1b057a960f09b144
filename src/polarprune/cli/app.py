"""The command line: `polarprune demo`, `inspect`, `train`, `sweep`, `eval`, `export`, `bench`,
`report`."""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import nn

from ..analysis.trace import trace
from ..cost.timing import Timing, environment, side_by_side
from ..errors import PruneError
from ..experiments.networks import NETWORKS
from ..experiments.run import rebuilt
from ..files.deployment import FORMATS, deploy
from ..files.model_file import load, read_card, save
from ..files.writing import make_folder, replacing, write_text
from ..report.plots import save_gate_histogram
from ..report.report import Report
from ..validation.arguments import check_settings
from . import experiments as commands
from .console import bar, console, device_of, fail, line
from .demo import Demo, Settings

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
Maker = Annotated[str, typer.Argument(help="package.module:callable that makes the model")]
Shapes = Annotated[
    list[str], typer.Option("--shape", help="of an input, as 1,3,224,224 or 1,16:int64")
]


@app.callback()
def _polarprune() -> None:
    """Prune PyTorch models to a preset budget while they train."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder for the model and the report")] = Path(
        "runs/demo"
    ),
    macs: Annotated[float, typer.Option(help="budget, as a fraction of the MACs")] = 0.5,
    epochs: Annotated[int, typer.Option(help="of training while pruning")] = Settings.epochs,
    seed: Annotated[int, typer.Option(help="of all random numbers")] = 0,
) -> None:
    """Prune a small residual network on handwritten digits while it trains."""
    start = time.perf_counter()
    try:
        if epochs < 1:
            raise PruneError(f"--epochs {epochs}: at least one.")
        check_settings({"macs": macs}, None, epochs)
        make_folder(out)
        settings = Settings(budget=macs, epochs=epochs, seed=seed)
        with bar() as shown:
            task = shown.add_task("starting", total=None, info="")

            def show(row: dict[str, Any]) -> None:
                shown.update(task, advance=1, description=row["stage"], info=line(row))

            demonstration = Demo(settings, show)
            shown.update(task, total=demonstration.total_epochs)
            report, small = demonstration.run()
        _write(out, report, small)
    except PruneError as error:
        fail(error)
    _show(report, macs)
    console.print(f"\n{time.perf_counter() - start:.0f} s. Written to {out}/: small.safetensors, "
                  "report.html, report.json, gates.png")  # fmt: skip


def _write(out: Path, report: Report, small: nn.Module) -> None:
    save(small, out / "small.safetensors")
    write_text(out / "report.json", report.to_json())
    write_text(out / "report.html", report.to_html())
    with replacing(out / "gates.png") as new:
        save_gate_histogram(report, new)


def _show(report: Report, budget: float) -> None:
    results = report.results
    table = Table(title=f"Before and after removal (budget: {budget:.0%} of the MACs)")
    for column in ("", "accuracy", "MACs", "params"):
        table.add_column(column, justify="left" if not column else "right")
    whole = report.before
    for row in results["table"]:
        table.add_row(
            row["stage"],
            f"{row['accuracy']:.2%}",
            f"{row['macs']:,} ({row['macs'] / whole['macs']:.2%})",
            f"{row['params']:,} ({row['params'] / whole['params']:.2%})",
        )
    console.print(table)
    same = "the same" if results["identical_predictions"] else "NOT THE SAME"
    times = results["latency_ms"]
    console.print(
        f"predictions before and after removal: {same} on all {results['test_images']} test images"
        f"\nlargest difference of outputs: {results['largest_difference']:.1e} "
        f"(relative {max(report.proof.values()):.1e})"
        f"\nlatency of {times['batch']} images: {times['before']:.2f} ms before, "
        f"{times['after']:.2f} ms after (median of {times['runs']}, {results['machine']})"
    )


app.command()(commands.train)
app.command()(commands.sweep)
app.command("eval")(commands.evaluate)


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="a pruned model: of the zoo, of train, of save")],
    to: Annotated[Path, typer.Option(help="the file to write: " + ", ".join(FORMATS))],
    shape: Shapes,
    model: Annotated[
        str, typer.Option(help="package.module:callable that makes the whole model, if it is yours")
    ] = "",
) -> None:
    """Write a pruned model for where it runs: ONNX, or a program of torch.export; compared."""
    try:
        if not model and read_card(file).get("network") not in NETWORKS:
            raise PruneError(
                f"{file}: it is of no network known here: say what makes it (--model)."
            )
        small = load(file, model=_made(model)) if model else rebuilt(file)[0]
        apart, any_size = deploy(small, _inputs(shape), to)
    except PruneError as error:
        fail(error)
    batch = "batches of any size" if any_size else "batches of this size only"
    console.print(f"{to}: {to.stat().st_size / 2**20:.1f} MiB, {batch}; outputs differ from the "
                  f"model's by {apart:.1e} of the largest", markup=False, highlight=False,
                  soft_wrap=True)  # fmt: skip


@app.command()
def inspect(
    model: Maker,
    shape: Shapes,
    keep: Annotated[list[str] | None, typer.Option(help="module names to leave whole")] = None,
) -> None:
    """Show the groups of a model: what can be pruned, what cannot and why, what it costs."""
    try:
        console.print(str(trace(_made(model), _inputs(shape), keep=keep or ())), soft_wrap=True,
                      markup=False)  # fmt: skip
    except (PruneError, ImportError, AttributeError, ValueError) as error:
        fail(error)


def _made(model: str) -> nn.Module:
    sys.path.insert(0, "")
    path, _, name = model.partition(":")
    if not path or not name:
        raise PruneError(f"{model}: give package.module:callable, as torchvision.models:resnet18.")
    try:
        made: nn.Module = getattr(importlib.import_module(path), name)()
    except Exception as error:  # whatever the user's code does
        raise PruneError(f"{model}: it could not be made: {error!r}.") from error
    return made


def _inputs(shapes: list[str]) -> tuple[torch.Tensor, ...]:
    return tuple(_input(text) for text in shapes)


def _input(text: str) -> torch.Tensor:
    """Random numbers; of `1,16:int64` zeros and ones, which may be indices."""
    sizes, _, kind = text.partition(":")
    dtype = getattr(torch, kind or "float32", None)
    try:
        shape = [int(n) for n in sizes.split(",")]
        if min(shape) < 1 or not isinstance(dtype, torch.dtype):
            raise ValueError(text)
        whole = not dtype.is_floating_point
        return torch.randint(0, 2, shape).to(dtype) if whole else torch.randn(shape, dtype=dtype)
    except (ValueError, RuntimeError) as error:
        raise PruneError(
            f"--shape {text}: give sizes, as 1,3,224,224, or with a type, as 1,16:int64."
        ) from error


@app.command()
def bench(
    model: Maker,
    shape: Shapes,
    small: Annotated[list[Path] | None, typer.Option(help="pruned file of it, beside it")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    threads: Annotated[int, typer.Option(help="on the CPU; 0: as torch has it")] = 0,
    runs: Annotated[int, typer.Option(help="of each model, in turn")] = 60,
) -> None:
    """Measure how long a model takes, and pruned ones beside it."""
    try:
        device = device_of(device)
        if not 0 <= threads <= (os.cpu_count() or 1):
            raise PruneError(f"--threads {threads}: a number from 0 to {os.cpu_count()}.")
        torch.set_num_threads(threads or torch.get_num_threads())
        if runs < 1:
            raise PruneError(f"--runs {runs}: at least one.")
        models = {model.rpartition(":")[2]: _made(model).to(device)}
        names = [file.name for file in small or []]
        for file in small or []:
            alone = names.count(file.name) == 1
            models[file.name if alone else str(file)] = load(file, model=_made(model)).to(device)
        inputs = tuple(x.to(device) for x in _inputs(shape))
        try:
            found = side_by_side(models, inputs, runs=runs)
        except Exception as error:  # of the user's model
            raise PruneError(f"{model}: it does not run on --shape {shape}: {error!r}.") from error
    except PruneError as error:
        fail(error)
    _show_times(found)
    where = environment()["machine"]
    used = f", {torch.get_num_threads()} threads" if device == "cpu" else ""
    console.print(f"median of {runs} runs, batch of {next(iter(found.values())).batch}; "
                  f"{where}{used}, torch {torch.__version__}", markup=False)  # fmt: skip


def _show_times(found: dict[str, Timing]) -> None:
    table = Table(box=None, padding=(0, 1))
    for column in ("model", "ms", "a second", "MACs", "params", "faster"):
        long = column == "model"  # it may be
        table.add_column(column, justify="left" if long else "right", no_wrap=not long,
                         overflow="fold")  # fmt: skip
    first = next(iter(found.values()))
    for name, one in found.items():
        table.add_row(
            name, f"{one.median:.2f}", f"{one.throughput:,.0f}",
            f"{one.macs / 1e6:,.1f} M ({one.macs / max(first.macs, 1):.1%})",
            f"{one.params / 1e6:,.2f} M ({one.params / max(first.params, 1):.1%})",
            f"{first.median / one.median:.2f} ×",
        )  # fmt: skip
    console.print(table)


@app.command()
def report(
    file: Annotated[Path, typer.Argument(help="report.json of a run")],
    html: Annotated[Path | None, typer.Option(help="write the page there")] = None,
) -> None:
    """Print the report of a run, or write it as a page."""
    try:
        found = Report.from_json(file.read_text(encoding="utf-8"))
        text = found.to_html() if html else str(found)
        if html:
            write_text(html, text)
    except PruneError as error:
        fail(error)
    except Exception as error:  # whatever may be in a file
        fail(PruneError(f"{file}: not the report.json of a run ({error!r}). Give that file."))
    if not html:
        console.print(text, soft_wrap=True, markup=False)
