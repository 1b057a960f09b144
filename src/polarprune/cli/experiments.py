"""`polarprune train`, `sweep` and `eval`."""

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
from ..experiments import methods
from ..experiments.kinds import KINDS, open_data
from ..experiments.processes import joined, rank_and_count
from ..experiments.recipes import RECIPES, Recipe, recipe
from ..experiments.run import Run, read_json, rebuilt, write_json
from ..experiments.task import Task
from ..files.writing import replacing
from ..report.plots import save_curve
from .console import bar, console, device_of, fail, line

Network = Annotated[str, typer.Argument(help="a recipe: " + ", ".join(RECIPES))]
DataName = Annotated[str, typer.Option(help=", ".join(f"{kind}:DIR" for kind in KINDS))]
MethodName = Annotated[
    str, typer.Option(help="gdp is ours; to compare: " + ", ".join(methods.EVERY))
]
Baseline = Annotated[
    Path | None, typer.Option(help="weights of the whole network; trained and written there")
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="another number in the recipe: epochs=100")
]
Seed = Annotated[int | None, typer.Option(help="of all random numbers")]
HoldOut = Annotated[
    int, typer.Option(help="score on so many training images instead of the test set")
]
Device = Annotated[str, typer.Option(help="cpu or cuda; whatever is there")]


def train(
    network: Network,
    data: DataName,
    macs: Annotated[float | None, typer.Option(help="budget, as a fraction of the MACs")] = None,
    params: Annotated[float | None, typer.Option(help="the same for parameters")] = None,
    lam: Annotated[
        float | None,
        typer.Option(help="the paper's λ instead of a budget; leaves the ratio open"),
    ] = None,
    method: MethodName = "gdp",
    out: Annotated[Path, typer.Option(help="folder for models, log and report")] = Path(
        "runs/train"
    ),
    baseline: Baseline = None,
    start: Annotated[
        Path | None, typer.Option(help="weights that a baseline begins with, where names agree")
    ] = None,
    change: Changes = None,
    seed: Seed = None,
    hold_out: HoldOut = 0,
    dry_run: Annotated[
        int, typer.Option(help="only so many steps: prints time, memory and path of the cost")
    ] = 0,
    device: Device = "",
) -> None:
    """Train a network, prune it to a budget while it trains on, and score what is left."""
    limits = {"macs": macs, "params": params, "lam": lam}
    given = {key: limit for key, limit in limits.items() if limit is not None}
    try:
        if given:
            methods.check(method, given)
        wanted, found = _prepared(network, data, change, seed, hold_out)
        if dry_run < 0:
            raise PruneError(f"--dry-run {dry_run}: give a number of steps.")
        with _shown(device) as (here, show):
            run = Run(wanted, found, out, device=here, progress=show)
            if dry_run:
                trained = (baseline or out / "baseline.safetensors").exists()
                goal = given or {"macs": 0.5}
                _rehearsed(run.rehearse(dry_run, trained=trained, **goal), goal)
                return
            card = _pruned(run, method, given, hold_out, baseline, start)
    except PruneError as error:
        fail(error)
    if card is None:
        return
    for row in card["table"]:
        score = found.shown(row[found.measure])
        console.print(f"{row['stage']:>16}  {score}  {row['macs']:,} MACs  "
                      f"{row['params']:,} params", markup=False, highlight=False)  # fmt: skip
    console.print(f"{card['macs_share']:.2%} of the MACs, {card['params_share']:.2%} of the params."
                  f" Written to {out}/", markup=False)  # fmt: skip


def _prepared(
    network: str, data: str, change: list[str] | None, seed: int | None, hold_out: int
) -> tuple[Recipe, Task]:
    """The recipe with its changes, and the data it is for."""
    own = {} if seed is None else {"seed": seed}
    wanted = recipe(network, **{**_changes(change or []), **own})
    found = open_data(data, wanted)
    if not 0 <= hold_out < found.counts[0]:
        raise PruneError(
            f"--hold-out {hold_out}: give a number from 0 on, less than the {found.counts[0]:,} "
            f"examples there are to learn from."
        )
    return wanted, found.held_out(hold_out) if hold_out else found


@contextmanager
def _shown(device: str) -> Iterator[tuple[str, Callable[[dict[str, Any]], None]]]:
    """The device of this process, and what shows a row of a log."""
    with joined(device_of(device)) as here, bar() as shown:
        console.quiet = rank_and_count()[0] > 0
        task = shown.add_task("starting", total=None, info="", visible=False)

        def show(row: dict[str, Any]) -> None:
            shown.update(task, completed=row["epoch"], total=row["epochs"], visible=True,
                       description=row["stage"], info=line(row))  # fmt: skip
            if not console.is_terminal:  # a log: there is no bar to be seen
                console.print(f"{row['stage']} {row['epoch']}/{row['epochs']}  {line(row)}",
                              soft_wrap=True, highlight=False)  # fmt: skip

        yield here, show


def _pruned(
    run: Run,
    method: str,
    given: dict[str, float],
    hold_out: int,
    baseline: Path | None,
    start: Path | None = None,
) -> dict[str, Any] | None:
    """The card of a run, of now or of before; without a budget there is none, only a baseline."""
    run.claim({"method": method, "budget": given, "hold_out": hold_out})
    done = run.finished() if given else None
    if done is not None:
        return done
    run.check(given, baseline)
    model = run.baseline(baseline, start)
    if given:
        return methods.prune(run, model, method, **given)
    console.print(f"baseline: {run.data.shown(run.score(model))}", markup=False)
    return None


def _rehearsed(found: dict[str, Any], goal: dict[str, float]) -> None:
    told = ", ".join(f"{key} {value:g}" for key, value in goal.items())
    console.print(f"goal: {told}", markup=False, highlight=False)
    for stage, row in found["stages"].items():
        hours = row["seconds_a_step"] * row["steps"] / 3600
        memory = f", {row['memory'] / 2**30:.1f} GiB" if row["memory"] else ""
        console.print(f"{stage:>8}: {row['steps']:,} steps of {1000 * row['seconds_a_step']:.1f} "
                      f"ms, {hours:.2f} hours{memory}", markup=False, highlight=False)  # fmt: skip
    console.print(f"{found['channels']:,} channels may go", markup=False, highlight=False)
    for key, shares in found["path"].items():
        path = "  ".join(f"{share:.0%}" for share in shares)
        console.print(f"{key} left after each tenth of the epochs: {path}", markup=False,
                      highlight=False)  # fmt: skip
    if "lam" in goal:
        console.print("with lam= what is left is not known in advance", markup=False)


def _changes(given: list[str]) -> dict[str, Any]:
    """key=value, as the recipe has them; `schedule.done=0.4` reaches into its schedule."""
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


def sweep(
    network: Network,
    data: DataName,
    macs: Annotated[list[float], typer.Option(help="a budget, as in train; several times")],
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
    """Prune one network to several budgets: what is left of its score at each of them."""
    try:
        for share in macs:
            methods.check(method, {"macs": share})
        wanted, found = _prepared(network, data, change, seed, hold_out)
        with _shown(device) as (here, show):
            first = Run(wanted, found, out, device=here, progress=show)
            first.claim({"method": method, "budget": {}, "hold_out": hold_out})
            first.check({"macs": min(macs)}, baseline)
            first.baseline(baseline)
            trained = baseline or out / "baseline.safetensors"
            for share in sorted(set(macs)):
                run = Run(wanted, found, out / f"macs-{share}", device=here, progress=show)
                _pruned(run, method, {"macs": share}, hold_out, trained)
            cards = [read_json(file) for file in out.glob("macs-*/card.json")]
            rows = sorted((_point(card) for card in cards), key=lambda row: -row["budget"])
            if rank_and_count()[0] == 0:
                write_json(out / "sweep.json", rows)
                with replacing(out / "sweep.png") as new:
                    save_curve(rows, found.measure, new)
    except PruneError as error:
        fail(error)
    table = Table(box=None, padding=(0, 1))
    for column in ("budget", "MACs", "params", found.measure, "baseline"):
        table.add_column(column, justify="right")
    for row in rows:
        scores = (found.shown(row[key]) for key in ("score", "baseline"))
        table.add_row(f"{row['budget']:.2%}", f"{row['macs']:.2%}", f"{row['params']:.2%}", *scores)
    console.print(table)
    console.print(f"Written to {out}/: sweep.json, sweep.png, and a folder for each budget",
                  markup=False)  # fmt: skip


def _point(card: dict[str, Any]) -> dict[str, float]:
    """Of a curve; costs are shares."""
    first, last = card["table"][0], card["table"][-1]
    return {
        "budget": card["budget"]["macs"],
        "macs": card["macs_share"],
        "params": card["params_share"],
        "score": last[card["measure"]],
        "baseline": first[card["measure"]],
    }


def evaluate(
    file: Annotated[Path, typer.Argument(help="a model of the zoo, or one that train wrote")],
    data: DataName,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
) -> None:
    """Rebuild a pruned network from its file and score it."""
    try:
        model, card = rebuilt(file)
        device = device_of(device)
        recipe = card.get("recipe")
        kind = recipe.get("data", "cifar10") if isinstance(recipe, dict) else "cifar10"
        task = open_data(data, Recipe(card["network"], kind)).to(device)
        start = time.perf_counter()
        found = task.score(task.answers(model.to(device)))
    except PruneError as error:
        fail(error)
    console.print(
        f"{file.name}: {card['network']}, {card['macs'] / 1e6:.2f} M MACs "
        f"({card['macs_share']:.2%}), {card['params'] / 1e6:.3f} M params "
        f"({card['params_share']:.2%})\n"
        f"{task.measure} {task.shown(found)} on {task.counts[1]:,} images in "
        f"{time.perf_counter() - start:.0f} s (its card: {_said(card, task)})",
        markup=False,
    )


def _said(card: dict[str, Any], task: Task) -> str:
    """The score that a card names."""
    said = card.get(task.measure)
    return task.shown(said) if isinstance(said, (int, float)) else "nothing"
