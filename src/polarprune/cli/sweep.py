"""`polarprune sweep`: one network, pruned to several budgets with several seeds."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from ..errors import PruneError
from ..experiments.data.task import Task
from ..experiments.methods.table import check
from ..experiments.runs.run import Run
from ..experiments.runs.sweep_results import collect, write_results
from ..experiments.runs.trials import Trial, prepare
from ..plain_data import JsonObject
from ..validation.optional_packages import optional_package
from .arguments import AsJson
from .console import console, fail, say, say_json, texts_on_stderr
from .run_options import (
    Baseline,
    Changes,
    DataName,
    Device,
    HoldOut,
    MethodName,
    Network,
    Seed,
    Uniform,
    parse_changes,
    shown_progress,
)
from .side_by_side import Address, Threads, UseRay, check_numbers, run_all, uses_ray


def sweep(
    network: Network,
    data: DataName,
    macs: Annotated[list[str], typer.Option(help="budgets, as in train: 0.7,0.5,0.3")],
    seeds: Annotated[int, typer.Option(help="trials of each budget, with seeds that differ")] = 1,
    method: MethodName = "gdp",
    out: Annotated[Path, typer.Option(help="folder for a run of each budget, and the curve")] = (
        Path("runs/sweep")
    ),
    baseline: Baseline = None,
    uniform: Uniform = False,
    change: Changes = None,
    seed: Seed = None,
    hold_out: HoldOut = 0,
    device: Device = "",
    threads: Threads = 0,
    ray: UseRay = None,
    address: Address = "",
    as_json: AsJson = False,
) -> None:
    """Prune one network to several budgets, and score the small network at each of them."""
    try:
        changes = parse_changes(change, seed, uniform)
        budgets = _budgets(macs, method, bool(changes.get("uniform")))
        check_numbers(seeds, threads)
        optional_package("matplotlib", needed_for="the picture of a sweep", extra="report")
        settings, found = prepare(network, data, changes, hold_out)
        weights = str(baseline or out / "baseline.safetensors")
        own = threads or torch.get_num_threads()
        common = (method, hold_out, weights, device, own, os.getcwd(), settings.tune_epochs)
        base = Trial(network, data, {**changes, "seed": settings.seed}, {}, str(out), *common)
        trials = _trials(base, budgets, seeds)
        on_ray = uses_ray(ray, address, trials)
        with (
            texts_on_stderr(as_json),
            shown_progress("cpu" if on_ray else device) as (here, show),
        ):
            first = Run(settings, found, out, device=here)
            first.claim({"method": method, "budget": {}, "hold_out": hold_out})
            first.check({"macs": min(budgets)}, baseline)
            run_all([[base], trials], on_ray, address, here, show)
            rows = collect(out, found)
            if first.writes:
                write_results(out, rows, found)
    except PruneError as error:
        fail(error)
    if as_json and first.writes:
        say_json(rows)
    elif not as_json:
        _show_results(rows, found, out)


def _budgets(given: list[str], method: str, uniform: bool) -> list[float]:
    """Return the budgets of `--macs 0.7,0.5 --macs 0.3`, smallest first."""
    found = set()
    for text in ",".join(given).split(","):
        try:
            found.add(float(text))
        except ValueError as error:
            raise PruneError(f"--macs {text}: give fractions, such as --macs 0.7,0.5.") from error
    for share in found:
        check(method, {"macs": share}, uniform)
    return sorted(found)


def _trials(base: Trial, budgets: list[float], seeds: int) -> list[Trial]:
    """Return a trial for each budget and seed; all start from one baseline."""
    trials = []
    for extra in range(seeds):
        seed = base.changes["seed"] + extra
        suffix = f"-seed-{seed}" if extra else ""
        trials += [
            replace(
                base,
                changes={**base.changes, "seed": seed},
                limits={"macs": share},
                out=str(Path(base.out, f"macs-{share}{suffix}")),
            )
            for share in budgets
        ]
    return trials


def _show_results(rows: list[JsonObject], task: Task, out: Path) -> None:
    table = Table(box=None, padding=(0, 1))
    for column in ("budget", "seed", "MACs", "params", task.measure, "baseline", "front"):
        table.add_column(column, justify="right")
    for row in rows:
        costs = (f"{row[key]:.2%}" for key in ("macs", "params"))
        scores = (task.shown(row[key]) for key in ("score", "baseline"))
        front = "*" if row["pareto"] else ""
        table.add_row(f"{row['budget']:.2%}", str(row["seed"]), *costs, *scores, front)
    console.print(table)
    say(f"Written to {out}/: sweep.json, sweep.md, sweep.png, and a folder for each trial")
