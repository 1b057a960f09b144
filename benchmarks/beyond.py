"""Beyond classification: what docs/results.md says of DeepLabV3+ and of style transfer."""

import json
from pathlib import Path
from typing import Any

import figures
from experiments import EXPERIMENTS
from figures import PAPER
from polarprune.experiments.recipes import RECIPES

NOT_YET = "not run yet"
BRANCHES = {  # of the pyramid, and the groups of their channels
    "1 × 1": "pyramid.ways.0.0", "rate 6": "pyramid.ways.1.0", "rate 12": "pyramid.ways.2.0",
    "rate 18": "pyramid.ways.3.0", "mean": "pyramid.whole.0",
}  # fmt: skip
WIDEST = "rate 18"
FREQUENT = ("background", "cat", "cow", "dog", "horse", "sheep")  # what most of the photos show


def cards(folder: Path, stem: str) -> list[dict[str, Any]]:
    """The largest network first."""
    found = [json.loads(file.read_text()) for file in folder.glob(f"{stem}-*/card.json")]
    return sorted(found, key=lambda card: -float(card["macs_share"]))


def of(card: dict[str, Any], stage: str) -> float:
    rows = [row for row in card["table"] if row["stage"] == stage]
    return float(rows[0][card["measure"]])


def picture(name: str) -> list[str]:
    return [f"![{name}](figures/{name}.png)"] if (figures.OUT / f"{name}.png").exists() else []


def where(card: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in card["versions"].items())
    return f"{card['machine']} ({versions})"


# --- segmentation ---------------------------------------------------------------------------------


def segmentation(folder: Path) -> list[str]:
    """Parts of the page."""
    runs, paper = cards(folder, "voc"), PAPER["voc"]
    if not runs:
        return [NOT_YET]
    first = runs[0]
    full = [str(first["widths"][group][1]) for group in BRANCHES.values()]
    lines = [
        "| paper: FLOPs left | mIoU | ours: MACs left | mIoU | params left | "
        f"{' | '.join(BRANCHES)} |",
        "|---" * (5 + len(BRANCHES)) + "|",
        f"| 100 | {100 * paper['baseline']:.1f} | 100 | {100 * of(first, 'baseline'):.1f} | 100 | "
        f"{' | '.join(full)} |",
    ]
    for run in runs:
        near = min(range(4), key=lambda k: abs(paper["ratio"][k] - 100 * run["macs_share"]))
        left = [str(run["widths"][group][0]) for group in BRANCHES.values()]
        lines.append(
            f"| {paper['ratio'][near]} | {100 * paper['mIoU'][near]:.1f} | "
            f"{100 * run['macs_share']:.1f} | **{100 * of(run, 'after removal'):.1f}** | "
            f"{100 * run['params_share']:.1f} | {' | '.join(left)} |"
        )
    shown = picture("masks")
    told = (
        "Photos with one large animal each that no network learned from: masks drawn by hand, by "
        "the whole network and by the pruned ones. The photos belong to others and are left out "
        "([pictures.py](../benchmarks/pictures.py) `--photos` puts them in)."
    )
    parts = [_setting(first, folder), "\n".join(lines), _seen(runs)]
    return [*parts, told, *shown] if shown else parts


def _setting(card: dict[str, Any], folder: Path) -> str:
    ours, paper = card["recipe"], RECIPES["deeplabv3plus"]
    log = (folder / "voc-backbone" / "log.jsonl").read_text().splitlines()
    backbone = json.loads(log[-1])
    return (
        f"DeepLabV3+ with a ResNet-50, output stride 16, mIoU in percent after removal without "
        f"fine-tuning; the last columns are the channels left in each branch of the pyramid. This "
        f"is not the paper's setting: {card['trained_on']} photos to learn from and "
        f"{card['scored_on']} to score on, mostly of animals (part of VOC 2012, own split), where "
        f"others have 10,582 and 1,449; the backbone learned from CIFAR-10, enlarged to 128 × "
        f"128 ({backbone['epochs']} epochs, {100 * backbone['accuracy']:.1f} % on its test set), "
        f"the paper's from ImageNet; {ours['baseline_epochs']} + {ours['epochs']} epochs, batches "
        f"of {ours['batch']} at a rate of {ours['lr']:g} for all layers, the paper has "
        f"{paper.lr:g} for the head and a tenth of it for the backbone. Gates begin with a rate of "
        f"{ours['lr'] * ours['schedule']['gate_lr']:.0e} and ε ends as in the paper, after fewer "
        f"steps. One run each, on {where(card)}."
    )


def _seen(runs: list[dict[str, Any]]) -> str:
    left = {
        f"{100 * run['macs_share']:.0f} %": {
            name: run["widths"][group][0] for name, group in BRANCHES.items()
        }
        for run in runs
    }
    told = [
        f"at {share}: {', '.join(name for name in widths if not widths[name])}"
        for share, widths in left.items()
        if not all(widths.values())
    ]
    same = runs[0]["widths"][BRANCHES[WIDEST]][0] == 0
    least = [share for share, widths in left.items() if widths[WIDEST] == min(widths.values())]
    also = f"; it keeps the fewest channels of all, or as few, at {', '.join(least)}"
    return (
        f"Branches that closed as a whole: {'; '.join(told) or 'none'}. The paper saw the one of "
        f"{WIDEST} vanish at {PAPER['voc']['ratio'][0]} %, "
        f"{'and so do we' if same else 'which is not what happens here'}"
        f"{also if least and not same else ''}. {_classes(runs)} {_alike(runs)}"
    )


def _classes(runs: list[dict[str, Any]]) -> str:
    """Of which the mean is made."""
    shares = [run["IoU"] for run in runs]
    rare = [name for name in shares[0] if all(iou.get(name, 0.0) < 0.1 for iou in shares)]
    means = [100 * sum(iou[name] for name in FREQUENT) / len(FREQUENT) for iou in shares]
    return (
        f"{len(rare)} of the {len(shares[0])} classes that occur stay below 10 % in every pruned "
        f"network; over {', '.join(FREQUENT[:-1])} and {FREQUENT[-1]} they reach "
        f"{', '.join(f'{mean:.1f}' for mean in means)} % (not stored for the whole network)."
    )


def _alike(runs: list[dict[str, Any]]) -> str:
    exact = sum(run["identical_predictions"] for run in runs)
    told = f"Every pixel is named alike before and after removal in {exact} of {len(runs)} networks"
    if exact == len(runs):
        return f"{told}."
    off = max(abs(of(run, "after removal") - of(run, "before removal")) for run in runs)
    return f"{told}; the mIoU of the others differs by {100 * off:.1g} points at most."


# --- style transfer -------------------------------------------------------------------------------


def painting(folder: Path) -> list[str]:
    runs = cards(folder, "style")
    if not runs:
        return [NOT_YET]
    run = runs[0]
    before, after = of(run, "baseline"), of(run, "after removal")
    recipe = run["recipe"]
    told = (
        f"The feed-forward network of Johnson et al. at {100 * run['macs_share']:.1f} % of its "
        f"MACs (the paper: {' and '.join(str(share) for share in PAPER['style']['ratio'])} %): the "
        f"perceptual loss on {run['scored_on']} photos that it did not see is {after:,.0f}; that "
        f"of the whole network, trained half as long, is {before:,.0f}. Not as in the paper: "
        f"features are those of our pruned VGG-16 for CIFAR-10 (no other weights were at hand), "
        f"which was taught on small images and leaves dotted spots, scaled by a number that was "
        f"found by eye; the style is drawn by a script; {run['trained_on']} photos of VOC, "
        f"{recipe['baseline_epochs']} + {recipe['epochs']} epochs. One run, on {where(run)}."
    )
    return [told, *picture("paintings")]


def in_plain_mode(folder: Path) -> list[str]:
    """Runs by the paper's steps: ablations, and its recipe to the end."""
    names = [name for name in EXPERIMENTS if name.startswith(("plain-", "paper-"))]
    found = {name: folder / name / "card.json" for name in names}
    stored = {name: json.loads(p.read_text(encoding="utf-8")) for name, p in found.items()
              if p.exists()}  # fmt: skip
    pruned = [name for name in names if EXPERIMENTS[name].macs + EXPERIMENTS[name].lam
              + EXPERIMENTS[name].aim > 0]  # fmt: skip
    if not stored:
        told = "runs in plain mode, and of the paper's recipe to its end"
        return [f"The {len(pruned)} {told}: {NOT_YET}."]
    lines = ["| run | λ or budget | MACs left | after removal |", "|---|---|---|---|"]
    for name, card in stored.items():
        goal = ", ".join(f"{key} {value:g}" for key, value in card["budget"].items())
        right = next(r["accuracy"] for r in card["table"] if r["stage"] == "after removal")
        lines.append(f"| {name} | {goal} | {100 * card['macs_share']:.2f} | {100 * right:.2f} |")
    missing = ", ".join(name for name in pruned if name not in stored)
    return ["\n".join(lines), *([f"{NOT_YET.capitalize()}: {missing}."] if missing else [])]
