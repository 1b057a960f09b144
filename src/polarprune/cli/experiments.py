"""`polarprune train`, `sweep`, `referee` and `eval`: the commands of the experiments.

`lazy` imports this module when one of them is called, or when `export` rebuilds a network.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ..errors import PruneError
from ..experiments.data.table import open_data
from ..experiments.data.task import Task
from ..experiments.methods.table import check
from ..experiments.processes import rank_and_count
from ..experiments.runs.pruned_file import COST_NUMBERS, rebuild
from ..experiments.runs.run import Run
from ..experiments.runs.start import check_network
from ..experiments.runs.trials import prepare, run_to_end
from ..experiments.settings import Settings
from ..plain_data import JsonObject
from .arguments import AsJson, ModelOption
from .console import console, device_of, fail, say, say_json, texts_on_stderr
from .referee import referee
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
from .sweep import sweep

app = typer.Typer(add_completion=False)


# --- train ----------------------------------------------------------------------------------------


@app.command()
def train(
    network: Network,
    data: DataName,
    macs: Annotated[float | None, typer.Option(help="budget, as a fraction of the MACs")] = None,
    params: Annotated[
        float | None, typer.Option(help="budget, as a fraction of the parameters")
    ] = None,
    lam: Annotated[
        float | None,
        typer.Option(help="the paper's fixed λ instead of a budget; the ratio follows from it"),
    ] = None,
    method: MethodName = "gdp",
    out: Annotated[Path, typer.Option(help="folder for models, log and report")] = Path(
        "runs/train"
    ),
    baseline: Baseline = None,
    start: Annotated[
        Path | None,
        typer.Option(
            help="initial weights of a baseline, or of thin and reinit, where names agree"
        ),
    ] = None,
    shapes: Annotated[
        Path | None, typer.Option(help="for reinit: card.json of the run whose widths it has")
    ] = None,
    uniform: Uniform = False,
    change: Changes = None,
    seed: Seed = None,
    hold_out: HoldOut = 0,
    dry_run: Annotated[
        int, typer.Option(help="run this many steps; print time, memory and the planned cost")
    ] = 0,
    device: Device = "",
    as_json: AsJson = False,
) -> None:
    """Train a network, prune it to a budget while it trains, and score the small network."""
    limits = {"macs": macs, "params": params, "lam": lam}
    given = {key: limit for key, limit in limits.items() if limit is not None}
    try:
        changes = parse_changes(change, seed, uniform)
        if given:
            check(method, given, bool(changes.get("uniform")))
        wanted, found = prepare(network, data, changes, hold_out)
        if dry_run < 0:
            raise PruneError(f"--dry-run {dry_run}: give a number of steps.")
        with texts_on_stderr(as_json), shown_progress(device) as (here, show):
            run = Run(wanted, found, out, device=here, progress=show)
            if dry_run:
                _rehearse(run, dry_run, given, baseline or out / "baseline.safetensors")
                return
            card = run_to_end(run, method, given, hold_out, baseline, start, shapes)
    except PruneError as error:
        fail(error)
    if as_json and rank_and_count()[0] == 0:
        say_json(card)
    elif given:
        _show_card(card, found, out)
    else:
        console.print(f"baseline: {found.shown(card[found.measure])}", markup=False)


def _show_card(card: JsonObject, task: Task, out: Path) -> None:
    for row in card["table"]:
        say(
            f"{row['stage']:>16}  {task.shown(row[task.measure])}  {row['macs']:,} MACs  "
            f"{row['params']:,} params"
        )
    console.print(
        f"{card['macs_share']:.2%} of the MACs, {card['params_share']:.2%} of the params."
        f" Written to {out}/",
        markup=False,
    )


def _rehearse(run: Run, steps: int, given: dict[str, float], baseline: Path) -> None:
    """Run a few steps, and print what the complete run would take."""
    goal = given or {"macs": 0.5}
    found = run.rehearse(steps, trained=baseline.exists(), **goal)
    say("goal: " + ", ".join(f"{key} {value:g}" for key, value in goal.items()))
    for stage, row in found["stages"].items():
        hours = row["seconds_a_step"] * row["steps"] / 3600
        memory = f", {row['memory'] / 2**30:.1f} GiB" if row["memory"] else ""
        took = f"{1000 * row['seconds_a_step']:.1f} ms, {hours:.2f} hours"
        say(f"{stage:>8}: {row['steps']:,} steps of {took}{memory}")
    say(f"{found['channels']:,} channels are prunable")
    for key, shares in found["path"].items():
        path = "  ".join(f"{share:.0%}" for share in shares)
        say(f"{key} left after each tenth of the epochs: {path}")
    if "lam" in goal:
        say("with lam= the remaining cost is not known in advance")


app.command()(sweep)
app.command()(referee)


# --- eval -----------------------------------------------------------------------------------------


@app.command("eval")
def evaluate(
    file: Annotated[Path, typer.Argument(help="a model of the zoo, or one that train wrote")],
    data: DataName,
    model: ModelOption = "",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Rebuild a pruned network from its file and score it."""
    try:
        small, card = rebuild(file, model)
        device = device_of(device)
        task = open_data(data, _data_settings(card)).to(device)
        check_network(small.to(device), card["network"], task)
        start = time.perf_counter()
        score = task.score(task.answers(small))
    except PruneError as error:
        fail(error)
    seconds = time.perf_counter() - start
    if as_json:
        facts = {key: card[key] for key in ("network", *COST_NUMBERS)}
        measured = {"measure": task.measure, "score": score, "stated": card.get(task.measure)}
        say_json({**facts, **measured, "examples": task.counts[1], "seconds": seconds})
        return
    console.print(
        f"{file.name}: {card['network']}, {card['macs'] / 1e6:.2f} M MACs "
        f"({card['macs_share']:.2%}), {card['params'] / 1e6:.3f} M params "
        f"({card['params_share']:.2%})\n"
        f"{task.measure} {task.shown(score)} on {task.counts[1]:,} {task.unit} in "
        f"{seconds:.0f} s (its card: {_stated_score(card, task)})",
        markup=False,
    )


def _data_settings(card: JsonObject) -> Settings:
    """Return what a card says about the data that its network is for."""
    settings = card.get("recipe")
    told = settings if isinstance(settings, dict) else {}
    sizes = {key: told[key] for key in ("crop", "side", "context") if key in told}
    return Settings(card["network"], told.get("data", "cifar10"), **sizes)


def _stated_score(card: JsonObject, task: Task) -> str:
    """Return the score that a card states."""
    stated = card.get(task.measure)
    return task.shown(stated) if isinstance(stated, (int, float)) else "no score"
