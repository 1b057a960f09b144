"""`polarprune demo` and `report`: a short pruning run, and the report of any run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from torch import nn

from ..errors import PruneError
from ..files.model_file import save
from ..files.writing import make_folder, replacing, write_text
from ..plain_data import JsonObject
from ..report.plots import save_gate_histogram
from ..report.report import Report
from ..validation.arguments import check_settings
from .arguments import AsJson
from .console import bar, console, fail, line
from .demo import Demo, Settings

_DEMO_FOLDER = Path("runs/demo")


def demo(
    out: Annotated[Path, typer.Option(help="folder for the model and the report")] = _DEMO_FOLDER,
    macs: Annotated[float, typer.Option(help="budget, as a fraction of the MACs")] = 0.5,
    epochs: Annotated[int, typer.Option(help="epochs of training with gates")] = Settings.epochs,
    seed: Annotated[int, typer.Option(help="seed of all random numbers")] = 0,
) -> None:
    """Prune a small residual network on handwritten digits while it trains."""
    start = time.perf_counter()
    try:
        if epochs < 1:
            raise PruneError(f"--epochs {epochs}: give at least 1.")
        check_settings({"macs": macs}, None, epochs)
        make_folder(out)
        report, small = _run_demo(Settings(budget=macs, epochs=epochs, seed=seed))
        _write_demo(out, report, small)
    except PruneError as error:
        fail(error)
    _show_demo(report, macs)
    console.print(
        f"\n{time.perf_counter() - start:.0f} s. Written to {out}/: small.safetensors, "
        "report.html, report.json, gates.png"
    )


def _run_demo(settings: Settings) -> tuple[Report, nn.Module]:
    """Run the demonstration under a progress bar."""
    with bar() as shown:
        task = shown.add_task("starting", total=None, info="")

        def show(row: JsonObject) -> None:
            shown.update(task, advance=1, description=row["stage"], info=line(row))

        demonstration = Demo(settings, show)
        shown.update(task, total=demonstration.total_epochs)
        return demonstration.run()


def _write_demo(out: Path, report: Report, small: nn.Module) -> None:
    save(small, out / "small.safetensors")
    write_text(out / "report.json", report.to_json())
    write_text(out / "report.html", report.to_html())
    with replacing(out / "gates.png") as new:
        save_gate_histogram(report, new)


def _show_demo(report: Report, budget: float) -> None:
    results = report.results
    console.print(_stages(report, f"Before and after removal (budget: {budget:.0%} of the MACs)"))
    same = "the same" if results["identical_predictions"] else "NOT THE SAME"
    times = results["latency_ms"]
    console.print(
        f"predictions before and after removal: {same} on all {results['test_images']} test images"
        f"\nlargest difference of outputs: {results['largest_difference']:.1e} "
        f"(relative {max(report.proof.values()):.1e})"
        f"\nlatency of {times['batch']} images: {times['before']:.2f} ms before, "
        f"{times['after']:.2f} ms after (median of {times['runs']}, {results['machine']})"
    )


def _stages(report: Report, title: str) -> Table:
    table = Table(title=title)
    for column in ("", "accuracy", "MACs", "params"):
        table.add_column(column, justify="left" if not column else "right")
    original = report.before
    for row in report.results["table"]:
        table.add_row(
            row["stage"],
            f"{row['accuracy']:.2%}",
            f"{row['macs']:,} ({row['macs'] / original['macs']:.2%})",
            f"{row['params']:,} ({row['params'] / original['params']:.2%})",
        )
    return table


def report(
    file: Annotated[Path, typer.Argument(help="the report.json of a run")],
    html: Annotated[Path | None, typer.Option(help="write an HTML page to this file")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the report of a run, or write it as an HTML page."""
    try:
        found = Report.from_json(file.read_text(encoding="utf-8"))
        if html:
            write_text(html, found.to_html())
    except PruneError as error:
        fail(error)
    except Exception as error:  # the file may hold anything
        fail(PruneError(f"{file}: not the report.json of a run ({error!r}). Give that file."))
    if as_json:
        typer.echo(found.to_json())
    elif not html:
        console.print(str(found), soft_wrap=True, markup=False)
