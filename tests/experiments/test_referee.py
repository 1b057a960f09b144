"""`polarprune referee`: equal epochs and equal cost, a kill, and the verdict in every case."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import polarprune as pp
from polarprune.cli.app import app
from polarprune.experiments.data.cifar10 import Cifar10
from polarprune.experiments.data.own import open_own
from polarprune.experiments.data.task import Task
from polarprune.experiments.presets import own_settings
from polarprune.experiments.runs import referee, referee_results
from polarprune.experiments.runs.intervals import Difference, difference
from polarprune.experiments.runs.referee import Entry, entries, epochs_of, obstacle
from polarprune.experiments.runs.run import Run
from tests.helpers.cifar import images, runner
from tests.helpers.own_model import Own
from tests.helpers.processes import environment, wait_for_file

HELPER = Own.__module__
ARGUMENTS = ["referee", f"{HELPER}:Own", "--data", f"{HELPER}:data_sets", "--device", "cpu"]
ARGUMENTS += ["--no-ray", "--threads", "1", "--macs", "0.5", "--set", "batch=12"]
SHORT = ["--set", "baseline_epochs=2", "--set", "epochs=4"]


def judged(out: Path, *given: str) -> dict[str, Any]:
    done = runner.invoke(app, [*ARGUMENTS, *SHORT, "--out", str(out), "--json", *given])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def log(folder: Path) -> list[str]:
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [json.loads(line)["stage"] for line in lines]


# --- whole comparisons ----------------------------------------------------------------------------


def test_all_methods_have_the_same_epochs_or_the_same_cost(tmp_path: Path) -> None:
    given = ["--seeds", "2", "--seed", "3", "--methods", "thin,magnitude,reinit"]
    found = judged(tmp_path, *given, "--set", "distill=0.5")
    rows = {(row["method"], row["equal"]): row for row in found["rows"]}
    assert list(rows)[:3] == [("gdp", ""), ("thin", "cost"), ("thin", "epochs")] and len(rows) == 7
    for (_, equal), row in rows.items():
        assert row["seeds"] == [3, 4] and len(row["scores"]) == 2 and row["macs_share"] <= 0.5
        if equal == "epochs":
            assert sum(row["epochs"]) == 2 + 4 and row["relative_cost"] < 1
        if equal == "cost":
            assert row["relative_cost"] == pytest.approx(1, abs=0.06)
            assert sum(row["epochs"]) > 6
    assert rows["magnitude", "epochs"]["epochs"] == [2, 1, 3]
    shapes = [tmp_path / f"{name}-seed-4" / "card.json" for name in ("ours", "reinit-cost")]
    ours, anew = (json.loads(file.read_text()) for file in shapes)
    assert anew["widths"].items() <= ours["widths"].items()
    assert len({row["baseline"] for row in found["rows"]}) == 1
    assert log(tmp_path / "magnitude-epochs-seed-3") == ["prune"] + ["tune"] * 3
    assert log(tmp_path / "thin-epochs-seed-3") == ["scratch"] * 6
    assert log(tmp_path) == ["baseline"] * 2  # one for all
    text = (tmp_path / "referee.md").read_text()
    assert text.startswith(found["verdict"]["sentences"][0])
    assert text.count("\n| ") == 2 + 1 + 7 and "| original network |  | 100.00% |" in text
    assert (tmp_path / "referee.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "referee.json").read_text()) == found
    before = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/card.json")}
    assert judged(tmp_path, *given, "--set", "distill=0.5") == found
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/card.json")} == before


def test_a_referee_that_is_killed_continues_to_the_same_verdict(tmp_path: Path) -> None:
    given = ["--seeds", "1", "--methods", "thin,magnitude", "--equal", "cost"]
    wanted = judged(tmp_path / "wanted", *given)
    out = tmp_path / "out"
    out.mkdir()
    weights = (tmp_path / "wanted" / "baseline.safetensors").read_bytes()
    (out / "baseline.safetensors").write_bytes(weights)
    command = [sys.executable, "-m", "polarprune", *ARGUMENTS, *SHORT, "--out", str(out), *given]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
    wait_for_file(out / "thin-cost-seed-0" / "log.jsonl", process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (out / "referee.json").exists()
    kept = (out / "ours-seed-0" / "card.json").stat().st_mtime_ns
    assert judged(out, *given) == wanted
    assert (out / "ours-seed-0" / "card.json").stat().st_mtime_ns == kept


def test_a_method_that_cannot_prune_a_network_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "polarprune.cli.referee.obstacle",
        lambda run, method, limits: f"ValueError: no {method}" if method == "lasso" else "",
    )
    given = ["--seeds", "1", "--methods", "magnitude,lasso", "--equal", "epochs"]
    found = judged(tmp_path, *given)
    assert found["skipped"] == {"lasso": "ValueError: no lasso"}
    assert [row["method"] for row in found["rows"]] == ["gdp", "magnitude"]
    assert found["verdict"]["worth"] is None
    assert "Not compared: lasso (ValueError: no lasso)." in (tmp_path / "referee.md").read_text()
    done = runner.invoke(app, [*ARGUMENTS, *SHORT, "--out", str(tmp_path), *given])
    assert "ours (gdp)" in done.output and "Written to" in done.output
    assert "With one seed, pruning is" in done.output


@pytest.mark.usefixtures("tiny")
def test_an_obstacle_is_found_before_the_training(data: Cifar10, tmp_path: Path) -> None:
    run = Run(own_settings(f"{HELPER}:Own", "own"), Cifar10(images(20), images(10)), tmp_path)
    assert obstacle(run, "magnitude", {"macs": 0.5}) == ""
    assert obstacle(run, "magnitude", {"macs": 0.0001}).startswith("PruneError: budget out of")


def test_torch_pruning_is_compared_where_it_is_installed(tmp_path: Path) -> None:
    found = judged(tmp_path, "--seeds", "1", "--equal", "epochs")
    methods = [row["method"] for row in found["rows"]]
    installed = importlib.util.find_spec("torch_pruning") is not None
    assert methods == ["gdp", "thin", "magnitude", *["torch-pruning"] * installed]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--macs", "1.5"], "macs=1.5"),
        (["--seeds", "0"], "--seeds 0: give at least 1."),
        (["--methods", "thin,slim"], "--methods slim: give some of thin, reinit, magnitude"),
        (["--equal", "time"], "--equal time: give some of cost, epochs."),
        (["--equal", ","], "--equal : give some of cost, epochs."),
        (["--set", "epochs=1"], "epochs=1: magnitude prunes, then it is fine-tuned"),
        (["--start", "nowhere"], "--start nowhere: no such file."),
    ],
)
def test_a_referee_that_cannot_be_is_not_begun(given: list[str], said: str, tmp_path: Path) -> None:
    done = runner.invoke(app, [*ARGUMENTS, *SHORT, "--out", str(tmp_path / "out"), *given])
    assert done.exit_code == 1 and said in " ".join(done.output.split()), done.output
    assert not list(tmp_path.glob("out/*/card.json"))


# --- epochs ---------------------------------------------------------------------------------------


CARD = {
    "table": [{"macs": 100, "accuracy": 0.9}],
    "macs": 40,
    "epoch_examples": 10,
    "recipe": {"distill": 0.0},
    "training_macs": {"baseline": 10 * 300 * 20, "prune": 10 * 300 * 20, "total": 10 * 300 * 40},
}


def test_epochs_of_controls_are_worked_out_by_hand() -> None:
    """Ours has 20 + 20 epochs of 300 MACs for each example; a small network costs 120."""
    settings = own_settings("x:y", "own", epochs=20, baseline_epochs=20, lr=0.1)
    cost = {
        method: epochs_of(Entry(method, "cost"), settings, {}, CARD)
        for method in ("thin", "magnitude", "torch-pruning")
    }
    assert cost["thin"] == {"scratch_epochs": 40 * 300 // 120}
    assert cost["magnitude"] == {"epochs": 1, "tune_epochs": round(19 * 2.5), "tune_lr": 0.1}
    assert cost["torch-pruning"] == {"epochs": 10, "tune_epochs": 25, "tune_lr": 0.1}
    epochs = epochs_of(Entry("magnitude", "epochs"), settings, {"tune_lr": 1}, CARD)
    assert epochs == {"epochs": 1, "tune_epochs": 19, "tune_lr": settings.tune_lr}
    taught = {**CARD, "recipe": {"distill": 0.9}}  # the baseline teaches thin, too
    found = epochs_of(Entry("thin", "cost"), settings, {}, taught)
    assert found == {"scratch_epochs": round(20 * 300 / 220)}


def test_rows_are_every_method_in_every_way() -> None:
    assert entries(["thin"], ["cost"]) == [Entry("gdp"), Entry("thin", "cost")]
    assert [entry.folder for entry in entries(["thin"], ["cost"])] == ["ours", "thin-cost"]
    with pytest.raises(pp.PruneError, match="--methods : give some of thin"):
        entries([], ["cost"])
    assert set(referee.CONTROLS) > {"thin", "reinit", "magnitude", "torch-pruning"}


# --- the verdict ----------------------------------------------------------------------------------


def test_the_interval_of_a_difference_is_students() -> None:
    """s² = 1, n = 3: t of 4 degrees of freedom times √(2/3)."""
    found = difference([1, 2, 3], [4, 5, 6])
    assert found.mean == -3 and found.half == pytest.approx(2.776 * (2 / 3) ** 0.5, abs=1e-3)
    assert found.sign == -1 and difference([1, 2, 3], [2, 3, 4]).sign == 0
    uneven = difference([0, 0], [1, 2, 3])  # 3 degrees of freedom, s² = 2/3
    assert uneven.half == pytest.approx(3.182 * (2 / 3 * 5 / 6) ** 0.5, abs=1e-3)
    assert difference([1], [2, 3]) == Difference(-1.5, None)
    assert difference([1, 1], [2, 2]) == Difference(-1, 0.0)


def row(method: str, equal: str, scores: list[float], ours: list[float], task: Task) -> Any:
    cards = [
        {
            "table": [{task.measure: 0.9}, {task.measure: score}],
            "measure": task.measure,
            "macs_share": 0.5,
            "params_share": 0.4,
            "recipe": {
                "seed": seed,
                "baseline_epochs": 2,
                "epochs": 3,
                "tune_epochs": 0,
                "scratch_epochs": 0,
            },
            "training_macs": {"prune": 10, "total": 10},
        }
        for seed, score in enumerate(scores)
    ]
    return referee_results.row_of(Entry(method, equal), cards, ours, task)


def verdict(ours: list[float], thin: list[float], task: Task, equal: str = "cost") -> Any:
    rows = [row("gdp", "", ours, ours, task), row("thin", equal, thin, ours, task)]
    return referee_results.verdict(rows, task)


OURS = [0.930, 0.931, 0.932]


def test_the_verdict_is_computed_from_the_scores() -> None:
    task = open_own(f"{HELPER}:data_sets")
    better = verdict(OURS, [0.926, 0.927, 0.928], task)
    assert better["worth"] is True and better["sentences"] == [
        "Pruning was worth it: at equal training cost it is better than a thin network from "
        "scratch.",
        "Pruning is better than a thin network (equal training cost) by 0.40 ± 0.23 points.",
    ]
    worse = verdict([0.926, 0.927, 0.928], OURS, task)
    assert worse["worth"] is False and worse["sentences"][0].endswith("Train that instead.")
    assert worse["sentences"][1] == (
        "A thin network (equal training cost) is better than pruning by 0.40 ± 0.23 points: "
        "use that instead."
    )
    same = verdict(OURS, [0.9305, 0.931, 0.932], task, "epochs")
    assert same["worth"] is None and "at equal epochs" in same["sentences"][0]
    assert "cannot be told apart with 3 seeds" in same["sentences"][0]
    assert "cannot be told apart (-0.02 ± 0.2" in same["sentences"][1]
    one = verdict([0.95], [0.90], task)
    assert one["worth"] is None and one["sentences"] == [
        "Whether pruning was worth it cannot be said with one seed. Give --seeds 3.",
        "With one seed, pruning is 5.00 points ahead of a thin network (equal training cost), "
        "which may be chance.",
    ]


def test_equal_cost_counts_more_than_equal_epochs() -> None:
    task, rows = open_own(f"{HELPER}:data_sets"), []
    rows.append(row("gdp", "", OURS, OURS, task))
    rows.append(row("thin", "epochs", [0.92, 0.921, 0.922], OURS, task))
    rows.append(row("thin", "cost", [0.94, 0.941, 0.942], OURS, task))
    rows.append(row("magnitude", "cost", [0.95, 0.951, 0.952], OURS, task))
    found = referee_results.verdict(rows, task)
    assert found["worth"] is False and len(found["sentences"]) == 4
    assert found["sentences"][3].startswith("Magnitude (equal training cost) is better than")
    assert referee_results.verdict([rows[0], rows[3]], task)["worth"] is None


class Losses(Cifar10):
    """A task whose score is a loss."""

    measure = "loss"
    higher_is_better = False

    def shown(self, score: float) -> str:
        return f"{score:,.0f}"


def test_a_lower_score_may_be_better() -> None:
    task = Losses(images(4), images(4))
    found = verdict([100.0, 101.0, 102.0], [110.0, 111.0, 112.0], task)
    assert found["worth"] is True and "by 10 ± 2." in found["sentences"][1]


def test_cells_are_what_was_measured() -> None:
    task = open_own(f"{HELPER}:data_sets")
    thin = {**row("thin", "cost", [0.93, 0.95], [0.92, 0.93], task), "relative_cost": 1.004}
    assert referee_results.cells(thin, task) == (
        "thin",
        "cost",
        "50.00%",
        "40.00%",
        "2 + 3 + 0",
        "1.00",
        "94.00% ± 1.41%",
        "-1.50 ± 4.81 points",
    )
