"""The command line: `polarprune demo`, `inspect`, `train`, `sweep`, `eval`, `export`, `bench`,
`report`."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

from .bench import Timing, environment, side_by_side
from .checkpoint import load, read_card, save
from .demo import Demo, Settings
from .deploy import FORMATS, deploy
from .errors import PruneError
from .experiments import methods
from .experiments.kinds import KINDS, open_data
from .experiments.networks import NETWORKS
from .experiments.processes import joined, place
from .experiments.recipes import RECIPES, Recipe, recipe
from .experiments.run import Run, make_folder, rebuilt
from .experiments.task import Task
from .pictures import save_curve, save_gate_histogram
from .report import Report
from .settings import check_settings
from .trace import trace

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console(emoji=False)


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
        make_folder(out)
        if epochs < 1:
            raise PruneError(f"--epochs {epochs}: at least one.")
        check_settings({"macs": macs}, None, epochs)
        settings = Settings(budget=macs, epochs=epochs, seed=seed)
        with _bar() as bar:
            task = bar.add_task("starting", total=None, info="")

            def show(row: dict[str, Any]) -> None:
                bar.update(task, advance=1, description=row["stage"], info=_line(row))

            demonstration = Demo(settings, show)
            bar.update(task, total=demonstration.total_epochs)
            report, small = demonstration.run()
    except PruneError as error:
        _fail(error)
    _write(out, report, small)
    _show(report, macs)
    console.print(f"\n{time.perf_counter() - start:.0f} s. Written to {out}/: small.safetensors, "
                  "report.html, report.json, gates.png")  # fmt: skip


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description:>10}"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed:.0f}/{task.total} epochs"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[info]}"),
        console=console,
    )


def _line(row: dict[str, Any]) -> str:
    text = f"loss {row['loss']:.3f}"
    if "accuracy" in row:
        text += f"  accuracy {row['accuracy']:.1%}"
    if "macs" in row:
        text += (
            f"  MACs {row['macs']:.1%}  closed {row['closed']}  "
            f"ε {row['eps']:.0e}  λ {row['lam']:.1f}"
        )
    return text


def _write(out: Path, report: Report, small: nn.Module) -> None:
    out.mkdir(parents=True, exist_ok=True)
    save(small, out / "small.safetensors")
    (out / "report.json").write_text(report.to_json(), encoding="utf-8")
    (out / "report.html").write_text(report.to_html(), encoding="utf-8")
    save_gate_histogram(report, out / "gates.png")


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


@app.command()
def train(
    network: Annotated[str, typer.Argument(help="a recipe: " + ", ".join(RECIPES))],
    data: Annotated[str, typer.Option(help=", ".join(f"{kind}:DIR" for kind in KINDS))],
    macs: Annotated[float | None, typer.Option(help="budget, as a fraction of the MACs")] = None,
    params: Annotated[float | None, typer.Option(help="the same for parameters")] = None,
    lam: Annotated[
        float | None,
        typer.Option(help="the paper's λ instead of a budget; leaves the ratio open"),
    ] = None,
    method: Annotated[
        str, typer.Option(help="gdp is ours; to compare: " + ", ".join(methods.EVERY))
    ] = "gdp",
    out: Annotated[Path, typer.Option(help="folder for models, log and report")] = Path(
        "runs/train"
    ),
    baseline: Annotated[
        Path | None, typer.Option(help="weights of the whole network; trained and written there")
    ] = None,
    start: Annotated[
        Path | None, typer.Option(help="weights that a baseline begins with, where names agree")
    ] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="another number in the recipe: epochs=100")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="of all random numbers")] = None,
    hold_out: Annotated[
        int, typer.Option(help="score on so many training images instead of the test set")
    ] = 0,
    dry_run: Annotated[
        int, typer.Option(help="only so many steps: prints time, memory and path of the cost")
    ] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda; whatever is there")] = "",
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
                _rehearsed(run.rehearse(dry_run, **(given or {"macs": 0.5})))
                return
            card = _pruned(run, method, given, hold_out, baseline, start)
    except PruneError as error:
        _fail(error)
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
    with joined(_device(device)) as here, _bar() as bar:
        console.quiet = place()[0] > 0
        task = bar.add_task("starting", total=None, info="", visible=False)

        def show(row: dict[str, Any]) -> None:
            bar.update(task, completed=row["epoch"], total=row["epochs"], visible=True,
                       description=row["stage"], info=_line(row))  # fmt: skip
            if not console.is_terminal:  # a log: there is no bar to be seen
                console.print(f"{row['stage']} {row['epoch']}/{row['epochs']}  {_line(row)}",
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


def _rehearsed(found: dict[str, Any]) -> None:
    for stage, row in found["stages"].items():
        hours = row["seconds_a_step"] * row["steps"] / 3600
        memory = f", {row['memory'] / 2**30:.1f} GiB on the GPU" if row["memory"] else ""
        console.print(f"{stage:>8}: {row['steps']:,} steps of {1000 * row['seconds_a_step']:.1f} "
                      f"ms, {hours:.2f} hours{memory}", markup=False, highlight=False)  # fmt: skip
    console.print(f"{found['channels']:,} channels may go", markup=False, highlight=False)
    for key, shares in found["path"].items():
        path = "  ".join(f"{share:.0%}" for share in shares)
        console.print(f"{key} left after each tenth of the epochs: {path}", markup=False,
                      highlight=False)  # fmt: skip


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


@app.command()
def sweep(
    network: Annotated[str, typer.Argument(help="a recipe: " + ", ".join(RECIPES))],
    data: Annotated[str, typer.Option(help=", ".join(f"{kind}:DIR" for kind in KINDS))],
    macs: Annotated[list[float], typer.Option(help="a budget, as in train; several times")],
    method: Annotated[str, typer.Option(help="as in train")] = "gdp",
    out: Annotated[Path, typer.Option(help="folder for a run of each budget, and the curve")] = (
        Path("runs/sweep")
    ),
    baseline: Annotated[
        Path | None, typer.Option(help="weights of the whole network; trained and written there")
    ] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="another number in the recipe: epochs=100")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="of all random numbers")] = None,
    hold_out: Annotated[
        int, typer.Option(help="score on so many training images instead of the test set")
    ] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda; whatever is there")] = "",
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
            whole = baseline or out / "baseline.safetensors"
            for share in sorted(set(macs)):
                run = Run(wanted, found, out / f"macs-{share}", device=here, progress=show)
                _pruned(run, method, {"macs": share}, hold_out, whole)
    except PruneError as error:
        _fail(error)
    cards = [json.loads(file.read_text("utf-8")) for file in out.glob("macs-*/card.json")]
    rows = sorted((_point(card) for card in cards), key=lambda row: -row["budget"])
    if place()[0] == 0:
        (out / "sweep.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        save_curve(rows, found.measure, out / "sweep.png")
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


@app.command("eval")
def evaluate(
    file: Annotated[Path, typer.Argument(help="a model of the zoo, or one that train wrote")],
    data: Annotated[str, typer.Option(help=", ".join(f"{kind}:DIR" for kind in KINDS))],
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
) -> None:
    """Rebuild a pruned network from its file and score it."""
    try:
        model, card = rebuilt(file)
        device = _device(device)
        kind = card.get("recipe", {}).get("data", "cifar10")
        task = open_data(data, Recipe(card["network"], kind)).to(device)
        start = time.perf_counter()
        found = task.score(task.answers(model.to(device)))
    except PruneError as error:
        _fail(error)
    console.print(
        f"{file.name}: {card['network']}, {card['macs'] / 1e6:.2f} M MACs "
        f"({card['macs_share']:.2%}), {card['params'] / 1e6:.3f} M params "
        f"({card['params_share']:.2%})\n"
        f"{task.measure} {task.shown(found)} on {task.counts[1]:,} images in "
        f"{time.perf_counter() - start:.0f} s (its card: {task.shown(card[task.measure])})",
        markup=False,
    )


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="a pruned model: of the zoo, of train, of save")],
    to: Annotated[Path, typer.Option(help="the file to write: " + ", ".join(FORMATS))],
    shape: Annotated[list[str], typer.Option(help="shape of an input, as 1,3,32,32 or 1,16:int64")],
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
        _fail(error)
    batch = "batches of any size" if any_size else "batches of this size only"
    console.print(f"{to}: {to.stat().st_size / 2**20:.1f} MiB, {batch}; outputs differ from the "
                  f"model's by {apart:.1e} of the largest", markup=False, highlight=False,
                  soft_wrap=True)  # fmt: skip


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="package.module:callable that makes the model")],
    shape: Annotated[
        list[str], typer.Option(help="shape of an input, as 1,3,224,224 or 1,16:int64")
    ],
    keep: Annotated[list[str] | None, typer.Option(help="module names to leave whole")] = None,
) -> None:
    """Show the groups of a model: what can be pruned, what cannot and why, what it costs."""
    try:
        console.print(str(trace(_made(model), _inputs(shape), keep=keep or ())), soft_wrap=True,
                      markup=False)  # fmt: skip
    except (PruneError, ImportError, AttributeError, ValueError) as error:
        _fail(error)


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


def _device(name: str) -> str:
    if not re.fullmatch(r"|cpu|cuda(:\d+)?", name):
        raise PruneError(f"--device {name}: give cpu or cuda.")
    gpu = torch.cuda.is_available()
    if name.startswith("cuda") and not gpu:
        raise PruneError(f"--device {name}: there is no GPU that torch can use here.")
    return name or ("cuda" if gpu else "cpu")


@app.command()
def bench(
    model: Annotated[str, typer.Argument(help="package.module:callable that makes the model")],
    shape: Annotated[
        list[str], typer.Option(help="shape of an input, as 1,3,224,224 or 1,16:int64")
    ],
    small: Annotated[list[Path] | None, typer.Option(help="pruned file of it, beside it")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    threads: Annotated[int, typer.Option(help="on the CPU; 0: as torch has it")] = 0,
    runs: Annotated[int, typer.Option(help="of each model, in turn")] = 60,
) -> None:
    """Measure how long a model takes, and pruned ones beside it."""
    try:
        device = _device(device)
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
        _fail(error)
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
    except PruneError as error:
        _fail(error)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        _fail(PruneError(f"{file}: not the report.json of a run ({error})."))
    if html:
        try:
            html.write_text(found.to_html(), encoding="utf-8")
        except OSError as error:
            _fail(PruneError(f"--html {html}: it cannot be written: {error}."))
    else:
        console.print(str(found), soft_wrap=True, markup=False)


def _fail(error: Exception) -> None:
    console = Console(stderr=True, emoji=False)
    console.print(f"{type(error).__name__}: {error}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(1)
