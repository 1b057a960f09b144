"""The results of a sweep: a row for each trial, the Pareto front, a table and a picture."""

from __future__ import annotations

import statistics
from pathlib import Path

from ...files.writing import replacing, write_text
from ...plain_data import JsonObject
from ...report.plots import save_curve
from ..data.task import Task
from .files import read_json, write_json


def collect(folder: Path, task: Task) -> list[JsonObject]:
    """Return a row for each finished trial in a folder, largest budget first.

    A row has the budget, the seed, what is left of the MACs and params as fractions, the score, the
    baseline's score, and whether the trial is on the Pareto front: no other one has fewer MACs and
    a score that is as good, or as many and a better one.
    """
    rows = [_row(read_json(file)) for file in folder.glob("macs-*/card.json")]
    sign = 1 if task.higher_is_better else -1
    for row in rows:
        row["pareto"] = not any(_beats(other, row, sign) for other in rows)
    return sorted(rows, key=lambda row: (-row["budget"], row["seed"]))


def _row(card: JsonObject) -> JsonObject:
    first, last = card["table"][0], card["table"][-1]
    return {
        "budget": card["budget"]["macs"],
        "seed": card["recipe"]["seed"],
        "macs": card["macs_share"],
        "params": card["params_share"],
        "score": last[card["measure"]],
        "baseline": first[card["measure"]],
    }


def _beats(one: JsonObject, other: JsonObject, sign: int) -> bool:
    gain, saved = sign * (one["score"] - other["score"]), other["macs"] - one["macs"]
    return bool(gain >= 0 and saved >= 0 and (gain > 0 or saved > 0))


def write_results(folder: Path, rows: list[JsonObject], task: Task) -> None:
    """Write `sweep.json`, `sweep.md` and `sweep.png`.

    Args:
        folder: The folder of the sweep.
        rows: What `collect` returned.
        task: The data, which knows how to print a score.
    """
    write_json(folder / "sweep.json", rows)
    write_text(folder / "sweep.md", _markdown(rows, task))
    with replacing(folder / "sweep.png") as new:
        save_curve(rows, task.measure, new)


def _markdown(rows: list[JsonObject], task: Task) -> str:
    """Return a table of budgets, and one of all trials if there are several for a budget."""
    budgets = list(dict.fromkeys(row["budget"] for row in rows))
    cells = [_mean_cells([row for row in rows if row["budget"] == one], task) for one in budgets]
    parts = [pipe_table(("budget", "MACs", "params", task.measure, "baseline", "runs"), cells)]
    if len(rows) > len(budgets):
        head = ("budget", "seed", "MACs", "params", task.measure, "Pareto front")
        parts.append(pipe_table(head, [_cells(row, task) for row in rows]))
    return "\n".join(parts)


def _mean_cells(rows: list[JsonObject], task: Task) -> tuple[str, ...]:
    """Return the cells of a budget: means over its trials, and the deviation of the score."""
    mean = {key: statistics.fmean(row[key] for row in rows) for key in rows[0]}
    score = task.shown(mean["score"])
    if len(rows) > 1:
        score += f" ± {task.shown(statistics.stdev(row['score'] for row in rows))}"
    costs = (f"{mean[key]:.2%}" for key in ("budget", "macs", "params"))
    return *costs, score, task.shown(mean["baseline"]), str(len(rows))


def _cells(row: JsonObject, task: Task) -> tuple[str, ...]:
    costs = (f"{row[key]:.2%}" for key in ("macs", "params"))
    front = "yes" if row["pareto"] else ""
    return f"{row['budget']:.2%}", str(row["seed"]), *costs, task.shown(row["score"]), front


def pipe_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [head, tuple("---:" for _ in head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
