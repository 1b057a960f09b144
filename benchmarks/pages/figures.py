"""Draws the paper's figures from the logs in results/ and the paper's numbers in paper.json.

    python -m benchmarks.pages.figures            # all, to docs/figures/
    python -m benchmarks.pages.figures gate ...   # some

A figure whose runs are not stored is skipped, and its name is printed.
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks import store
from benchmarks.measure.experiments import ALPHAS, DECAY, EXPERIMENTS, NORMS
from benchmarks.pages.equation_figures import algorithm1, gate
from benchmarks.pages.figure_style import BLUE, GREY, ORANGE, STYLES, panels
from benchmarks.store import ROOT, read_numbers
from polarprune.gates.gate import EPS_START
from polarprune.report.plots import bars

RESULTS, OUT = ROOT / "results", store.FIGURES
PAPER = read_numbers("paper")
NAMES = {
    "resnet56": "ResNet-56",
    "vgg16": "VGG-16",
    "mobilenetv2": "MobileNetV2",
    "mobilenet_v1": "MobileNetV1",
    "mobilenet_v2": "MobileNetV2",
    "resnet50": "ResNet-50",
}
LABEL_OFFSETS = {  # of labels that would overlap otherwise
    ("resnet56", "PFS"): (4, -10),
    ("resnet56", "ABCPruner"): (-50, -10),
    ("resnet56", "SCOP"): (-30, 3),
    ("vgg16", "HRank"): (4, -10),
    ("mobilenetv2", "SCOP"): (4, -10),
}
MAIN = "resnet56-47-seed0"
# How the names of runs start that are not in the paper's table: shorter ones, and comparisons.
SHORT_RUNS = ("ablation", "plain", "search", "steering")
COMPARISONS = ("worth", "tiny", "transfer", "paper", "gpt", "deit")
SUPERSEDED = "earlier"  # how the names of runs start that were repeated with a later version


class Missing(Exception):
    """A run that is not stored."""


def card(name: str) -> dict[str, Any]:
    return _json(RESULTS / name / "card.json")


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise Missing(path.parent.name)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def log(name: str, stage: str = "prune") -> list[dict[str, Any]]:
    """Return the last row of each epoch: a resumed run may have logged some epochs twice."""
    path = RESULTS / name / "log.jsonl"
    if not path.exists():
        raise Missing(name)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return list({row["epoch"]: row for row in rows if row["stage"] == stage}.values())


def score(name: str, stage: str) -> float:
    return next(100 * r["accuracy"] for r in card(name)["table"] if r["stage"] == stage)


def ratio(name: str) -> float:
    return 100 * float(card(name)["macs_share"])


# --- from the runs of the table -------------------------------------------------------------------


def histograms() -> Figure:
    """Density of gates over the epochs."""
    rows = log(MAIN)
    epochs = [0, *(round(len(rows) * t) - 1 for t in (0.1, 0.2, 0.3, 0.4, 0.5, 1.0))]
    figure, axes = panels(len(epochs), 1.9, 2.4)
    for axis, k in zip(axes, epochs, strict=True):
        bars(axis, rows[k]["histogram"], BLUE)
        axis.set_title(f"epoch {rows[k]['epoch']}", fontsize=10)
        if axis is not axes[0]:
            axis.set_yticklabels([])
    axes[0].set_ylabel("frequency of gates")
    figure.supxlabel("gate value", fontsize=10)
    return figure


def lasso() -> Figure:
    """Norms of weights under group lasso against gates under GDP, at the end."""
    figure, (left, right) = panels(2)
    bars(left, log("resnet56-47-lasso")[-1]["norms"], ORANGE)
    bars(right, log(MAIN)[-1]["histogram"], BLUE)
    left.set(xlabel="norm / number of weights, largest = 1", ylabel="frequency of channels")
    right.set(xlabel="gate value", ylabel="frequency of gates")
    left.set_title("group lasso", fontsize=10)
    right.set_title("GDP", fontsize=10)
    return figure


def stability() -> Figure:
    """Losses and remaining MACs over the epochs, for the runs of the table."""
    figure, (left, right) = panels(2)
    for number, name in enumerate(headline()):
        rows = log(name)
        tenths = [row for row in rows if row["epoch"] % 10 == 0]
        scored = [row for row in tenths if "recalibrated_loss" in row]
        colour, dash, _ = STYLES[number % len(STYLES)]
        epochs = [r["epoch"] for r in rows]
        left.plot(epochs, [r["loss"] for r in rows], dash, color=colour, lw=1, label=name)
        left.plot(
            [r["epoch"] for r in scored],
            [r["recalibrated_loss"] for r in scored],
            "s",
            ms=3,
            color=colour,
        )
        right.plot(epochs, [r["macs"] for r in rows], dash, color=colour, lw=1)
    left.set(xlabel="epoch", ylabel="loss (squares: test)", ylim=(0, 3))
    right.set(xlabel="epoch", ylabel="MACs left", ylim=(0, 1.02))
    right.yaxis.set_major_formatter(PercentFormatter(1))
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def accuracy() -> Figure:
    """Accuracy against MACs left on CIFAR-10: ours, the paper's, and what the paper compares."""
    networks = ("resnet56", "vgg16", "mobilenetv2")
    figure, axes = panels(3, 3.4, 3.2)
    ours = tables()
    for axis, network in zip(axes, networks, strict=True):
        for row in PAPER["cifar10"][network]:
            mine = row["method"] == "GDP"
            axis.plot(
                row["ratio"],
                row["accuracy"],
                "s" if mine else "x",
                ms=6,
                color=ORANGE if mine else GREY,
            )
            if not mine:
                axis.annotate(
                    row["method"],
                    (row["ratio"], row["accuracy"]),
                    fontsize=8,
                    xytext=LABEL_OFFSETS.get((network, row["method"]), (4, 3)),
                    textcoords="offset points",
                    color=GREY,
                )
        for name in ours:
            if card(name)["network"] == network:
                axis.plot(ratio(name), score(name, "after removal"), "o", ms=6, color=BLUE)
        axis.set(xlabel="FLOPs left (%)")
        axis.set_title(NAMES[network], fontsize=10)
        axis.margins(0.18)
    axes[0].set_ylabel("accuracy (%)")
    for mark, colour, label in (
        ("o", BLUE, "polarprune"),
        ("s", ORANGE, "GDP, as published"),
        ("x", GREY, "others, as published there"),
    ):
        axes[2].plot([], [], mark, color=colour, label=label)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def tables() -> list[str]:
    """Return the runs of ours in the paper's table, without those of the method comparison."""
    found = [path.parent.name for path in sorted(RESULTS.glob("*/card.json"))]
    mine = [
        name
        for name in found
        if not name.startswith((*SHORT_RUNS, *COMPARISONS, SUPERSEDED))
        and card(name)["method"] == "gdp"
        and not (name in EXPERIMENTS and EXPERIMENTS[name].tune)
    ]
    if not mine:
        raise Missing("a run with gdp")
    return mine


def is_earlier(name: str) -> bool:
    """Return whether a run is of the version that closed the remaining channels in one step."""
    return "window" not in card(name)["recipe"]["schedule"]


def headline() -> list[str]:
    """Return the runs with a budget on CIFAR-10; those of earlier versions only if all are."""
    known = [(name, card(name)) for name in tables()]
    found = [n for n, c in known if "macs" in c["budget"] and c["network"] in PAPER["cifar10"]]
    return [name for name in found if not is_earlier(name)] or found


def imagenet() -> Figure:
    """The paper's published curves for ImageNet; we have no runs on it."""
    figure, (axis,) = panels(1, 4.4, 3.2)
    for network, (colour, dash, mark) in zip(
        ("resnet50", "mobilenet_v2", "mobilenet_v1"), STYLES, strict=False
    ):
        row = PAPER["imagenet"][network]
        axis.plot(
            row["ratio"],
            row["accuracy"],
            dash,
            marker=mark,
            ms=5,
            color=colour,
            label=NAMES[network],
        )
        axis.plot(100, row["baseline"], mark, ms=6, color=colour, mfc="white")
    axis.set(xlabel="FLOPs left (%); open marks: baselines", ylabel="top-1 accuracy (%)")
    axis.legend(frameon=False)
    return figure


# --- ablations ------------------------------------------------------------------------------------


def ablations(stem: str, least: int = 2) -> list[str]:
    found = [path.parent.name for path in RESULTS.glob(f"ablation-{stem}*/card.json")]
    if len(found) < least:
        raise Missing(f"ablation-{stem}")
    return sorted(found, key=lambda name: float(name.removeprefix(f"ablation-{stem}")))


def correlation() -> tuple[float, list[str]]:
    names = ablations("lam")
    ends = [[score(name, stage) for name in names] for stage in ENDS]
    return statistics.correlation(*ends), names


ENDS = ("before removal", "after fine-tuning")


def consistency() -> Figure:
    """Accuracy of the super-net before removal against the sub-net's after fine-tuning."""
    found, names = correlation()
    figure, (axis,) = panels(1)
    x, y = ([score(name, stage) for name in names] for stage in ENDS)
    axis.plot(x, y, "o", color=BLUE)
    for k, (name, *at) in enumerate(zip(names, x, y, strict=True)):
        aside = (-6, 2 - 8 * (k % 2)) if at[0] > statistics.mean(x) - 5 else (6, -3)
        axis.annotate(
            f"λ = {name.removeprefix('ablation-lam')}",
            at,
            fontsize=8,
            xytext=aside,
            textcoords="offset points",
            color=GREY,
            ha="right" if aside[0] < 0 else "left",
        )
    axis.set(xlabel="super-net, before removal (%)", ylabel="sub-net, after fine-tuning (%)")
    axis.set_title(
        f"correlation {found:.3f} (paper: {PAPER['imagenet']['correlation']})", fontsize=10
    )
    axis.margins(0.15)
    return figure


def decays() -> dict[float, float]:
    """Return the accuracy for each decay of ε per epoch."""
    return {
        float(n.removeprefix("ablation-decay")): score(n, "after removal")
        for n in ablations("decay")
    }


def starts() -> dict[float, float]:
    """Return the accuracy for each initial ε; a run of `decays` has the default one."""
    found = {
        float(n.removeprefix("ablation-eps")): score(n, "after removal") for n in ablations("eps")
    }
    return dict(sorted({**found, EPS_START: decays()[DECAY]}.items()))


def epsilon() -> Figure:
    """Accuracy over the decay of ε and over its initial value."""
    figure, (left, right) = panels(2)
    for axis, found, name in (
        (left, decays(), "decay of ε per epoch, of 140"),
        (right, starts(), "initial ε"),
    ):
        axis.plot(list(found), list(found.values()), "-o", color=BLUE)
        axis.set(xlabel=name, ylabel="accuracy after removal (%)")
    right.set_xscale("log")
    right.set_xticks(list(starts()), [f"{eps:g}" for eps in starts()], minor=False)
    right.minorticks_off()
    low, high = (f(a.get_ylim()[k] for a in (left, right)) for k, f in enumerate((min, max)))
    middle, half = (low + high) / 2, max((high - low) / 2, 0.5)
    for axis in (left, right):
        axis.set_ylim(middle - half, middle + half)
    return figure


METHODS = {
    "reference": "GDP",
    "sweeps3": "GDP, N = 3",
    "scratch": "GDP from scratch",
    "kernel-gates": "gates from kernel norms",
    "naive-sl0": "naive SL0",
}


def variant_scores() -> dict[str, float]:
    """Return the accuracy of the paper's variants at the same MACs; naive SL0 with its best λ."""
    mine = {name: f"ablation-{name}" for name in METHODS}
    naive = ablations("naive-sl0-", least=1)
    mine["naive-sl0"] = max(naive, key=lambda name: score(name, "after removal"))
    return {name: score(run, "after removal") for name, run in mine.items()}


def variants() -> Figure:
    figure, (axis,) = panels(1, 5.2, 2.4)
    x = list(variant_scores().values())
    axis.barh(range(len(x)), x, color=BLUE, height=0.6)
    for k, value in enumerate(x):
        axis.text(value, k, f" {value:.2f}", va="center", fontsize=9)
    axis.set_yticks(range(len(x)), list(METHODS.values()))
    axis.invert_yaxis()
    axis.set(xlabel="accuracy after removal (%)", xlim=(0, 1.12 * max(x)))
    return figure


def norms() -> dict[tuple[str, int], dict[float, float]]:
    """Return, for each norm of the proximal step and λ, the remaining MACs by initial α."""
    found = {}
    for kind, lam in NORMS:
        stem = f"{kind}-lam{lam}-alpha"
        found[kind, lam] = {
            float(n.removeprefix(f"ablation-{stem}")): ratio(n) for n in ablations(stem)
        }
    return found


def norm() -> Figure:
    """ℓ1 against ℓ0 in the proximal step, from three initial values of α."""
    figure, (axis,) = panels(1)
    for ((kind, lam), left), (colour, dash, mark) in zip(norms().items(), STYLES, strict=False):
        label = f"{kind.replace('l', 'ℓ')}, λ = {lam}"
        axis.plot(list(left), list(left.values()), dash, marker=mark, color=colour, label=label)
    axis.set(xlabel="initial α", ylabel="MACs left (%)", ylim=(0, 103))
    axis.set_xticks(sorted(ALPHAS))
    figure.legend(
        frameon=False,
        loc="outside upper center",
        ncols=3,
        columnspacing=1,
        handlelength=1.6,
        fontsize=9,
    )
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "gate": gate,
    "algorithm1": algorithm1,
    "histograms": histograms,
    "lasso": lasso,
    "stability": stability,
    "accuracy": accuracy,
    "imagenet": imagenet,
    "consistency": consistency,
    "epsilon": epsilon,
    "variants": variants,
    "norm": norm,
}


def main(names: list[str]) -> list[str]:
    """Draw figures and return the names of those whose runs are missing."""
    OUT.mkdir(parents=True, exist_ok=True)
    left_out = []
    for name in names or FIGURES:
        try:
            FIGURES[name]().savefig(OUT / f"{name}.png", dpi=160)
        except Missing as missing:
            left_out.append(name)
            print(f"{name}: not drawn, {missing} is not in {RESULTS.name}/")
    return left_out


if __name__ == "__main__":
    main(sys.argv[1:])
