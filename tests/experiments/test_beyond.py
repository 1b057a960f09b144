"""What the page of results says about segmentation and style transfer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pages import segmentation_and_style as page
from polarprune.experiments.presets import PRESETS


def card(
    root: Path,
    name: str,
    recipe: str,
    share: float,
    scores: tuple[float, float],
    measure: str,
    **more: Any,
) -> None:
    """Return a card as `Run` writes it."""
    stages = ("baseline", "before removal", "after removal")
    table = [{"stage": stage, measure: scores[stage != "baseline"]} for stage in stages]
    made = {
        "macs_share": share,
        "params_share": share / 2,
        "measure": measure,
        "table": table,
        "trained_on": 410,
        "scored_on": 100,
        "identical_predictions": True,
        "machine": "a machine",
        "recipe": dataclasses.asdict(PRESETS[recipe]),
        "versions": {"torch": "2.13.0"},
        **more,
    }
    (root / name).mkdir()
    (root / name / "card.json").write_text(json.dumps(made))


@pytest.mark.parametrize("closes", [True, False])
def test_segmentation_is_told_with_the_branches_that_closed(tmp_path: Path, closes: bool) -> None:
    (tmp_path / "voc-backbone").mkdir()
    row = {"stage": "baseline", "epochs": 30, "accuracy": 0.876}
    (tmp_path / "voc-backbone" / "log.jsonl").write_text(json.dumps(row) + "\n")
    for share, score in ((0.0499, 0.2), (0.3799, 0.31)):
        widths = {group: [7, 256] for group in page.BRANCHES.values()}
        widths[page.BRANCHES["rate 18"]][0] = 0 if closes else 5
        shares = dict.fromkeys(page.FREQUENT, score) | {"bird": 0.0}
        more = {"widths": widths, "IoU": shares}
        card(tmp_path, f"voc-{share}", "deeplabv3plus-scratch", share, (0.3, score), "mIoU", **more)
    setting, table, seen = page.segmentation(tmp_path)[:3]
    assert "410 training photos" in setting and "87.6 %" in setting and "on a machine" in setting
    assert table.splitlines()[2] == "| 100 | 77.4 | 100 | 30.0 | 100 |" + " 256 |" * 5
    left = " 7 | 7 | 7 | 0 | 7 |" if closes else " 7 | 7 | 7 | 5 | 7 |"
    assert table.splitlines()[3:] == [
        "| 38.4 | 77.9 | 38.0 | **31.0** | 19.0 |" + left,
        "| 5.2 | 66.6 | 5.0 | **20.0** | 2.5 |" + left,
    ]
    assert ("rate 18 at 38 %; rate 18 at 5 %" in seen) == closes == ("also happens here" in seen)
    assert ("fewest channels, or as few as another, at 38 %, 5 %." in seen) == (not closes)
    assert "1 of the 7 classes" in seen and "is 31.0, 20.0 %" in seen
    assert seen.endswith("2 of 2 networks.")


def test_pixels_that_are_named_otherwise_are_told(tmp_path: Path) -> None:
    card(
        tmp_path,
        "voc-5",
        "deeplabv3plus-scratch",
        0.05,
        (0.3, 0.2),
        "mIoU",
        identical_predictions=False,
    )
    (run,) = page.cards(tmp_path, "voc")
    run["table"][-1]["mIoU"] -= 4e-8
    assert "0 of 1 networks" in page._pixels([run]) and "4e-06 points" in page._pixels([run])


def test_style_transfer_is_told_with_both_losses(tmp_path: Path) -> None:
    card(tmp_path, "style-48", "stylenet", 0.4794, (1000.0, 1040.0), "perceptual loss")
    told = page.style_transfer(tmp_path)[0]
    assert "47.9 % of its MACs" in told and "is 1,040; " in told and "48.9 and 47.3 %" in told


def test_what_was_not_run_is_said(tmp_path: Path) -> None:
    assert page.segmentation(tmp_path) == page.style_transfer(tmp_path) == ["not run yet"]
