"""What the page of results says about the paper's settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.pages import paper_settings as page


def store(root: Path, name: str, budget: dict[str, float], share: float, **more: Any) -> None:
    """Write a card as `Run` does."""
    scores = {
        "baseline": 0.94,
        "before removal": 0.932,
        "after removal": 0.931,
        "after fine-tuning": 0.933,
    }
    card = {
        "budget": budget,
        "macs_share": share,
        "table": [{"stage": stage, "accuracy": score} for stage, score in scores.items()],
        "machine": "a machine",
        "versions": {"torch": "2"},
        "recipe": {"epochs": 20},
        **more,
    }
    (root / name).mkdir()
    (root / name / "card.json").write_text(json.dumps(card))


def test_runs_that_are_not_stored_are_named(tmp_path: Path) -> None:
    settings, table, ablations = page.section(tmp_path)
    assert "350 epochs for the baseline and 350 while pruning" in settings
    assert "a machine" not in settings
    assert table.count("not run yet") == 2 * len(page.PUBLISHED) == 8
    assert ablations.endswith("ablations with the published proximal step were not run yet.")


def test_every_stage_of_the_papers_table_is_shown(tmp_path: Path) -> None:
    store(tmp_path, "paper-vgg16-31-budget", {"macs": 0.3055}, 0.30541)
    store(tmp_path, "paper-vgg16-31-plain", {"lam": 3.4567}, 0.2915)
    settings, table, _ = page.section(tmp_path)
    assert settings.endswith("One run each, on a machine (torch 2).")
    paper = "| VGG-16 | 93.89 | 30.55 | 93.99 | +0.10"
    scores = "93.20 | 93.10 | 93.30 | -0.90 |"
    assert f"{paper} | fixed λ 3.46 | 94.00 | 29.15 | {scores}" in table
    assert f"{paper} | budget | 94.00 | 30.54 | {scores}" in table
    lines = table.splitlines()
    assert {line.count("|") for line in lines} == {13} and "not run yet" in lines[2]


def test_short_runs_and_ablations_are_those_that_are_stored(tmp_path: Path) -> None:
    store(tmp_path, "search-vgg16-lam16", {"lam": 16}, 0.9047)
    store(tmp_path, "plain-reference", {"lam": 4.0}, 0.43)
    _, _, searched, rows, missing = page.section(tmp_path)
    assert searched.startswith("VGG-16: short runs of 20 epochs") and "90.5 % (16)" in searched
    assert rows.endswith("\n| plain-reference | lam 4 | 43.00 | 93.10 |")
    assert missing.startswith("Not run yet: plain-again1, ") and "plain-reference" not in missing
