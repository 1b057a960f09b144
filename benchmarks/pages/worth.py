"""The sections of docs/results.md on thin networks, Tiny ImageNet and transfer.

python -m benchmarks.pages.worth    # draws worth.png, if its runs are stored
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from matplotlib.figure import Figure

from benchmarks.measure.experiments import (
    EXPERIMENTS,
    FEW,
    TINY,
    TRANSFER_MACS,
    TRANSFERRED,
    WORTH,
    percent,
)
from benchmarks.pages import figures
from benchmarks.pages.figure_style import BLUE, GREEN, GREY, ORANGE, PINK, panels
from benchmarks.pages.figures import NAMES, PAPER
from benchmarks.pages.segmentation_and_style import NOT_RUN
from polarprune.experiments.runs.referee import Entry
from polarprune.experiments.runs.referee_results import HEAD, cells, collect, verdict
from polarprune.experiments.runs.sweep_results import pipe_table

ACCURACY = SimpleNamespace(
    measure="accuracy", higher_is_better=True, shown=lambda score: f"{score:.2%}"
)
COMPARED = ("thin", "reinit", "magnitude", "torch-pruning")
FIRST = Entry("thin", "on Tiny ImageNet first")


def entries_of(stem: str) -> dict[Entry, str]:
    """Return the methods of a comparison, and how the names of their runs start."""
    own = {Entry("gdp"): f"{stem}-ours-seed", Entry("l0"): f"{stem}-l0-seed"}
    for method in COMPARED:
        for equal in ("cost", "epochs"):
            own[Entry(method, equal)] = f"{stem}-{method}-{equal}-seed"
    own[FIRST] = f"{stem}-thin-first-seed"
    names = tuple(EXPERIMENTS)
    return {entry: start for entry, start in own.items() if f"{start}0" in names}


def seeds_of(folder: Path, start: str) -> list[int]:
    """Return the seeds whose runs are stored."""
    known = [name for name in EXPERIMENTS if name.startswith(start)]
    return [int(n.removeprefix(start)) for n in known if (folder / n / "card.json").exists()]


def rows_of(folder: Path, stem: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of a comparison, ours first, and the names of methods that were not run.

    Without ours, all are missing.
    """
    entries = entries_of(stem)
    seeds = {entry: seeds_of(folder, start) for entry, start in entries.items()}
    ours = seeds[Entry("gdp")]
    missing = [f"{e.method} {e.equal}".strip() for e, found in seeds.items() if not found]
    if not ours:
        return [], [f"{entry.method} {entry.equal}".strip() for entry in entries]
    cards = {
        entry: [json.loads((folder / f"{entries[entry]}{s}/card.json").read_text()) for s in found]
        for entry, found in seeds.items()
        if found
    }
    return collect(cards, ACCURACY), missing


# --- ResNet-56 ------------------------------------------------------------------------------------


def worth(folder: Path) -> list[str]:
    """Return the paragraphs on ResNet-56."""
    parts = [
        "Would a smaller network that is trained from scratch be as good? We compare ours on "
        "CIFAR-10 with `thin`, a ResNet-56 whose widths are all scaled by the same factor, with "
        "`reinit`, which has the widths that ours found and new weights, and with other methods. "
        'Each is trained twice: at "equal cost" its training takes as many MACs as ours, at "equal '
        'epochs" as many epochs ([how](experiments.md#referee)). One baseline is the teacher of '
        "all. The 95 % intervals (Student's t) are over seeds, not over baselines."
    ]
    for macs, _ in WORTH:
        parts += _comparison(folder, f"worth-resnet56-{percent(macs)}", f"At {100 * macs:g} %")
    caption = "Accuracy against the MACs that are left; bars are standard deviations over seeds."
    drawn = (figures.OUT / "worth.png").exists() and bool(curves(folder))
    return [*parts, f"![worth](figures/worth.png)\n\n{caption}"] if drawn else parts


def _comparison(folder: Path, stem: str, title: str) -> list[str]:
    """Return a table of a comparison and what follows from it, or that it was not run."""
    rows, missing = rows_of(folder, stem)
    if not rows:
        return [f"{title} of the MACs: {NOT_RUN}."]
    table = pipe_table((*HEAD, "runs"), [(*cells(r, ACCURACY), str(len(r["seeds"]))) for r in rows])
    said = verdict(rows, ACCURACY)["sentences"] if len(rows) > 1 else []
    if len(rows[0]["seeds"]) == 1:
        said = ["One run each, so differences may be chance."]
    left = [f"{NOT_RUN.capitalize()}: {', '.join(missing)}."] if missing else []
    return [f"{title} of the MACs:", table.strip(), " ".join(said + left)]


def curves(folder: Path) -> dict[str, list[tuple[float, float, float]]]:
    """Return, for each method, its MACs, mean accuracy and deviation at every budget."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for macs, _ in WORTH:
        rows, _ = rows_of(folder, f"worth-resnet56-{percent(macs)}")
        for row in rows:
            name = f"{row['method']} {row['equal']}".strip()
            point = (row["macs_share"], row["score"], row["deviation"] or 0.0)
            found.setdefault(name, []).append(tuple(100 * number for number in point))
    return found


STYLES = {  # equal epochs: thinner and dashed
    "gdp": ("ours", BLUE, "-", "o"),
    "thin cost": ("thin, equal cost", ORANGE, "-", "s"),
    "thin epochs": ("thin, equal epochs", ORANGE, "--", "s"),
    "reinit cost": ("our widths, new weights, equal cost", GREEN, "-", "^"),
    "reinit epochs": ("our widths, new weights, equal epochs", GREEN, "--", "^"),
    "torch-pruning cost": ("Torch-Pruning, equal cost", PINK, "-", "D"),
    "torch-pruning epochs": ("Torch-Pruning, equal epochs", PINK, "--", "D"),
    "l0": ("l0", GREY, "-", "v"),
}


def figure(folder: Path) -> Figure:
    """Draw accuracy against MACs left, for all methods on ResNet-56."""
    drawn, (axis,) = panels(1, 6.8, 3.8)
    found = curves(folder)
    for name, (label, colour, dash, mark) in STYLES.items():
        if name in found:
            x, y, deviations = zip(*sorted(found[name]), strict=True)
            axis.errorbar(
                x,
                y,
                yerr=deviations,
                fmt=mark,
                ls=dash,
                color=colour,
                mfc="white" if dash == "--" else colour,
                ms=5,
                lw=1 if dash == "--" else 1.6,
                elinewidth=1,
                label=label,
            )
    axis.set(xlabel="MACs left (%)", ylabel="accuracy (%)")
    drawn.legend(loc="outside right center", frameon=False, fontsize=8.5)
    return drawn


# --- Tiny ImageNet --------------------------------------------------------------------------------


def tiny(folder: Path) -> list[str]:
    """Return the paragraphs on Tiny ImageNet, beside the paper's numbers on ImageNet."""
    lines = [
        "| network | paper: FLOPs left | change | ours: baseline | method | equal | MACs left | "
        "accuracy | change | runs |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for network, budgets in TINY.items():
        for macs, _ in budgets:
            lines += _tiny_rows(folder, network, macs)
    text = (
        "Tiny ImageNet (200 classes of ImageNet, 64 × 64 pixels) stands in for the ImageNet of the "
        "paper. So compare only the columns of changes, each relative to its own baseline. "
        "Networks and settings are [our own](experiments.md#tiny-imagenet). Accuracy in percent on "
        "the 10,000 validation images after the last epoch."
    )
    return [text, "\n".join(lines)]


def _tiny_rows(folder: Path, network: str, macs: float) -> list[str]:
    paper = PAPER["imagenet"][network]
    published = paper["accuracy"][paper["ratio"].index(round(100 * macs, 1))] - paper["baseline"]
    start = f"| {NAMES[network]} | {100 * macs:.1f} | {published:+.2f} |"
    rows, missing = rows_of(folder, f"tiny-{network}-{percent(macs)}")
    lines = []
    for row in rows:
        change = 100 * (row["score"] - row["baseline"])
        name, equal, share, *_ = cells(row, ACCURACY)
        score = cells(row, ACCURACY)[6].replace("%", "")
        lines.append(
            f"{start} {100 * row['baseline']:.2f} | {name} | {equal} | {share.rstrip('%')} | "
            f"{score} | {change:+.2f} | {len(row['seeds'])} |"
        )
    if missing:
        lines.append(f"{start} – | {', '.join(missing)} | – | – | {NOT_RUN} | – | 0 |")
    return lines


# --- transfer -------------------------------------------------------------------------------------


def transfer(folder: Path) -> list[str]:
    """Return the paragraphs on networks that are pruned while they learn a few images."""
    text = (
        "A network that was trained on Tiny ImageNet is pruned while it learns CIFAR-10 at 64 × 64 "
        "pixels from a few images of each class. Each seed draws other images. For comparison, the "
        "unpruned network is trained on the same images for as many epochs. A thin network starts "
        "from new weights, or is trained on Tiny ImageNet first, for as many epochs as the network "
        "that is pruned. The cost does not include the training on Tiny ImageNet of either "
        "network."
    )
    parts = [text]
    for network in TRANSFERRED:
        for images in FEW:
            stem = f"transfer-{network}-{images}images"
            title = f"{NAMES[network]}, {images} images a class"
            if not any(folder.glob(f"{stem}-*")):
                parts.append(f"{title}: {NOT_RUN}.")
                continue
            parts.append(_unpruned(folder, stem, title))
            for macs in TRANSFER_MACS:
                parts += _comparison(folder, f"{stem}-{percent(macs)}", f"At {100 * macs:g} %")
    return parts


def _unpruned(folder: Path, stem: str, title: str) -> str:
    scores = last_scores(folder, f"{stem}-unpruned-seed")
    if not scores:
        return f"{title}. Unpruned: {NOT_RUN}."
    deviation = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
    return f"{title}. Unpruned: {statistics.fmean(scores):.2f}{deviation} % ({len(scores)} runs)."


def last_scores(folder: Path, start: str) -> Sequence[float]:
    """Return the accuracies in percent that the logs of baselines end with."""
    known = [name for name in EXPERIMENTS if name.startswith(start)]
    files = [folder / name / "log.jsonl" for name in known]
    last = [json.loads(f.read_text().splitlines()[-1]) for f in files if f.exists()]
    return [100 * row["accuracy"] for row in last]


if __name__ == "__main__":
    if curves(figures.RESULTS):
        figure(figures.RESULTS).savefig(figures.OUT / "worth.png", dpi=160)
    else:
        print(f"worth: not drawn, its runs are not in {figures.RESULTS.name}/")
