"""Trials on Ray: side by side on one machine, or on a cluster.

Ray only decides which trial runs where. A trial keeps its checkpoints and its card in its own
folder, as without Ray; so a sweep whose driver or machine was killed continues when it is started
again, with or without Ray. On a cluster this folder and the data must be on a disk that all
machines share. Ray is an optional dependency and is imported when the first trial starts.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import PruneError
from ...plain_data import JsonObject
from ...validation.optional_packages import optional_package
from .trials import Show, Trial, run_trial

_QUIET = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}
_RETRIES = 2  # of a trial whose worker or machine died; it continues from its last checkpoint


def ray_is_installed() -> bool:
    """Return whether Ray Tune can be imported, without importing it."""
    return all(importlib.util.find_spec(name) for name in ("ray", "pyarrow", "pandas"))


def side_by_side_on_ray(stages: list[list[Trial]], address: str, show: Show) -> None:
    """Run trials on Ray, as many at a time as there are processors or GPUs.

    Args:
        stages: The trials; those of a stage start when all of the stage before are finished.
        address: Address of a cluster; empty for this machine.
        show: Called with the folder of a trial and a row of its log.

    Raises:
        PruneError: Ray is not installed or cannot be reached, or a trial failed.
    """
    left = [[trial for trial in stage if not trial.finished] for stage in stages]
    if not any(left):
        return
    with _cluster(address) as ray:
        for trials in filter(None, left):
            placed = [_placed(trial, ray.cluster_resources()) for trial in trials]
            _check_results(_fit(placed, show))


def _check_results(results: list[Any]) -> None:
    """Raise the first error of the trials, and say how many are finished."""
    errors = [str(row.metrics["error"]) for row in results if (row.metrics or {}).get("error")]
    errors += [f"{type(row.error).__name__}: {row.error}" for row in results if row.error]
    if errors:
        done = len(results) - len(errors)
        raise PruneError(
            f"{errors[0]} ({done} of {len(results)} trials finished; the same command continues.)"
        )


@contextmanager
def _cluster(address: str) -> Iterator[Any]:
    """Context manager: connect to Ray, or start it on this machine, and leave or stop it."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    ray = optional_package("ray", needed_for="the sweep", extra="ray")
    try:
        ray.init(
            address or "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            **({} if address else {"include_dashboard": False}),
        )
    except Exception as error:  # whatever Ray raises for an address
        raise PruneError(
            f"--address {address}: Ray cannot be reached ({error}). Start it with `ray start`, "
            f"set RAY_AUTH_TOKEN if it asks for a token, or leave the option out."
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _placed(trial: Trial, resources: dict[str, float]) -> Trial:
    """Return a trial with the device that the cluster has, if none was asked for."""
    device = trial.device or ("cuda" if resources.get("GPU") else "cpu")
    if device.startswith("cuda") and not resources.get("GPU"):
        raise PruneError("--device cuda: Ray finds no GPU; give cpu.")
    return dataclasses.replace(trial, device=device)


def _fit(trials: list[Trial], show: Show) -> list[Any]:
    """Let Tune run the trials, and return their last reports."""
    tune = optional_package("ray.tune", needed_for="the sweep", extra="ray")
    gpu = trials[0].device.startswith("cuda")
    needs = {"cpu": 1 if gpu else trials[0].threads, "gpu": int(gpu)}
    store = _store(trials[0])
    shutil.rmtree(store, ignore_errors=True)  # of a sweep that was killed
    try:
        tuner = tune.Tuner(
            tune.with_resources(_train, needs),
            param_space={"trial": tune.grid_search([dataclasses.asdict(one) for one in trials])},
            run_config=tune.RunConfig(
                name="tune",
                storage_path=str(store),
                verbose=0,
                callbacks=[_printer(tune.Callback, show)],
                failure_config=tune.FailureConfig(max_failures=_RETRIES),
            ),
        )
        return list(tuner.fit())
    finally:
        shutil.rmtree(store, ignore_errors=True)


def _store(trial: Trial) -> Path:
    """Return the folder for Tune's own files, which are deleted afterwards."""
    out = Path(trial.folder, trial.out)
    return (out.parent if trial.limits else out).resolve() / ".tune"


def _train(config: JsonObject) -> None:
    """Run one trial in a worker of Ray, and report every row of its log."""
    report = optional_package("ray.tune", needed_for="the sweep", extra="ray").report
    trial = Trial(**config["trial"])
    try:
        run_trial(trial, lambda row: report({"row": row, "error": ""}))
    except PruneError as error:  # it would fail again, so Ray must not retry it
        report({"row": {}, "error": f"{trial.out}: {error}"})
    else:
        report({"row": {}, "error": ""})


def _printer(base: Any, show: Show) -> Any:
    """Return a callback of Tune that shows the rows of all trials."""

    def on_trial_result(
        self: object, iteration: int, trials: object, trial: Any, result: JsonObject, **info: object
    ) -> None:
        if result.get("row"):
            show(Trial(**trial.config["trial"]).name, result["row"])

    def without_console(self: object) -> tuple[Any, tuple[()]]:
        return base, ()  # Tune pickles its callbacks, and a console cannot be pickled

    members = {"on_trial_result": on_trial_result, "__reduce__": without_console}
    return type("Printer", (base,), members)()
