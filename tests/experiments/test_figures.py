"""The paper's figures from stored runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from benchmarks.measure import experiments
from benchmarks.measure.lambda_search import lambda_for
from benchmarks.pages import captions, figures, significance
from benchmarks.pages import results as results_page
from polarprune.experiments.presets import PRESETS

EPOCHS = 20


def stored(folder: Path, name: str, number: int) -> None:
    """Write a made-up run, as experiments.py stores it."""
    experiment = experiments.EXPERIMENTS[name]
    left = experiment.macs or 1 - number / 30
    table = [
        {"stage": stage, "accuracy": 0.9 + number / 1000 + more}
        for stage, more in (
            ("baseline", 0.01),
            ("before removal", 0.0),
            ("after removal", 0.0),
            ("after fine-tuning", 0.002 * (number % 2)),
        )
    ][: 4 if experiment.tune else 3]
    card = {
        "network": PRESETS[experiment.preset].network,
        "method": experiment.method,
        "table": table,
        "macs_share": left,
        "recipe": dataclasses.asdict(PRESETS[experiment.preset]),
        "budget": {"macs": experiment.macs} if experiment.macs else {"lam": experiment.lam},
    }
    rows = []
    for epoch in range(1, EPOCHS + 1):
        t = epoch / EPOCHS
        closed, middle = round(80 * min(1, 2 * t)), round(20 * max(0, 1 - 2 * t))
        row: dict[str, Any] = {
            "stage": "prune",
            "epoch": epoch,
            "loss": 2 - 1.5 * t,
            "macs": 1 - (1 - left) * min(1, 2 * t),
            "histogram": [closed, *[middle] * 9, *[middle] * 9, 120 - closed],
            "norms": [max(0, 60 - 4 * k) for k in range(19)] + [1],
        }
        if epoch % 5 == 0:
            row["recalibrated_loss"] = 2.2 - 1.5 * t
        rows.append(row)
    (folder / name).mkdir(parents=True)
    (folder / name / "card.json").write_text(json.dumps(card))
    twice = [*rows[:7], *rows[4:]]  # was cut off after the seventh, went on after the fourth
    (folder / name / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in twice))


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(figures, "OUT", tmp_path / "figures")
    return tmp_path / "results"


@pytest.fixture
def full(results: Path) -> Path:
    for number, (name, experiment) in enumerate(experiments.EXPERIMENTS.items()):
        if experiment.kind == "cifar10" and name != "voc-backbone":
            stored(results, name, number)
    return results


def test_all_figures_are_drawn_from_stored_runs(full: Path) -> None:
    assert figures.main([]) == []
    drawn = {path.stem for path in figures.OUT.glob("*.png")}
    assert drawn == set(figures.FIGURES)
    assert all(path.stat().st_size > 5000 for path in figures.OUT.glob("*.png"))


def test_figures_without_runs_are_named(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(figures.FIGURES) - set(figures.main([])) == {"gate", "algorithm1", "imagenet"}
    assert "histograms: not drawn, resnet56-47-seed0 is not in results/" in capsys.readouterr().out


def heights(figure: Figure, panel: int) -> list[float]:
    return [patch.get_height() for patch in figure.axes[panel].patches]  # type: ignore[attr-defined]


def test_bars_are_shares_of_the_gates(full: Path) -> None:
    figure = figures.histograms()
    assert [axis.get_title() for axis in figure.axes][::6] == ["epoch 1", "epoch 20"]
    last = figures.log(figures.MAIN)[-1]["histogram"]
    assert heights(figure, 6) == pytest.approx([count / sum(last) for count in last])
    norms = figures.log("resnet56-47-lasso")[-1]["norms"]
    assert heights(figures.lasso(), 0) == pytest.approx([count / sum(norms) for count in norms])


def test_a_resumed_run_has_every_epoch_once(full: Path) -> None:
    assert [row["epoch"] for row in figures.log(figures.MAIN)] == list(range(1, EPOCHS + 1))


def test_the_correlation_is_of_all_lambdas(full: Path) -> None:
    found, names = figures.correlation()
    assert names == [f"ablation-lam{lam}" for lam in experiments.LAMBDAS] and len(names) >= 6
    before, after = ([figures.score(n, s) for n in names] for s in figures.ENDS)
    mean = [sum(v) / len(v) for v in (before, after)]
    pairs = list(zip(before, after, strict=True))
    top = sum((x - mean[0]) * (y - mean[1]) for x, y in pairs)
    below = (
        sum((x - mean[0]) ** 2 for x in before) * sum((y - mean[1]) ** 2 for y in after)
    ) ** 0.5
    assert found == pytest.approx(top / below) and 0.5 < found < 1


def test_the_papers_example_settles_after_two_sweeps() -> None:
    lines = figures.algorithm1().axes[0].lines
    assert len(lines) == 2
    for line in lines:
        values = list(line.get_ydata())  # type: ignore[arg-type]
        assert values[0] > values[2] == values[-1]


def test_every_number_of_the_papers_tables_is_stored() -> None:
    paper = figures.PAPER
    for network in ("mobilenet_v1", "mobilenet_v2", "resnet50"):
        row = paper["imagenet"][network]
        assert len(row["ratio"]) == len(row["accuracy"]) and row["ratio"] == sorted(row["ratio"])
    assert [len(paper["cifar10"][name]) for name in ("vgg16", "resnet56", "mobilenetv2")] == [
        6,
        8,
        4,
    ]
    assert len(paper["voc"]["ratio"]) == len(paper["voc"]["mIoU"]) == 4
    assert all("source" in paper[key] for key in ("cifar10", "imagenet", "voc", "style"))


def test_every_figure_has_a_sentence_with_its_numbers(full: Path) -> None:
    assert set(captions.CAPTIONS) == set(captions.TITLES) == set(figures.FIGURES)
    said = {name: say() for name, say in captions.CAPTIONS.items()}
    found, names = figures.correlation()
    assert f"{found:.3f}" in said["consistency"] and f"{len(names)} values" in said["consistency"]
    assert captions.DISAGREES in said["consistency"]  # 0.9 is not 0.993
    rows = figures.log(figures.MAIN)
    shares = [sum(c[1:-1]) / sum(c) for c in (rows[8]["histogram"], rows[-1]["histogram"])]
    assert f"{shares[0]:.1%} after epoch 9, the last one before" in said["histograms"]
    assert (
        f"{shares[1]:.1%} at the end. The value at the end is not a finding" in said["histograms"]
    )
    assert "the paper." not in said["histograms"]  # the floor and the last ε force it
    assert "Of the paper's 4 GDP results, 4 were run here" in said["accuracy"]
    gap = 100 * (len(experiments.DECAYS) - 1) / 1000
    assert f"{gap:.2f} points over {len(experiments.DECAYS)} decays" in said["epsilon"]


def test_the_page_shows_what_was_drawn_and_names_the_rest(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures.main([])
    parts = results_page.figure_section()
    heading = f"### {captions.TITLES['gate']}"
    assert parts[0].startswith(f"{heading}\n\n![gate](figures/gate.png)") and len(parts) == 4
    assert "consistency" in parts[-1] and "imagenet" not in parts[-1]


def test_the_rule_for_two_single_runs() -> None:
    assert significance.smallest_difference([1.0, 3.0]) == pytest.approx(4.0)  # a deviation of √2
    calm, here = [1.0, 2.0, 1.0, 2.0], slice(4, 5)
    assert significance.is_sudden([*calm, 2.7], here) and not significance.is_sudden(
        [*calm, 2.6], here
    )


def rewritten(name: str, change: Any) -> None:
    """Apply a change to every row of a stored log."""
    rows = figures.log(name)
    for row in rows:
        change(row)
    path = figures.RESULTS / name / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def cut_at_once(row: dict[str, Any]) -> None:
    if row["epoch"] < EPOCHS // 2:
        row["macs"] = 1 - (1 - row["macs"]) / 2


def collapsed(row: dict[str, Any]) -> None:
    if row["epoch"] == EPOCHS // 2 + 1:
        row["loss"] *= 2
    if row["epoch"] == EPOCHS // 2:
        row["accuracy"] = 0.141


@pytest.mark.parametrize("change", [cut_at_once, collapsed])
def test_one_run_of_the_table_that_collapses_is_not_stable(full: Path, change: Any) -> None:
    count = len(figures.headline())
    said = captions.stability()
    assert f"In {count} of {count} runs" in said and f"is stable. {captions.AGREES}" in said
    rewritten("vgg16-31", change)
    said = captions.stability()
    assert f"In {count - 1} of {count} runs" in said
    assert f"is not stable. {captions.DISAGREES}" in said
    assert ("| 14.1 % |" in said) == (change is collapsed)


def made_earlier(name: str) -> None:
    """Rewrite a stored card as one of the earlier version, which closed much in one step."""
    path = figures.RESULTS / name / "card.json"
    card = json.loads(path.read_text())
    del card["recipe"]["schedule"]["window"]
    path.write_text(json.dumps(card))


def test_runs_of_the_earlier_steering_are_said_to_be(full: Path) -> None:
    assert "closed along the planned path" in captions.stability()
    everything = figures.headline()
    made_earlier(figures.MAIN)
    assert figures.headline() == [name for name in everything if name != figures.MAIN]
    assert "This run is of an earlier version" in captions.histograms()
    for name in figures.headline():
        made_earlier(name)
    assert figures.headline() == everything
    count = len(everything)
    assert f"{count} of {count} runs are of an earlier version" in captions.stability()


def test_runs_that_were_repeated_are_not_in_the_figures(full: Path) -> None:
    (full / figures.MAIN).rename(full / f"{figures.SUPERSEDED}-{figures.MAIN}")
    assert not {figures.MAIN, f"{figures.SUPERSEDED}-{figures.MAIN}"} & set(figures.tables())


def rescored(name: str, accuracy: float) -> None:
    path = figures.RESULTS / name / "card.json"
    card = json.loads(path.read_text())
    card["table"][2]["accuracy"] = accuracy
    path.write_text(json.dumps(card))


@pytest.mark.parametrize("robust", [True, False])
def test_robust_is_what_seeds_explain(full: Path, robust: bool) -> None:
    names = [captions.REFERENCE, *figures.ablations("again")]
    for number, name in enumerate(names):  # 0.1 or 1 points apart
        rescored(name, 0.9 + number * (0.01 if robust else 0.001))
    gap = max(
        max(found.values()) - min(found.values()) for found in (figures.decays(), figures.starts())
    )
    assert (gap <= significance.smallest_difference(captions.seed_scores())) == robust
    said = captions.epsilon()
    assert (captions.AGREES in said) == robust == ("not robust" not in said)
    assert "The runs are with a budget" in said


def test_a_correlation_is_compared_by_its_own_uncertainty() -> None:
    assert (
        captions.is_same_correlation(0.961, 7)
        and not captions.is_same_correlation(0.961, 40)
        and not captions.is_same_correlation(0.9, 7)
    )


def test_lambda_is_read_off_short_runs() -> None:
    cards = [
        {"macs_share": share, "budget": {"lam": lam}, "recipe": {"epochs": 20}}
        for share, lam in ((0.8, 1.0), (0.4, 4.0))
    ]
    assert lambda_for(0.6, cards, 20) == pytest.approx(2)  # the middle of log λ
    assert lambda_for(0.4, cards, 200) == pytest.approx(0.4)  # ten times as long
    for share, known in ((0.1, cards), (0.9, cards), (0.6, [])):
        with pytest.raises(ValueError, match="not between the shares that short runs leave"):
            lambda_for(share, known, 20)
