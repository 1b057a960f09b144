"""`polarprune train`, `sweep` and `eval`: the commands of the experiments.

`lazy` imports this module when one of them is called, or when `export` rebuilds a network.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..errors import PruneError
from ..experiments.data.table import FORMS as DATA_FORMS
from ..experiments.data.table import kind_of, open_data
from ..experiments.data.task import Task
from ..experiments.methods.table import ALL_METHODS, check
from ..experiments.presets import PRESETS, own_settings, preset
from ..experiments.processes import process_group, rank_and_count
from ..experiments.runs.files import read_json, write_json
from ..experiments.runs.prune import prune
from ..experiments.runs.pruned_file import COST_NUMBERS, rebuild
from ..experiments.runs.run import Run
from ..experiments.runs.start import check_network
from ..experiments.settings import Settings
from ..factories import FORMS
from ..files.writing import replacing
from ..report.plots import save_curve
from .arguments import AsJson, ModelOption
from .console import bar, console, device_of, fail, line, say, say_json, texts_on_stderr

app = typer.Typer(add_completion=False)
Network = Annotated[str, typer.Argument(help=f"a preset ({', '.join(PRESETS)}), or {FORMS}")]
DataName = Annotated[str, typer.Option(help=", ".join(DATA_FORMS))]
MethodName = Annotated[str, typer.Option(help="gdp is ours; to compare: " + ", ".join(ALL_METHODS))]
Baseline = Annotated[
    Path | None, typer.Option(help="weights of the original network; trained and written if absent")
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="change a setting of the preset: epochs=100")
]
Seed = Annotated[int | None, typer.Option(help="seed of all random numbers")]
HoldOut = Annotated[
    int, typer.Option(help="score on this many training images instead of the test set")
]
Device = Annotated[str, typer.Option(help="cpu or cuda; by default cuda if torch finds a GPU")]


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
        Path | None, typer.Option(help="initial weights of a baseline, where names agree")
    ] = None,
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
        if given:
            check(method, given)
        wanted, found = _prepared(network, data, change, seed, hold_out)
        if dry_run < 0:
            raise PruneError(f"--dry-run {dry_run}: give a number of steps.")
        with texts_on_stderr(as_json), _progress(device) as (here, show):
            run = Run(wanted, found, out, device=here, progress=show)
            if dry_run:
                _rehearse(run, dry_run, given, baseline or out / "baseline.safetensors")
                return
            card = _pruned(run, method, given, hold_out, baseline, start)
    except PruneError as error:
        fail(error)
    if as_json and rank_and_count()[0] == 0:
        say_json(card)
    elif card is not None:
        _show_card(card, found, out)


def _show_card(card: dict[str, Any], task: Task, out: Path) -> None:
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


def _prepared(
    network: str, data: str, change: list[str] | None, seed: int | None, hold_out: int
) -> tuple[Settings, Task]:
    """Return the settings of a preset with its changes, and the data that it is for."""
    own = {} if seed is None else {"seed": seed}
    changes = {**_changes(change or []), **own}
    if ":" in network:
        wanted = own_settings(network, kind_of(data), **changes)
    else:
        wanted = preset(network, **changes)
    found = open_data(data, wanted)
    if not 0 <= hold_out < found.counts[0]:
        raise PruneError(
            f"--hold-out {hold_out}: give a number from 0 to {found.counts[0] - 1:,}, less than "
            f"the number of training examples."
        )
    return wanted, found.held_out(hold_out) if hold_out else found


def _changes(given: list[str]) -> dict[str, Any]:
    """Parse key=value pairs; `schedule.done=0.4` changes the schedule of the recipe."""
    found: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise PruneError(f"--set {text}: give name=value, as --set epochs=100.")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


@contextmanager
def _progress(device: str) -> Iterator[tuple[str, Callable[[dict[str, Any]], None]]]:
    """Give the device of this process, and a function that shows a row of the log."""
    with process_group(device_of(device)) as here, bar() as shown:
        console.quiet = rank_and_count()[0] > 0
        task = shown.add_task("starting", total=None, info="", visible=False)

        def show(row: dict[str, Any]) -> None:
            done, total, text = row["epoch"], row["epochs"], line(row)
            shown.update(task, completed=done, total=total, visible=True)
            shown.update(task, description=row["stage"], info=text)
            if not console.is_terminal:  # a log file shows no bar
                say(f"{row['stage']} {done}/{total}  {text}")

        yield here, show


def _pruned(
    run: Run,
    method: str,
    given: dict[str, float],
    hold_out: int,
    baseline: Path | None,
    start: Path | None = None,
) -> dict[str, Any] | None:
    """Return the card of a run, which may be finished already; None without a budget."""
    run.claim({"method": method, "budget": given, "hold_out": hold_out})
    done = run.finished() if given else None
    if done is not None:
        return done
    run.check(given, baseline)
    model = run.baseline(baseline, start)
    if given:
        return prune(run, model, method, **given)
    console.print(f"baseline: {run.data.shown(run.score(model))}", markup=False)
    return None


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


# --- sweep ----------------------------------------------------------------------------------------


@app.command()
def sweep(
    network: Network,
    data: DataName,
    macs: Annotated[list[float], typer.Option(help="a budget, as in train; repeat the option")],
    method: MethodName = "gdp",
    out: Annotated[Path, typer.Option(help="folder for a run of each budget, and the curve")] = (
        Path("runs/sweep")
    ),
    baseline: Baseline = None,
    change: Changes = None,
    seed: Seed = None,
    hold_out: HoldOut = 0,
    device: Device = "",
) -> None:
    """Prune one network to several budgets, and score the small network at each of them."""
    try:
        for share in macs:
            check(method, {"macs": share})
        wanted, found = _prepared(network, data, change, seed, hold_out)
        with _progress(device) as (here, show):
            first = Run(wanted, found, out, device=here, progress=show)
            first.claim({"method": method, "budget": {}, "hold_out": hold_out})
            first.check({"macs": min(macs)}, baseline)
            first.baseline(baseline)
            trained = baseline or out / "baseline.safetensors"
            for share in sorted(set(macs)):
                run = Run(wanted, found, out / f"macs-{share}", device=here, progress=show)
                _pruned(run, method, {"macs": share}, hold_out, trained)
            rows = _write_curve(out, found.measure)
    except PruneError as error:
        fail(error)
    _show_curve(rows, found)
    console.print(
        f"Written to {out}/: sweep.json, sweep.png, and a folder for each budget", markup=False
    )


def _write_curve(out: Path, measure: str) -> list[dict[str, float]]:
    """Collect the cards of all runs in the folder; the first process writes table and picture."""
    cards = [read_json(file) for file in out.glob("macs-*/card.json")]
    rows = sorted((_point(card) for card in cards), key=lambda row: -row["budget"])
    if rank_and_count()[0] == 0:
        write_json(out / "sweep.json", rows)
        with replacing(out / "sweep.png") as new:
            save_curve(rows, measure, new)
    return rows


def _point(card: dict[str, Any]) -> dict[str, float]:
    """Return one point of the curve; costs are fractions of the original."""
    first, last = card["table"][0], card["table"][-1]
    return {
        "budget": card["budget"]["macs"],
        "macs": card["macs_share"],
        "params": card["params_share"],
        "score": last[card["measure"]],
        "baseline": first[card["measure"]],
    }


def _show_curve(rows: list[dict[str, float]], task: Task) -> None:
    table = Table(box=None, padding=(0, 1))
    for column in ("budget", "MACs", "params", task.measure, "baseline"):
        table.add_column(column, justify="right")
    for row in rows:
        scores = (task.shown(row[key]) for key in ("score", "baseline"))
        table.add_row(f"{row['budget']:.2%}", f"{row['macs']:.2%}", f"{row['params']:.2%}", *scores)
    console.print(table)


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
        f"{task.measure} {task.shown(score)} on {task.counts[1]:,} images in "
        f"{seconds:.0f} s (its card: {_stated_score(card, task)})",
        markup=False,
    )


def _data_settings(card: dict[str, Any]) -> Settings:
    """Return what a card says about the data that its network is for."""
    recipe = card.get("recipe")
    told = recipe if isinstance(recipe, dict) else {}
    crop = told.get("crop", 0)
    return Settings(card["network"], told.get("data", "cifar10"), crop=crop)


def _stated_score(card: dict[str, Any], task: Task) -> str:
    """Return the score that a card states."""
    stated = card.get(task.measure)
    return task.shown(stated) if isinstance(stated, (int, float)) else "no score"
