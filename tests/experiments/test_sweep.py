"""`polarprune sweep`: several budgets and seeds, with and without Ray, and after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from polarprune.cli.app import app
from polarprune.experiments.data.own import open_own
from polarprune.experiments.runs.ray_trials import ray_is_installed
from polarprune.experiments.runs.sweep_results import collect, write_results
from tests.helpers.cifar import runner
from tests.helpers.own_model import Own
from tests.helpers.processes import environment, wait_for_file

HELPER = Own.__module__
ARGUMENTS = ["sweep", f"{HELPER}:Own", "--data", f"{HELPER}:data_sets", "--device", "cpu"]
ARGUMENTS += ["--set", "batch=12", "--set", "baseline_epochs=2", "--threads", "1"]
# Without Ray installed, the same test runs the trials in one process.
WAY = "--ray" if ray_is_installed() else "--no-ray"


def sweep(out: Path, *given: str) -> list[dict[str, Any]]:
    done = runner.invoke(app, [*ARGUMENTS, "--out", str(out), "--json", *given])
    assert done.exit_code == 0, done.output
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def sums(out: Path) -> dict[str, str]:
    """Return the checksum of every small model of a sweep."""
    cards = sorted(out.glob("macs-*/card.json"))
    return {card.parent.name: json.loads(card.read_text())["sha256"] for card in cards}


def card(budget: float, macs: float, score: float, seed: int = 0) -> dict[str, Any]:
    return {
        "table": [{"accuracy": 0.9}, {"accuracy": score}],
        "measure": "accuracy",
        "budget": {"macs": budget},
        "macs_share": macs,
        "params_share": macs,
        "recipe": {"seed": seed},
    }


def test_every_budget_gets_every_seed_and_all_start_from_one_baseline(tmp_path: Path) -> None:
    given = ["--macs", "0.7,0.4", "--seeds", "2", "--seed", "3", "--set", "epochs=2", "--no-ray"]
    rows = sweep(tmp_path, *given)
    found = [(row["budget"], row["seed"]) for row in rows]
    assert found == [(0.7, 3), (0.7, 4), (0.4, 3), (0.4, 4)]
    assert all(row["macs"] <= row["budget"] for row in rows)
    assert len({row["baseline"] for row in rows}) == 1
    before = sums(tmp_path)
    assert len(set(before.values())) == 4 and "macs-0.4-seed-4" in before
    text = (tmp_path / "sweep.md").read_text()
    assert text.count("| 70.00% |") == 3 and " ± " in text and text.count("\n\n") == 1
    logs = [file.read_bytes() for file in sorted(tmp_path.glob("*/log.jsonl"))]
    assert sweep(tmp_path, *given) == rows and sums(tmp_path) == before
    assert [file.read_bytes() for file in sorted(tmp_path.glob("*/log.jsonl"))] == logs


def test_the_front_has_the_trials_that_no_other_one_beats(tmp_path: Path) -> None:
    data = open_own(f"{HELPER}:data_sets")
    cards = {
        "macs-0.7": card(0.7, 0.69, 0.93),
        "macs-0.7-seed-1": card(0.7, 0.68, 0.90, seed=1),  # fewer MACs than the first
        "macs-0.5": card(0.5, 0.50, 0.91),  # beats the one before
        "macs-0.3": card(0.3, 0.30, 0.85),
        "macs-0.3-seed-1": card(0.3, 0.30, 0.80, seed=1),
    }
    for name, content in cards.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "card.json").write_text(json.dumps(content))
    rows = collect(tmp_path, data)
    assert [row["score"] for row in rows if row["pareto"]] == [0.93, 0.91, 0.85]
    write_results(tmp_path, rows, data)
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "sweep.json").read_text()) == rows
    text = (tmp_path / "sweep.md").read_text()
    assert "| 30.00% | 30.00% | 30.00% | 82.50% ± 3.54% | 90.00% | 2 |" in text


def test_without_ray_trials_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("polarprune.cli.side_by_side.ray_is_installed", lambda: False)
    assert len(sweep(tmp_path / "out", "--macs", "0.7,0.5", "--set", "epochs=1")) == 2
    for way in (["--ray"], ["--address", "auto"]):
        given = [*ARGUMENTS, "--out", str(tmp_path / way[0]), "--macs", "0.5", *way]
        done = runner.invoke(app, given)
        assert done.exit_code == 1
        assert "needs ray. Install it with: pip install 'polarprune[ray]'" in " ".join(
            done.output.split()
        )


def test_a_sweep_whose_driver_is_killed_continues_to_the_same_result(tmp_path: Path) -> None:
    """The first trial ends on Ray, the second one is killed; without Ray the result is the same."""
    whole = ["--macs", "0.7,0.4", "--set", "epochs=2"]
    sweep(tmp_path / "wanted", *whole, "--no-ray")
    out, log = tmp_path / "out", tmp_path / "log"
    weights = (tmp_path / "wanted" / "baseline.safetensors").read_bytes()
    out.mkdir()
    (out / "baseline.safetensors").write_bytes(weights)
    command = [sys.executable, "-m", "polarprune", *ARGUMENTS, "--out", str(out), WAY]
    with log.open("wb") as said:
        driver = subprocess.Popen(
            [*command, *whole], stdout=said, stderr=said, env=environment(), start_new_session=True
        )
        try:
            wait_for_file(out / "macs-0.4" / "card.json", driver, log)
            os.kill(driver.pid, signal.SIGKILL)
        finally:
            driver.wait()
            with suppress(ProcessLookupError):  # Ray's helpers would end a minute later
                os.killpg(driver.pid, signal.SIGKILL)
    assert not (out / "sweep.json").exists() and sums(out)["macs-0.4"]
    begun = (out / "macs-0.4" / "log.jsonl").read_bytes()
    assert sweep(out, *whole, "--no-ray") == sweep(tmp_path / "wanted", *whole, "--no-ray")
    assert sums(out) == sums(tmp_path / "wanted")
    assert (out / "macs-0.4" / "log.jsonl").read_bytes() == begun  # not repeated
