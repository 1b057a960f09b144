"""`polarprune referee`: was pruning worth it, compared with a thin network and other methods?"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..errors import PruneError
from ..experiments.data.task import Task
from ..experiments.methods.from_scratch import FROM_SCRATCH
from ..experiments.methods.table import check
from ..experiments.runs.referee import (
    CONTROLS,
    EQUALS,
    OURS,
    Entry,
    control_trial,
    entries,
    obstacle,
    trial_of,
)
from ..experiments.runs.referee_results import (
    HEAD,
    NOTES,
    cells,
    collect,
    original,
    read_cards,
    verdict,
    write_results,
)
from ..experiments.runs.run import Run
from ..experiments.runs.trials import Trial, prepare
from ..experiments.settings import Settings
from ..plain_data import JsonObject
from ..validation.optional_packages import optional_package
from .arguments import AsJson
from .console import fail, say, say_json, texts_on_stderr
from .run_options import (
    Baseline,
    Changes,
    DataName,
    Device,
    HoldOut,
    Network,
    Seed,
    parse_changes,
    shown_progress,
)
from .side_by_side import Address, Threads, UseRay, check_numbers, run_all, uses_ray

_TORCH_PRUNING = "torch-pruning"


def referee(
    network: Network,
    data: DataName,
    macs: Annotated[float, typer.Option(help="budget, as a fraction of the MACs")] = 0.5,
    seeds: Annotated[int, typer.Option(help="runs of each method; at least 2 for intervals")] = 3,
    methods: Annotated[
        str,
        typer.Option(
            help=f"what our method is compared with, of {', '.join(CONTROLS)}; by default thin, "
            f"magnitude and, where it is installed, torch-pruning"
        ),
    ] = "",
    equal: Annotated[
        str, typer.Option(help="what is made equal: the cost of the training, the epochs, or both")
    ] = ",".join(EQUALS),
    out: Annotated[Path, typer.Option(help="folder for a run of each method, and the verdict")] = (
        Path("runs/referee")
    ),
    baseline: Baseline = None,
    start: Annotated[
        Path | None, typer.Option(help="initial weights of the baseline, where names agree")
    ] = None,
    change: Changes = None,
    seed: Seed = None,
    hold_out: HoldOut = 0,
    device: Device = "",
    threads: Threads = 0,
    ray: UseRay = None,
    address: Address = "",
    as_json: AsJson = False,
) -> None:
    """Say whether pruning is worth it: compare it with a thin network and other methods."""
    try:
        check(OURS, {"macs": macs})
        check_numbers(seeds, threads)
        compared = entries(_given(methods) or _usual(), _given(equal))
        optional_package("matplotlib", needed_for="the picture of a referee", extra="report")
        changes = parse_changes(change, seed)
        settings, task = prepare(network, data, changes, hold_out)
        _check_epochs(settings, compared)
        weights = str(baseline or out / "baseline.safetensors")
        own = threads or torch.get_num_threads()
        common = (OURS, hold_out, weights, device, own, os.getcwd(), settings.tune_epochs)
        changes = {**changes, "seed": settings.seed}
        base = Trial(network, data, changes, {}, str(out), *common, start=str(start or ""))
        run_of = _Comparison(base, {"macs": macs}, seeds, settings)
        on_ray = uses_ray(ray, address, run_of.all_of(compared))
        with (
            texts_on_stderr(as_json),
            shown_progress("cpu" if on_ray else device) as (here, show),
        ):
            first = Run(settings, task, out, device=here)
            first.claim({"method": OURS, "budget": {}, "hold_out": hold_out})
            first.check({"macs": macs}, baseline)
            compared, skipped = _possible(first, compared, run_of)
            run_all([[base], run_of.ours()], on_ray, address, here, show)
            run_all([run_of.controls(compared)], on_ray, address, here, show)
            rows = collect(read_cards(out, compared, run_of.seeds), task)
            judged = {"rows": rows, "verdict": verdict(rows, task), "skipped": skipped}
            facts = {"network": network, "budget": {"macs": macs}, "measure": task.measure}
            results = {**facts, **judged}
            if first.writes:
                write_results(out, results, task)
    except PruneError as error:
        fail(error)
    if as_json and first.writes:
        say_json(results)
    elif not as_json:
        _show(results, task, out)


def _given(text: str) -> list[str]:
    """Return the parts of a list with commas, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _usual() -> list[str]:
    """Return the controls that are always compared, and Torch-Pruning where it is installed."""
    installed = importlib.util.find_spec("torch_pruning") is not None
    return ["thin", "magnitude", *[_TORCH_PRUNING] * installed]


def _check_epochs(settings: Settings, compared: list[Entry]) -> None:
    """Refuse a training that is too short to be split into two."""
    pruned = [one.method for one in compared if one.method not in (OURS, *FROM_SCRATCH)]
    if pruned and settings.epochs + settings.tune_epochs < 2:
        raise PruneError(
            f"epochs={settings.epochs}: {pruned[0]} prunes, then it is fine-tuned, which takes at "
            f"least 2 epochs. Give --set epochs=2 or more."
        )


class _Comparison:
    """The trials of a comparison.

    Args:
        base: What all trials have in common; without a budget, so that it trains the baseline.
        limits: The budget.
        seeds: The number of seeds.
        settings: The settings of our method.
    """

    def __init__(
        self, base: Trial, limits: dict[str, float], seeds: int, settings: Settings
    ) -> None:
        self.base, self.settings = replace(base, limits=limits), settings
        self.seeds = [settings.seed + extra for extra in range(seeds)]

    def all_of(self, compared: list[Entry]) -> list[Trial]:
        """Return all trials, without their numbers of epochs."""
        return [trial_of(self.base, one, seed, {}) for one in compared for seed in self.seeds]

    def ours(self) -> list[Trial]:
        """Return the trials of our method."""
        return self.all_of([Entry(OURS)])

    def controls(self, compared: list[Entry]) -> list[Trial]:
        """Return the trials of all controls; those of our method are finished."""
        return [
            control_trial(self.base, one, seed, self.settings)
            for one in compared
            if one.method != OURS
            for seed in self.seeds
        ]


def _possible(
    run: Run, compared: list[Entry], trials: _Comparison
) -> tuple[list[Entry], dict[str, str]]:
    """Return the entries whose method can prune this network, and why the others cannot."""
    skipped = {}
    for method in dict.fromkeys(one.method for one in compared):
        own = [one for one in compared if one.method == method]
        begun = any(Path(trial.out, "run.json").exists() for trial in trials.all_of(own))
        if method not in (OURS, *FROM_SCRATCH) and not begun:
            skipped[method] = obstacle(run, method, trials.base.limits)
    skipped = {method: why for method, why in skipped.items() if why}
    return [one for one in compared if one.method not in skipped], skipped


def _show(results: JsonObject, task: Task, out: Path) -> None:
    lines = [cells(row, task) for row in (original(results["rows"]), *results["rows"])]
    widths = [max(map(len, column)) for column in zip(HEAD, *lines, strict=True)]
    for line in (HEAD, *lines):  # wider than many terminals, but no number may be cut off
        pairs = [text.rjust(width) for text, width in zip(line, widths, strict=True)]
        say("  ".join([line[0].ljust(widths[0]), *pairs[1:]]))
    for sentence in (*results["verdict"]["sentences"], NOTES):
        say(sentence)
    for method, why in results["skipped"].items():
        say(f"Not compared: {method} ({why})")
    say(f"Written to {out}/: referee.json, referee.md, referee.png, and a folder for each run")
