"""Options and steps of the commands that run many trials, on Ray or one after the other."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import typer

from ..errors import PruneError
from ..experiments.runs.ray_trials import ray_is_installed, side_by_side_on_ray
from ..experiments.runs.trials import Show, Trial, one_after_the_other
from ..plain_data import JsonObject

Threads = Annotated[
    int, typer.Option(help="threads of a trial on the CPU; 0: the default of torch")
]
UseRay = Annotated[
    bool | None,
    typer.Option(
        "--ray/--no-ray", help="run trials side by side on Ray; by default if Ray is installed"
    ),
]
Address = Annotated[str, typer.Option(help="address of a Ray cluster, such as auto")]


def check_numbers(seeds: int, threads: int) -> None:
    """Refuse a wrong number of seeds or threads."""
    if seeds < 1:
        raise PruneError(f"--seeds {seeds}: give at least 1.")
    if threads < 0:
        raise PruneError(f"--threads {threads}: give a number of threads, or 0.")


def uses_ray(wanted: bool | None, address: str, trials: list[Trial]) -> bool:
    """Return whether trials run on Ray: if asked to, or if it is installed and of any use."""
    if address or wanted is not None:
        return bool(address or wanted)
    unfinished = sum(not trial.finished for trial in trials)
    return unfinished > 1 and "WORLD_SIZE" not in os.environ and ray_is_installed()


def _named(show: Callable[[JsonObject], None]) -> Show:
    """Return a function that shows a row of a log under the name of its trial."""
    return lambda name, row: show({**row, "stage": f"{name} {row['stage']}".strip()})


def run_all(
    stages: list[list[Trial]],
    on_ray: bool,
    address: str,
    device: str,
    show: Callable[[JsonObject], None],
) -> None:
    """Run trials; those of a stage start when all of the stage before are finished.

    Args:
        stages: The trials.
        on_ray: Whether to run them side by side.
        address: Address of a Ray cluster.
        device: Device of trials that do not run on Ray.
        show: Called with every row of a log, under the name of its trial.
    """
    if on_ray:
        side_by_side_on_ray(stages, address, _named(show))
        return
    for trials in stages:
        one_after_the_other([replace(trial, device=device) for trial in trials], _named(show))
