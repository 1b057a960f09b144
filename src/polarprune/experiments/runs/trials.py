"""`Trial`: everything that a run of a sweep needs, as plain data that another process can take."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...errors import PruneError
from ...plain_data import JsonObject, RowHandler
from ...torch_internals.process_settings import cpu_threads
from ..data.table import kind_of, open_data
from ..data.task import Task
from ..methods.base import Limits
from ..methods.from_scratch import FROM_SCRATCH
from ..presets import own_settings, preset
from ..settings import Settings
from .files import read_json
from .prune import prune, train_small
from .pruned_file import widths_in
from .run import Run


@dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Attributes:
        network: A preset or a network of the user's own.
        data: The name of the data.
        changes: Changed settings, the seed among them.
        limits: The budget; without one, only the baseline is trained.
        out: Folder of the run.
        method: "gdp" or another method.
        hold_out: The number of training examples to score on.
        baseline: File of the weights of the original network.
        device: Where to train.
        threads: Threads on the CPU; they change the rounding, so all trials have the same number.
        folder: The current folder, to which all paths are relative.
        tune_epochs: The number of epochs of fine-tuning.
        shapes: File of the widths of `reinit`.
        start: File of initial weights of the baseline.
    """

    network: str
    data: str
    changes: JsonObject
    limits: Limits
    out: str
    method: str
    hold_out: int
    baseline: str
    device: str
    threads: int
    folder: str
    tune_epochs: int
    shapes: str = ""
    start: str = ""

    @property
    def name(self) -> str:
        """The name of its folder; empty for the baseline."""
        return Path(self.out).name if self.limits else ""

    @property
    def finished(self) -> bool:
        """Whether the result of the trial is there."""
        if not self.limits:
            return Path(self.folder, self.baseline).exists()
        card = Path(self.folder, self.out, "card.json")
        return card.exists() and read_json(card)["recipe"]["tune_epochs"] == self.tune_epochs


def run_trial(trial: Trial, progress: RowHandler) -> None:
    """Run a trial, or continue it from its last checkpoint; a finished one is not repeated.

    Args:
        trial: The trial.
        progress: Called with every row of its log.
    """
    os.chdir(trial.folder)
    with cpu_threads(trial.threads):
        settings, data = prepare(trial.network, trial.data, trial.changes, trial.hold_out)
        run = Run(settings, data, Path(trial.out), device=trial.device, progress=progress)
        start, shapes = (Path(file) if file else None for file in (trial.start, trial.shapes))
        baseline = Path(trial.baseline)
        run_to_end(run, trial.method, trial.limits, trial.hold_out, baseline, start, shapes)


def prepare(network: str, data: str, changes: JsonObject, hold_out: int) -> tuple[Settings, Task]:
    """Return the settings of a preset or of a user's network, and the data that they are for."""
    if ":" in network:
        settings = own_settings(network, kind_of(data), **changes)
    else:
        settings = preset(network, **changes)
    found = open_data(data, settings)
    if not 0 <= hold_out < found.counts[0]:
        raise PruneError(
            f"--hold-out {hold_out}: give a number from 0 to {found.counts[0] - 1:,}, less than "
            f"the number of training examples."
        )
    return settings, found.held_out(hold_out) if hold_out else found


def run_to_end(
    run: Run,
    method: str,
    limits: Limits,
    hold_out: int,
    baseline: Path | None,
    start: Path | None = None,
    shapes: Path | None = None,
) -> JsonObject:
    """Return the card of a run, which may be finished already, or the score of a baseline.

    Args:
        run: The run.
        method: "gdp" or another method.
        limits: The budget; without one, only the baseline is trained.
        hold_out: The number of training examples to score on, for `run.json`.
        baseline: Weights of the original network; trained and written there if absent.
        start: Initial weights of a baseline, or of the network of `thin` and `reinit`.
        shapes: File of the widths of `reinit`.
        start: File of initial weights of the baseline.
    """
    widths = checked_shapes(method, shapes)
    run.claim({"method": method, "budget": limits, "hold_out": hold_out})
    done = run.finished() if limits else None
    if done is not None:
        return done
    run.check(limits, baseline)
    if limits and method in FROM_SCRATCH:
        model = run.baseline(baseline)
        return train_small(run, model, method, limits, start, widths)
    model = run.baseline(baseline, start)
    if limits:
        return prune(run, model, method, **limits)
    return {"stage": "baseline", run.data.measure: run.score(model)}


def checked_shapes(method: str, shapes: Path | None) -> JsonObject | None:
    """Return the widths in a file for `reinit`, which needs one; no other method takes one."""
    if (method == "reinit") != (shapes is not None):
        raise PruneError(
            f"--shapes: {method} has no use for it. Leave it out."
            if shapes
            else "reinit: give the widths of a pruned network with --shapes FILE."
        )
    return None if shapes is None else widths_in(shapes)


Show = Callable[[str, JsonObject], None]


def one_after_the_other(trials: list[Trial], show: Show) -> None:
    """Run trials in this process.

    Args:
        trials: The trials.
        show: Called with the folder of a trial and a row of its log.
    """
    for trial in trials:
        if not trial.finished:
            run_trial(trial, partial(show, trial.name))
