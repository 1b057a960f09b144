"""The sections of docs/results.md on DeepLabV3+ and style transfer."""

import json
from pathlib import Path
from typing import Any

from benchmarks.pages import figures
from benchmarks.pages.figures import PAPER
from polarprune.experiments.presets import PRESETS

NOT_RUN = "not run yet"
BRANCHES = {  # of the pyramid, and the groups of their channels
    "1 × 1": "pyramid.ways.0.0",
    "rate 6": "pyramid.ways.1.0",
    "rate 12": "pyramid.ways.2.0",
    "rate 18": "pyramid.ways.3.0",
    "mean": "pyramid.whole.0",
}
WIDEST = "rate 18"
FREQUENT = ("background", "cat", "cow", "dog", "horse", "sheep")  # the most frequent classes


def cards(folder: Path, stem: str) -> list[dict[str, Any]]:
    """Return the cards of a kind of run, largest network first."""
    found = [json.loads(file.read_text()) for file in folder.glob(f"{stem}-*/card.json")]
    return sorted(found, key=lambda card: -float(card["macs_share"]))


def score(card: dict[str, Any], stage: str) -> float:
    rows = [row for row in card["table"] if row["stage"] == stage]
    return float(rows[0][card["measure"]])


def figure(name: str) -> list[str]:
    return [f"![{name}](figures/{name}.png)"] if (figures.OUT / f"{name}.png").exists() else []


def where(card: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in card["versions"].items())
    return f"{card['machine']} ({versions})"


# --- segmentation ---------------------------------------------------------------------------------


def segmentation(folder: Path) -> list[str]:
    """Return the paragraphs of the section."""
    runs, paper = cards(folder, "voc"), PAPER["voc"]
    if not runs:
        return [NOT_RUN]
    first = runs[0]
    full = [str(first["widths"][group][1]) for group in BRANCHES.values()]
    lines = [
        "| paper: FLOPs left | mIoU | ours: MACs left | mIoU | params left | "
        f"{' | '.join(BRANCHES)} |",
        "|---" * (5 + len(BRANCHES)) + "|",
        f"| 100 | {100 * paper['baseline']:.1f} | 100 | {100 * score(first, 'baseline'):.1f} | "
        f"100 | {' | '.join(full)} |",
    ]
    for run in runs:
        near = min(range(4), key=lambda k: abs(paper["ratio"][k] - 100 * run["macs_share"]))
        left = [str(run["widths"][group][0]) for group in BRANCHES.values()]
        lines.append(
            f"| {paper['ratio'][near]} | {100 * paper['mIoU'][near]:.1f} | "
            f"{100 * run['macs_share']:.1f} | **{100 * score(run, 'after removal'):.1f}** | "
            f"{100 * run['params_share']:.1f} | {' | '.join(left)} |"
        )
    shown = figure("masks")
    caption = (
        "Masks of test photos with one large animal each: drawn by hand, by the baseline and by "
        "the pruned networks. The photos may not be redistributed, so they are left out; "
        "`--photos` of [example_images.py](../benchmarks/pages/example_images.py) includes them."
    )
    parts = [_setting(first, folder), "\n".join(lines), _findings(runs)]
    return [*parts, caption, *shown] if shown else parts


def _setting(card: dict[str, Any], folder: Path) -> str:
    ours, paper = card["recipe"], PRESETS["deeplabv3plus"]
    log = (folder / "voc-backbone" / "log.jsonl").read_text().splitlines()
    backbone = json.loads(log[-1])
    return (
        f"DeepLabV3+ with a ResNet-50 of output stride 16: mIoU in percent after removal, without "
        f"fine-tuning. The last columns are the channels that are left in each branch of the "
        f"pyramid.\n\n"
        f"This is not the paper's setting, so only the trend can be compared:\n\n"
        f"- **Data.** We have {card['trained_on']} training photos and {card['scored_on']} test "
        f"photos, mostly of animals (a part of VOC 2012 with our own split). The usual numbers are "
        f"10,582 and 1,449.\n"
        f"- **Backbone.** Ours was trained on CIFAR-10, enlarged to 128 × 128 "
        f"({backbone['epochs']} epochs, test accuracy {100 * backbone['accuracy']:.1f} %), the "
        f"paper's on ImageNet.\n"
        f"- **Training.** Ours takes {ours['baseline_epochs']} + {ours['epochs']} epochs with "
        f"batches of {ours['batch']} and a learning rate of {ours['lr']:g} for all layers. The "
        f"paper's learning rate is {paper.lr:g} for the head and a tenth of it for the backbone. "
        f"Our learning rate of the gates starts at "
        f"{ours['lr'] * ours['schedule']['gate_lr']:.0e}, and ε ends at the paper's value after "
        f"fewer steps.\n\n"
        f"One run each, on {where(card)}."
    )


def _findings(runs: list[dict[str, Any]]) -> str:
    """Return which branches closed, and how the paper's finding compares."""
    left = {
        f"{100 * run['macs_share']:.0f} %": {
            name: run["widths"][group][0] for name, group in BRANCHES.items()
        }
        for run in runs
    }
    closed = [
        f"{', '.join(name for name in widths if not widths[name])} at {share}"
        for share, widths in left.items()
        if not all(widths.values())
    ]
    same = runs[0]["widths"][BRANCHES[WIDEST]][0] == 0
    fewest = [share for share, widths in left.items() if widths[WIDEST] == min(widths.values())]
    here = "which also happens here." if same else "which does not happen here."
    if fewest and not same:
        here += f" It has the fewest channels, or as few as another, at {', '.join(fewest)}."
    return (
        f"Closed branches: {'; '.join(closed) or 'none'}. In the paper, the branch of {WIDEST} "
        f"closes at {PAPER['voc']['ratio'][0]} %, {here} {_classes(runs)} {_pixels(runs)}"
    )


def _classes(runs: list[dict[str, Any]]) -> str:
    """Return how the mean splits into frequent and rare classes."""
    shares = [run["IoU"] for run in runs]
    rare = [name for name in shares[0] if all(iou.get(name, 0.0) < 0.1 for iou in shares)]
    means = [100 * sum(iou[name] for name in FREQUENT) / len(FREQUENT) for iou in shares]
    return (
        f"{len(rare)} of the {len(shares[0])} classes in the test photos have an IoU below 10 % in "
        f"every pruned network. The mean IoU of {', '.join(FREQUENT[:-1])} and {FREQUENT[-1]} is "
        f"{', '.join(f'{mean:.1f}' for mean in means)} % (it was not stored for the baseline)."
    )


def _pixels(runs: list[dict[str, Any]]) -> str:
    """Return whether removal changed the prediction of any pixel."""
    exact = sum(run["identical_predictions"] for run in runs)
    text = f"Predictions before and after removal are equal in {exact} of {len(runs)} networks"
    if exact == len(runs):
        return f"{text}."
    off = max(abs(score(run, "after removal") - score(run, "before removal")) for run in runs)
    return f"{text}; the mIoU of the others differs by at most {100 * off:.1g} points."


# --- style transfer -------------------------------------------------------------------------------


def style_transfer(folder: Path) -> list[str]:
    """Return the paragraphs of the section."""
    runs = cards(folder, "style")
    if not runs:
        return [NOT_RUN]
    run = runs[0]
    before, after = score(run, "baseline"), score(run, "after removal")
    settings = run["recipe"]
    text = (
        f"The feed-forward network of Johnson et al. at {100 * run['macs_share']:.1f} % of its "
        f"MACs (paper: {' and '.join(str(share) for share in PAPER['style']['ratio'])} %). Its "
        f"perceptual loss on {run['scored_on']} test photos is {after:,.0f}; that of the baseline, "
        f"which was trained half as long, is {before:,.0f}.\n\n"
        f"Differences from the paper:\n\n"
        f"- The features come from our pruned VGG-16 for CIFAR-10, because no other weights were "
        f"available. It was trained on small images, which causes dotted spots. Its features were "
        f"scaled by a factor chosen by eye.\n"
        f"- The style image is drawn by a script.\n"
        f"- There are {run['trained_on']} training photos of VOC, and "
        f"{settings['baseline_epochs']} + {settings['epochs']} epochs.\n\n"
        f"One run, on {where(run)}."
    )
    return [text, *figure("paintings")]
