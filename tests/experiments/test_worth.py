"""The experiments against thin networks, on Tiny ImageNet and with few images, and their pages."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure import experiments
from benchmarks.measure.experiments import EXPERIMENTS, Experiment, against
from benchmarks.pages import figures, worth
from benchmarks.pages.stored_runs import read_runs
from polarprune.cli.app import app
from polarprune.experiments.networks import table
from polarprune.experiments.presets import PRESETS
from polarprune.experiments.settings import Settings
from tests.helpers import cifar, tiny_imagenet
from tests.helpers.cifar import runner
from tests.helpers.own_model import Own


def names(*starts: str) -> list[str]:
    return [name for name in EXPERIMENTS if name.startswith(starts)]


# --- the experiments ------------------------------------------------------------------------------


def test_resnet56_is_compared_at_four_budgets() -> None:
    for percent, seeds in (("47", 3), ("34", 1), ("20", 3), ("10", 1)):
        found = names(f"worth-resnet56-{percent}-")
        rows = {name.rpartition("-seed")[0].split(f"{percent}-")[1] for name in found}
        assert rows == {"ours", "l0"} | {
            f"{method}-{equal}"
            for method in ("thin", "reinit", "torch-pruning")
            for equal in ("cost", "epochs")
        }
        assert len(found) == seeds * len(rows)
    for name in names("worth"):
        one = EXPERIMENTS[name]
        assert one.after == experiments.COMMON and (one.ours in EXPERIMENTS or "ours" in name)


def test_budgets_on_tiny_imagenet_are_the_papers() -> None:
    for network, budgets in experiments.TINY.items():
        ratios = figures.PAPER["imagenet"][network]["ratio"]
        assert all(round(100 * macs, 1) in ratios for macs, _ in budgets)
        assert EXPERIMENTS[f"tiny-{network}"].is_baseline
    assert len(names("tiny-mobilenet_v2-44-ours")) == 3
    assert all(EXPERIMENTS[name].kind == "tiny-imagenet" for name in names("tiny"))


def test_every_transfer_starts_from_tiny_imagenet_or_from_new_weights() -> None:
    for name in names("transfer"):
        one = EXPERIMENTS[name]
        if name.endswith("thin-first"):
            assert one.kind == "tiny-imagenet" and one.method == "thin"
        elif one.method == "reinit":
            assert EXPERIMENTS[one.small].macs == one.macs and not one.start
        else:
            assert one.start == ("" if one.method == "thin" else f"tiny-{one.preset[:-9]}")
        drawn = [part for part in one.change if part.startswith("data_seed=")]
        assert drawn == [f"data_seed={one.seed}"] or name.endswith("thin-first")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> dict[str, Experiment]:
    """All kinds of comparisons, of a tiny network."""
    monkeypatch.setitem(table.ANY_CLASSES, "own", Own)
    monkeypatch.setitem(table.NETWORKS, "own", Own)
    usual = Settings("own", "tiny-imagenet", baseline_epochs=1, epochs=2, batch=12, lr=0.05)
    monkeypatch.setitem(PRESETS, "own-tiny", usual)
    few = dataclasses.replace(usual, data="cifar10", side=16, per_class=3)
    monkeypatch.setitem(PRESETS, "own-transfer", few)
    monkeypatch.setattr(experiments, "TINY", {"own": ((0.5, 1),)})
    monkeypatch.setattr(experiments, "TRANSFERRED", ("own",))
    monkeypatch.setattr(experiments, "TRANSFER_MACS", (0.5,))
    monkeypatch.setattr(experiments, "TRANSFER_SEEDS", 1)
    monkeypatch.setattr(experiments, "FEW", (4,))
    first = Experiment("own-tiny", 0.5, after="tiny-own")
    found = {
        **experiments.tiny(),
        **experiments.transfer(),
        **against("worth-own-50", first, ("reinit",), ("l0",)),
    }
    found = {name: one for name, one in found.items() if one.method != "torch-pruning"}
    monkeypatch.setattr(experiments, "EXPERIMENTS", found)
    return found


def test_all_comparisons_run_and_are_equal(small: dict[str, Experiment], tmp_path: Path) -> None:
    (tmp_path / "cifar").mkdir()
    cifar.written(tmp_path / "cifar", "bin")
    folders = {
        "cifar10": f"cifar10:{tmp_path / 'cifar'}",
        "tiny-imagenet": f"tiny-imagenet:{tiny_imagenet.written(tmp_path / 'tiny')}",
    }
    given = argparse.Namespace(
        results=tmp_path / "results",
        runs=tmp_path / "runs",
        zoo=tmp_path / "zoo",
        set=[],
    )
    waiting = experiments.wanted([])
    while waiting:
        able = [name for name in waiting if experiments.ready(name, given)]
        assert able, waiting
        for name in able:
            one = small[name]
            changes = [part for c in one.equal_changes(given) for part in ("--set", c)]
            call = [*one.arguments(folders[one.kind], given, name), *changes, "--device", "cpu"]
            done = runner.invoke(app, call)
            assert done.exit_code == 0, (name, done.output)
            experiments.keep(name, given)
            waiting.remove(name)
    cards = {
        path.parent.name: json.loads(path.read_text()) for path in given.results.glob("*/card.json")
    }
    ours = cards["tiny-own-50-ours-seed0"]["training_macs"]["total"]
    assert cards["tiny-own-50-thin-cost-seed0"]["training_macs"]["total"] == pytest.approx(
        ours, rel=0.12
    )
    reinit = cards["worth-own-50-reinit-epochs-seed0"]
    assert reinit["widths"].items() <= cards["worth-own-50-ours-seed0"]["widths"].items()
    stem = "transfer-own-4images-50"
    first = cards[f"{stem}-thin-first-seed0"]
    wanted = cards["transfer-own-50-thin-first"]["training_macs"]["total"]
    assert first["training_macs"]["scratch_start"] == wanted and first["trained_on"] == 40
    pruned = cards[f"{stem}-ours-seed0"]
    assert pruned["training_macs"]["start"] > 0 and pruned["recipe"]["baseline_epochs"] == 0
    assert cards[f"{stem}-magnitude-epochs-seed0"]["recipe"]["tune_epochs"] == 1
    shutil.rmtree(tmp_path / "runs")


# --- the pages ------------------------------------------------------------------------------------


def stored(folder: Path, name: str, score: float, stage: str = "after removal") -> None:
    """Write a card as `Run` does."""
    one = EXPERIMENTS[name]
    recipe = dataclasses.asdict(PRESETS[one.preset]) | {"seed": one.seed}
    table = [{"stage": "baseline", "accuracy": 0.95}, {"stage": stage, "accuracy": score}]
    card = {
        "network": PRESETS[one.preset].network,
        "method": one.method,
        "budget": {"macs": one.macs},
        "measure": "accuracy",
        "table": table,
        "macs_share": one.macs - 0.001,
        "params_share": 0.5,
        "scored_on": 10000,
        "recipe": recipe,
        "training_macs": {"prune": 1000, "total": 1000},
    }
    (folder / name).mkdir(parents=True)
    (folder / name / "card.json").write_text(json.dumps(card))


def test_a_comparison_is_a_table_a_figure_and_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "OUT", tmp_path)
    for seed in range(3):
        stored(tmp_path, f"worth-resnet56-47-ours-seed{seed}", 0.945 + seed / 10000)
        stored(tmp_path, f"worth-resnet56-47-thin-cost-seed{seed}", 0.94 + seed / 10000)
    stored(tmp_path, "worth-resnet56-10-ours-seed0", 0.90)
    parts = worth.worth(tmp_path)
    head, title, rows, said = parts[:4]
    assert "One baseline" in head and title == "At 46.65 % of the MACs:"
    assert rows.count("\n") == 3 and "| 94.51% ± 0.01% |  | 3 |" in rows
    assert "| thin | cost | 46.55% |" in rows and "| +0.50 ± 0.02 points | 3 |" in rows
    assert said.startswith("Pruning was worth it: at equal training cost")
    assert said.endswith(
        "Not run yet: l0, thin epochs, reinit cost, reinit epochs, "
        "torch-pruning cost, torch-pruning epochs."
    )
    assert "At 34.36 % of the MACs: not run yet." in parts and "![worth]" not in parts[-1]
    drawn = worth.figure(tmp_path)
    drawn.savefig(tmp_path / "worth.png")
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == [
        "ours",
        "thin, equal cost",
    ]
    assert worth.worth(tmp_path)[-1].startswith("![worth](figures/worth.png)")
    assert worth.curves(tmp_path)["gdp"][1] == pytest.approx((9.9, 90.0, 0.0))
    assert read_runs(tmp_path) == []  # they are not in the paper's table


def test_tiny_imagenet_is_told_beside_the_papers_change(tmp_path: Path) -> None:
    stored(tmp_path, "tiny-mobilenet_v2-44-ours-seed0", 0.94)
    lines = worth.tiny(tmp_path)[1].splitlines()
    assert "| MobileNetV2 | 43.8 | -1.93 | 95.00 | ours (gdp) |  | 43.70 | 94.00 | -1.00 | 1 |" in (
        lines
    )
    assert "| MobileNetV2 | 43.8 | -1.93 | – | thin cost, thin epochs, torch-pr" in "".join(lines)
    assert len(lines) == 2 + 6 + 1


def test_transfer_is_told_with_the_unpruned_network(tmp_path: Path) -> None:
    parts = worth.transfer(tmp_path)
    assert len(parts) == 5 and parts[1] == "ResNet-50, 50 images a class: not run yet."
    stem = "transfer-resnet50-50images"
    for seed, score in ((0, 0.6), (1, 0.62)):
        folder = tmp_path / f"{stem}-unpruned-seed{seed}"
        folder.mkdir()
        (folder / "log.jsonl").write_text(json.dumps({"accuracy": score}) + "\n")
    stored(tmp_path, f"{stem}-50-ours-seed0", 0.61)
    stored(tmp_path, f"{stem}-50-thin-first-seed0", 0.59, "after training")
    parts = worth.transfer(tmp_path)
    said: Any = parts[1]
    assert said == "ResNet-50, 50 images a class. Unpruned: 61.00 ± 1.41 % (2 runs)."
    assert "| thin | on Tiny ImageNet first | 49.90% |" in parts[3]
    assert parts[4].startswith("One run each, so differences may be chance. Not run yet: ")
