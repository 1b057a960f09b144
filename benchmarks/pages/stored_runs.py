"""The runs in results/ that the tables of docs/results.md are made of."""

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure.experiments import COMPARED as COMPARED_EPOCHS
from benchmarks.pages import figures

TEST_SET = 10000  # images
# Settings that runs of earlier versions do not state, because they had no others.
ADDED = {
    **dict.fromkeys(("side", "per_class", "data_seed", "scratch_epochs", "epoch_steps"), 0),
    **dict.fromkeys(("lr_end", "clip"), 0.0),
    **dict.fromkeys(("uniform", "norms", "best"), False),
    "tune_decay": None,
    "beta2": 0.999,
    "context": 256,
    "multiple_of": 1,
}


class StoredRun(NamedTuple):
    """A run: its card, and the rows of its log."""

    card: dict[str, Any]
    log: list[dict[str, Any]]

    @property
    def network(self) -> str:
        return str(self.card["network"])

    @property
    def method(self) -> str:
        return str(self.card.get("method", "gdp"))

    @property
    def is_comparison(self) -> bool:
        """Whether this is one of the shorter, fine-tuned runs that compare methods."""
        tuned = self.score("after fine-tuning") is not None
        return tuned and self.card["recipe"]["epochs"] == COMPARED_EPOCHS

    @property
    def is_tabled(self) -> bool:
        """Whether this is a run of ours for the paper's table."""
        return self.method == "gdp" and not self.is_comparison

    @property
    def is_earlier(self) -> bool:
        """Whether this run is of the version that closed the remaining channels in one step."""
        return self.method == "gdp" and "window" not in self.card["recipe"]["schedule"]

    def score(self, stage: str) -> float | None:
        """Return the accuracy of a stage in percent, or None if the run has no such stage."""
        rows = [row for row in self.card["table"] if row["stage"] == stage]
        return 100 * rows[0]["accuracy"] if rows else None

    def settings(self, *without: str) -> dict[str, Any]:
        """Return the settings with flat keys, without those that start with one of `without`.

        The seed is left out, because runs that differ only in it are one experiment. `compiled` and
        `scored` are left out, because they do not change what is computed.
        """
        skipped = ("seed", "compiled", "scored")
        found = {**ADDED, **flat(self.card["recipe"])}
        return {k: v for k, v in found.items() if k not in skipped and not k.startswith(without)}

    def seconds(self) -> float:
        """Return the training time; a run that was resumed started to count from 0 again."""
        last = {"stage": "", "seconds": 0.0}
        return sum(
            row["seconds"]
            for row, after in zip(self.log, [*self.log[1:], last], strict=False)
            if after["stage"] != row["stage"] or after["seconds"] < row["seconds"]
        )


def flat(numbers: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one dict with keys such as `schedule.done`."""
    found: dict[str, Any] = {}
    for key, value in numbers.items():
        inner = flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        found |= inner
    return found


def read_runs(folder: Path) -> list[StoredRun]:
    """Return all runs for the tables that were scored on the whole test set."""
    paths = sorted(folder.glob("*/card.json"))
    other = (*figures.SHORT_RUNS, *figures.COMPARISONS)
    paths = [path for path in paths if not path.parent.name.startswith(other)]
    runs = [StoredRun(json.loads(path.read_text()), _read_log(path)) for path in paths]
    return [run for run in runs if run.card["scored_on"] == TEST_SET]


def _read_log(card: Path) -> list[dict[str, Any]]:
    file = card.with_name("log.jsonl")
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def grouped(runs: Iterable[StoredRun], key: Callable[[StoredRun], Any]) -> list[list[StoredRun]]:
    """Return lists of runs that have the same key."""
    found: dict[str, list[StoredRun]] = {}
    for run in runs:
        found.setdefault(json.dumps(key(run), sort_keys=True), []).append(run)
    return list(found.values())


def mean_and_deviation(values: list[float | None]) -> str:
    """Return "mean ± standard deviation", the mean alone for one value, "–" for none."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    deviation = f" ± {statistics.stdev(known):.2f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):.2f}{deviation}"


def mean_score(runs: list[StoredRun], stage: str) -> float:
    """Return the mean accuracy of a stage in percent."""
    return statistics.mean(run.score(stage) or 0.0 for run in runs)
