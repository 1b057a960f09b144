"""The benchmark of the steering: a tiny run, and what the page says about stored runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.measure import steering
from benchmarks.pages import figures
from benchmarks.pages import steering as steering_page
from polarprune import Schedule
from polarprune.experiments.data.images import Images


@pytest.fixture
def cifar10(tmp_path: Path) -> Path:
    """Write random images in the binary format, 20 in each file."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"):
        rows = torch.randint(0, 256, (20, 3073), generator=generator, dtype=torch.uint8)
        rows[:, 0] %= 10
        (folder / f"{name}.bin").write_bytes(bytes(rows.flatten().tolist()))
    return tmp_path


def run(folder: Path, *more: str) -> dict[str, dict[str, Any]]:
    store = folder / "steering.json"
    given = (
        f"--networks resnet20 --epochs 2 --macs 0.5 --data cifar10:{folder} --images 80 --size 8"
    )
    given += f" --batch 8 --baseline-epochs 1 --runs {folder / 'runs'} --store {store}"
    steering.main([*given.split(), *more])
    return steering.read(store)


def test_a_combination_is_run_once_and_stored(
    cifar10: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = run(cifar10).values()
    assert row["steps"] == 20 and (row["images"], row["test_images"], row["size"]) == (80, 20, 8)
    curves = row["curves"]
    assert curves["epoch"] == [1, 2] and curves["path"] == [0.5, 0.5]  # done at half of the run
    assert 0.4 < curves["macs"][-1] <= 0.5 and curves["macs"][0] <= 0.5
    assert all(0 <= n <= of for n, of in zip(curves["half_open"], curves["gates"], strict=True))
    first, second = curves["recalibrated_loss"]
    assert row["loss_ratio"] == pytest.approx(second / first, rel=1e-3)
    assert row["machine"] and row["commit"] and row["recipe"]["seed"] == 0
    capsys.readouterr()
    assert run(cifar10) == run(cifar10) and capsys.readouterr().out == ""
    assert len(run(cifar10, "--macs", "0.5", "0.7")) == 2
    assert capsys.readouterr().out.count("macs=0.7") == 1


def test_images_are_scaled_by_the_mean_of_squares() -> None:
    x = torch.arange(2 * 4 * 4 * 3).reshape(2, 4, 4, 3).byte()
    small = steering.smaller(Images(x, torch.tensor([1, 2])), 1, 2)
    assert small.x.shape == (1, 2, 2, 3) and small.y.tolist() == [1]
    assert int(small.x[0, 0, 0, 0]) == round(float(x[0, :2, :2, 0].float().mean()))


def test_the_summary_looks_at_both_sides_of_the_path() -> None:
    schedule, steps = Schedule(), 100
    ways = [steering.path(schedule, step, steps, 0.5) for step in range(0, 101, 10)]
    assert ways[0] == 1 and ways[-1] == 0.5 and ways == sorted(ways, reverse=True)
    history = [{"step": 10 * k, "macs": way, "closed": k} for k, way in enumerate(ways)]
    history[2]["macs"] += 0.03
    history[3]["macs"] -= 0.04
    losses = [{"recalibrated_loss": loss} for loss in (1.0, 1.1, 1.0, 1.3, 0.5)]
    found = steering.summary(history, losses, 0.5, schedule, steps)
    assert found["above_path"] == pytest.approx(3) and found["below_path"] == pytest.approx(4)
    assert found["loss_ratio"] == pytest.approx(1.3)
    assert found["largest_fall"] == pytest.approx(100 * (ways[2] - ways[3]) + 7)
    assert found["channels_in_it"] == 1


def stored(**changes: Any) -> dict[str, Any]:
    curves = {
        "epoch": [1, 2],
        "macs": [0.7, 0.5],
        "path": [0.7, 0.5],
        "half_open": [3, 0],
        "gates": [10, 10],
        "recalibrated_loss": [1.0, 0.9],
    }
    return {
        "network": "resnet20",
        "macs": 0.5,
        "above_path": 0.1,
        "below_path": 1.9,
        "largest_fall": 2.4,
        "channels_in_it": 1,
        "landing": {"gates": 0, "macs": 0.0},
        "loss_ratio": 1.19,
        "accuracy": 0.8,
        "baseline": 0.7,
        "curves": curves,
        "images": 80,
        "test_images": 20,
        "size": 8,
        "recipe": {"epochs": 2, "seed": 0, "batch": 8, "baseline_epochs": 1},
        "machine": "a machine",
        "versions": {"torch": "2"},
        "commit": "abc",
        **changes,
    }


BROKEN = {
    "path": {"below_path": 2.3},
    "landing": {"landing": {"gates": 4, "macs": 0.006}},
    "loss": {"loss_ratio": 1.21},
}


@pytest.mark.parametrize("part", BROKEN)
def test_every_part_of_the_claim_can_fail(part: str) -> None:
    good, bad = stored(), stored(**BROKEN[part])
    assert steering.broken(good) == [] and steering.broken(bad) == [part]
    assert steering.broken(stored(above_path=2.1)) == ["path"]
    lines = steering_page.table([good, bad])
    assert lines[2].endswith("| holds |") and lines[3].endswith(f"| does not hold: {part} |")
    said = steering_page.verdict([good, bad])
    assert "holds in 1 of 2 runs" in said


def test_the_sentences_name_the_worst_and_its_cause() -> None:
    rows = [stored(), stored(below_path=2.3), stored(above_path=2.5, channels_in_it=3)]
    said = steering_page.verdict(rows)
    assert "an accuracy of 70.0% to 70.0%" in steering_page.scale(rows)
    assert "of the path in 1 runs (largest distance 2.50)" in said
    assert "previous epoch in 3 runs" in said
    assert steering_page.cause(rows[:1]) == []
    (why,) = steering_page.cause(rows)
    assert "the 2 runs that leave the path, 1 fall below" in why
    assert "In 1 of them" in why and "2.40 to 2.40 points" in why
    assert "single channel" not in steering_page.cause(rows[2:])[0]


def headline(folder: Path, name: str, points: float) -> None:
    """Write ten epochs in which the MACs fall by a point each, and by `points` in the fifth."""
    rows, macs = [], 1.0
    for epoch in range(1, 11):
        macs -= (points if epoch == 5 else 1.0) / 100
        rows.append(
            {
                "stage": "prune",
                "epoch": epoch,
                "macs": macs,
                "lam": 1.0,
                "histogram": [1, *[0] * 18, 1],
                "recalibrated_loss": 1 / epoch,
            }
        )
    (folder / name).mkdir(parents=True)
    (folder / name / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {"schedule": {"done": 0.5}, "epochs": 10}
    (folder / name / "card.json").write_text(json.dumps({"recipe": recipe}))


def test_the_cut_at_the_deadline_is_read_from_the_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    assert steering_page.earlier() == [
        f"A run of the earlier version is not stored: {steering_page.EARLIER[0]}."
    ]
    for number, name in enumerate(steering_page.EARLIER):
        headline(tmp_path, name, 10.0 + number)
    said, table, _ = steering_page.earlier()
    assert "10.0 to 15.0 points of the MACs in a single epoch" in said
    assert "| 5 | 96.00 % | 86.00 % | 10.00 | 1.00 | 0.25 | 0.20 |" in table
    figure = steering_page.headline(steering_page.EARLIER)
    assert len(figure.axes) == 4 * len(steering_page.EARLIER)


def test_the_steering_of_a_long_run_is_read_from_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    assert "is not stored" in steering_page.present()[0]
    names = (*steering_page.HEADLINES, *steering_page.EXTREMES)
    for name in names:
        planned(tmp_path, name)
    off = json.loads((tmp_path / names[0] / "log.jsonl").read_text().splitlines()[2])
    assert steering_page.long_run(names[0]) == pytest.approx(
        (
            0,
            50 * share(4, 5),
            50 * max(share(k, k + 1) for k in range(4)),
            1,
            1,
            2,
            50 * share(1, 2),
            None,
        )
    )
    write_rows(tmp_path / names[0], {3: {**off, "macs": off["macs"] - 0.021}})
    write_rows(tmp_path / names[1], {3: {**off, "recalibrated_loss": 1.25}})
    assert steering_page.long_run(names[0]).apart == pytest.approx(-2.1)
    assert steering_page.long_run(names[1]).ratio == pytest.approx(1.25)
    said = steering_page.present()[0]
    assert f"in {len(names) - 2} of {len(names)} runs" in said
    assert f"In {names[1]} the loss rose by a factor of 1.25 in epoch 3" in said
    assert f"{50 * share(2, 3):.1f} points of the MACs were closed and the learning" in said
    assert "rate rose (warm-up of 3 epochs)" in said


def test_a_rise_that_the_same_training_has_without_pruning_is_not_the_steerings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    for name, loss in (("run-10", 2.6), ("run-70", 3.0), ("run-unpruned", 2.5)):
        planned(tmp_path, name)
        row = {"stage": "prune", "epoch": 2, "macs": 1 - 0.5 * share(0, 2)}
        write_rows(tmp_path / name, {2: {**row, "recalibrated_loss": loss}})
    kept, broken = steering_page.long_run("run-10"), steering_page.long_run("run-70")
    assert kept.ratio == pytest.approx(2.6) and kept.beyond == pytest.approx(2.6 / 2.5)
    assert kept.keeps
    assert broken.beyond == pytest.approx(1.2) and broken.risen == 2
    write_rows(tmp_path / "run-70", {2: {**row, "recalibrated_loss": 3.1}})
    assert not steering_page.long_run("run-70").keeps


def share(start: int, end: int) -> float:
    """Return the part of its way that the path covers between two of ten epochs."""
    steps = 10 * (steering_page.IMAGES // 500)
    at = [Schedule().path(epoch * steps // 10, steps) for epoch in (start, end)]
    return at[0] - at[1]


def planned(folder: Path, name: str) -> None:
    """Write a run of ten epochs to half of the MACs, exactly on its path."""
    schedule = dataclasses.asdict(Schedule())
    recipe = {"schedule": schedule, "epochs": 10, "batch": 500, "warm_up": 3.0}
    (folder / name).mkdir()
    content = {"recipe": recipe, "budget": {"macs": 0.5}}
    (folder / name / "card.json").write_text(json.dumps(content))
    rows = {
        epoch: {
            "stage": "prune",
            "epoch": epoch,
            "macs": 1 - 0.5 * share(0, epoch),
            "recalibrated_loss": 1.0,
        }
        for epoch in range(1, 11)
    }
    write_rows(folder / name, rows)


def write_rows(folder: Path, changed: dict[int, dict[str, Any]]) -> None:
    """Write rows of a log by epoch, and keep the other rows."""
    file = folder / "log.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    rows = {row["epoch"]: row for row in map(json.loads, lines)} | changed
    file.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))


def test_the_figure_has_a_row_for_every_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [stored(), stored(macs=0.7), stored(network="vgg_small")]
    monkeypatch.setattr(steering_page, "read", lambda: dict(enumerate(rows)))
    figure = steering_page.steering()
    assert len(figure.axes) == 6
    drawn = [line.get_ydata() for line in figure.axes[0].lines]
    assert [list(values) for values in drawn[:2]] == [[1.0, 0.7, 0.5]] * 2  # type: ignore[arg-type]
    assert "macs=0.7" in {text.get_text() for text in figure.legends[0].get_texts()}
    monkeypatch.setattr(steering_page, "read", dict)
    with pytest.raises(figures.Missing):
        steering_page.steering()
    assert steering_page.section() == ["Not measured yet."]
