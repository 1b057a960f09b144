"""The section on steering in docs/results.md, and its figures.

The numbers are from steering.json (see measure/steering.py) and from the logs in results/:

    python -m benchmarks.pages.steering    # draws them
"""

import json
import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from benchmarks.measure.steering import APART, LANDED, RISE, broken, path, read
from benchmarks.pages import figures
from benchmarks.pages.figure_style import BLUE, GREEN, GREY, ORANGE, PINK
from benchmarks.pages.figures import Missing, card, log
from polarprune import Schedule

NAMES = {
    **figures.NAMES,
    "resnet20": "ResNet-20",
    "vgg_small": "small VGG",
    "mobilenetv2_small": "small MobileNetV2",
}
HEADLINES = (
    *(f"resnet56-47-seed{seed}" for seed in range(3)),
    *("resnet56-34", "resnet56-20", "vgg16-31"),
)
EXTREMES = (  # of the length and the budget
    "paper-vgg16-31-budget",
    *(f"steering-{network}-{percent}" for network in ("resnet56", "vgg16") for percent in (70, 10)),
)
EARLIER = (  # runs of the version that closed the remaining channels in one step
    *(f"earlier-resnet56-47-seed{seed}" for seed in range(3)),
    *("earlier-resnet56-34", "earlier-vgg16-31", "mobilenetv2_88m-54"),
)
UNPRUNED = "-unpruned"  # ends the name of the same training without pruning
IMAGES = 50000  # of CIFAR-10, to learn from
COLOURS = (BLUE, ORANGE, GREEN, PINK, "#e69f00", "#56b4e9")
Row = dict[str, Any]


# --- figures --------------------------------------------------------------------------------------


def grid(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(figsize=(width * columns, height * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e5e5e5", lw=0.6)
        axis.set_axisbelow(True)
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axis.tick_params(labelsize=8)
    return figure, [list(line) for line in axes]


def kinds(rows: Iterable[Row]) -> list[list[Row]]:
    """Return lists of runs that differ only in the budget, largest budget first."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        run = row["recipe"]
        key = [row["network"], run["epochs"], row["images"], row["size"], run["seed"]]
        found.setdefault(json.dumps(key), []).append(row)
    return [sorted(kind, key=lambda row: -float(row["macs"])) for kind in found.values()]


def steering() -> Figure:
    """MACs and their planned path, half-open gates and loss over the epochs."""
    groups = kinds(read().values())
    if not groups:
        raise Missing("steering.json")
    figure, axes = grid(len(groups), 3, 3.2, 1.75)
    budgets = sorted({row["macs"] for kind in groups for row in kind}, reverse=True)
    colours = {macs: COLOURS[k % len(COLOURS)] for k, macs in enumerate(budgets)}
    for kind, line in zip(groups, axes, strict=True):
        for row in kind:
            _steered(line, row["curves"], colours[row["macs"]])
        line[1].set_ylim(bottom=0)
        network, epochs = kind[0]["network"], kind[0]["recipe"]["epochs"]
        name = NAMES.get(network, network)
        line[0].set_ylabel(f"{name}\n{epochs} epochs", fontsize=9)
    titles = ("MACs", "half-open gates", "recalibrated test loss")
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("epoch", fontsize=9)
    for macs, colour in colours.items():
        axes[0][0].plot([], [], color=colour, label=f"macs={macs:g}")
    axes[0][0].plot([], [], "--", color=GREY, label="planned path")
    figure.legend(loc="outside lower center", ncols=len(colours) + 1, frameon=False, fontsize=9)
    return figure


def _steered(line: list[Axes], curves: dict[str, list[float]], colour: str) -> None:
    macs, gates, loss = line
    epochs, start = [0, *curves["epoch"]], [1.0]
    macs.plot(epochs, [*start, *curves["path"]], "--", color=GREY, lw=1)
    macs.plot(epochs, [*start, *curves["macs"]], "o", ms=2.5, color=colour)
    macs.set_ylim(0, 1.04)
    open_share = [n / of for n, of in zip(curves["half_open"], curves["gates"], strict=True)]
    gates.plot(curves["epoch"], open_share, color=colour, lw=1.2)
    loss.plot(curves["epoch"], curves["recalibrated_loss"], color=colour, lw=1.2)
    for axis in (macs, gates):
        axis.yaxis.set_major_formatter(PercentFormatter(1))
    for axis in line:
        axis.set_xlim(0, epochs[-1])


def headline(names: tuple[str, ...] = HEADLINES) -> Figure:
    """MACs, λ, half-open gates and losses of stored runs."""
    figure, axes = grid(4, len(names), 2.1, 1.6)
    for column, name in enumerate(names):
        mine = [line[column] for line in axes]
        mine[0].set_title(name, fontsize=9)
        _headline(mine, log(name), deadline(settings(name)))
        mine[-1].set_xlabel("epoch", fontsize=9)
    labels = ("MACs", "λ", "half-open gates", "recalibrated\ntest loss")
    for axis in axes[1]:  # the λ of a price that is near zero is very large
        axis.set_yscale("symlog", linthresh=10)
    for line, label in zip(axes, labels, strict=True):
        line[0].set_ylabel(label, fontsize=9)
        top = max(axis.get_ylim()[1] for axis in line)
        for axis in line:
            axis.set_ylim(0, top)
    return figure


def _headline(column: list[Axes], rows: list[Row], at: int) -> None:
    macs, lam, gates, loss = column
    epochs = [row["epoch"] for row in rows]
    macs.plot(epochs, [row["macs"] for row in rows], color=BLUE, lw=1.2)
    lam.plot(epochs, [row["lam"] for row in rows], color=BLUE, lw=1.2)
    shares = [sum(row["histogram"][1:-1]) / sum(row["histogram"]) for row in rows]
    gates.plot(epochs, shares, color=BLUE, lw=1.2)
    scored = [row for row in rows if "recalibrated_loss" in row]
    losses = [row["recalibrated_loss"] for row in scored]
    loss.plot([row["epoch"] for row in scored], losses, "o-", ms=2, color=BLUE, lw=1)
    for axis in column:
        axis.axvline(at, color=GREY, lw=0.8, ls=":")
        axis.set_xlim(0, epochs[-1])
    for axis in (macs, gates):
        axis.yaxis.set_major_formatter(PercentFormatter(1))


# --- text -----------------------------------------------------------------------------------------


def table(rows: Iterable[Row]) -> list[str]:
    lines = [
        "| network | epochs | budget (MACs) | largest distance from the path | "
        "closed at once | largest loss ratio of two epochs | accuracy | claim |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return lines + [_line(row) for kind in kinds(rows) for row in kind]


def _line(row: Row) -> str:
    above, below, landing = row["above_path"], row["below_path"], row["landing"]
    apart = f"{above:+.2f}" if above > below else f"{-below:+.2f}"
    failed = broken(row)
    return (
        f"| {NAMES.get(row['network'], row['network'])} | {row['recipe']['epochs']} | "
        f"{row['macs']:.0%} | {apart} points | {100 * landing['macs']:.2f} points, "
        f"{landing['gates']} gates | {row['loss_ratio']:.2f} | {row['accuracy']:.1%} | "
        f"{'does not hold: ' + ', '.join(failed) if failed else 'holds'} |"
    )


def verdict(rows: list[Row]) -> str:
    """Return in how many runs each part of the claim holds, and its worst value."""
    apart = [max(row["above_path"], row["below_path"]) for row in rows]
    landed = [100 * row["landing"]["macs"] for row in rows]
    ratios = [row["loss_ratio"] for row in rows]
    failed = [broken(row) for row in rows]
    kept = {part: sum(part not in one for one in failed) for part in ("path", "landing", "loss")}
    return (
        f"The claim holds in {failed.count([])} of {len(rows)} runs:\n\n"
        f"- The MACs stay within {APART:g} points of the path in {kept['path']} runs (largest "
        f"distance {max(apart):.2f}).\n"
        f"- At most {LANDED:g} points are closed at once in {kept['landing']} runs (largest "
        f"{max(landed):.2f}).\n"
        f"- The loss of an epoch is at most {RISE:g} times that of the previous epoch in "
        f"{kept['loss']} runs (largest {max(ratios):.2f})."
    )


def cause(rows: list[Row]) -> list[str]:
    """Return whether single channels explain distances that are too large."""
    far = [row for row in rows if "path" in broken(row)]
    single = [row["largest_fall"] for row in far if row["channels_in_it"] == 1]
    if not far:
        return []
    below = sum(row["below_path"] > row["above_path"] for row in far)
    text = f"Of the {len(far)} runs that leave the path, {below} fall below it."
    if single:
        text += (
            f" In {len(single)} of them, the largest drop between two controller steps is due to a "
            f"single channel of {min(single):.2f} to {max(single):.2f} points of the MACs: the "
            f"controller also closes the channel that crosses the path."
        )
    return [text]


def scale(rows: list[Row]) -> str:
    """Return the data, the machine and the version of the runs."""
    settings = {
        f"{row['images']:,} training and {row['test_images']:,} test images of {row['size']} × "
        f"{row['size']}, batches of {row['recipe']['batch']}, a baseline of "
        f"{row['recipe']['baseline_epochs']} epochs, on {row['machine']} (torch "
        f"{row['versions']['torch']}, commit {row['commit']})": None
        for row in rows
    }
    scores = [row["baseline"] for row in rows]
    return (
        f"The data is CIFAR-10, with one run each: {'; '.join(settings)}. The baselines have an "
        f"accuracy of {min(scores):.1%} to {max(scores):.1%}. Where the accuracy is low, the loss "
        f"is high, and the ratio of two losses says less."
    )


def settings(name: str) -> Row:
    """Return the settings of a stored run, and its budget."""
    return {**card(name)["recipe"], "budget": card(name).get("budget")}


def deadline(run: Row) -> int:
    """Return the epoch in which the budget has to be met."""
    return math.ceil(run["schedule"]["done"] * run["epochs"])


def cut(name: str) -> dict[str, float]:
    """Return MACs in percent and logged losses before and after the epoch of the deadline."""
    rows, at = log(name), deadline(settings(name))
    macs = {row["epoch"]: 100 * row["macs"] for row in rows}
    losses = {r["epoch"]: r["recalibrated_loss"] for r in rows if "recalibrated_loss" in r}
    return {
        "before": macs[at - 1],
        "after": macs[at],
        "other": max(macs[e - 1] - macs[e] for e in macs if e - 1 in macs and e != at),
        "loss before": losses[max(epoch for epoch in losses if epoch < at)],
        "loss after": losses[min(epoch for epoch in losses if epoch >= at)],
    }


class Long(NamedTuple):
    """What the log of a long run says about its steering."""

    apart: float  # largest distance from the path after an epoch, in points of the MACs
    drop: float  # points of the MACs that closed in the epoch of the deadline
    usual: float  # the most in any other epoch
    ratio: float  # largest ratio of two losses that were logged one after the other
    pause: int  # epochs between these
    risen: int  # epoch of the second of them
    closed: float  # points of the MACs that closed between them
    beyond: float | None  # the largest ratio beyond that of the same training without pruning

    @property
    def keeps(self) -> bool:
        """Whether the path and the loss are as claimed.

        A rise that the same training has without pruning is not due to the steering.
        """
        ratio = self.ratio if self.beyond is None else self.beyond
        return abs(self.apart) <= APART and ratio <= RISE


def long_run(name: str) -> Long:
    """Read the steering of a run off its log."""
    run, rows = settings(name), log(name)
    schedule, limit = Schedule(**run["schedule"]), run["budget"]["macs"]
    per_epoch = IMAGES // run["batch"]
    steps = run["epochs"] * per_epoch
    planned = [path(schedule, row["epoch"] * per_epoch, steps, limit) for row in rows]
    apart = [row["macs"] - plan for row, plan in zip(rows, planned, strict=True)]
    ratios = loss_ratios(rows)
    before, after = max(ratios, key=lambda epochs: ratios[epochs])
    first, second = next(iter(ratios))
    macs = {row["epoch"]: row["macs"] for row in rows}
    found = cut(name)
    return Long(
        apart=100 * max(apart, key=abs),
        drop=found["before"] - found["after"],
        usual=found["other"],
        ratio=ratios[before, after],
        pause=second - first,
        risen=after,
        closed=100 * (macs[before] - macs[after]),
        beyond=beyond(name, ratios),
    )


Ratios = dict[tuple[int, int], float]  # two epochs -> recalibrated loss after / before


def loss_ratios(rows: list[Row]) -> Ratios:
    """Return the ratio of each two losses that were logged one after the other."""
    losses = {r["epoch"]: r["recalibrated_loss"] for r in rows if "recalibrated_loss" in r}
    return {(before, after): losses[after] / losses[before] for before, after in pairwise(losses)}


def beyond(name: str, ratios: Ratios) -> float | None:
    """Return the largest loss ratio over that of the same epochs without pruning, if it was run."""
    try:
        control = loss_ratios(log(name.rpartition("-")[0] + UNPRUNED))
    except Missing:
        return None
    return max(ratio / max(control[epochs], 1.0) for epochs, ratio in ratios.items())


def present() -> list[str]:
    """Return the paragraphs on the long runs with the present version."""
    try:
        found = {name: long_run(name) for name in (*HEADLINES, *EXTREMES)}
    except Missing as missing:
        return [f"A long run is not stored: {missing}."]
    lines = [
        "| run | epochs | budget (MACs) | largest distance from the path | closed in the epoch of "
        "the deadline | most in any other epoch | largest loss ratio | beyond the same training "
        "without pruning | loss logged every |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        run = settings(name)
        more = "–" if one.beyond is None else f"{one.beyond:.2f}"
        lines.append(
            f"| {name} | {run['epochs']} | {run['budget']['macs']:.2%} | {one.apart:+.2f} "
            f"points | {one.drop:.2f} points | {one.usual:.2f} points | {one.ratio:.2f} | {more} | "
            f"{'epoch' if one.pause == 1 else f'{one.pause} epochs'} |"
        )
    kept = sum(one.keeps for one in found.values())
    return [
        "**Long runs** on the whole of CIFAR-10: those of [the paper's table](#the-papers-table) "
        "and some at extreme budgets. Their logs give the distance from the path after every "
        "epoch, and the ratio of each recalibrated test loss to the one that was logged before. "
        "Where the same training was also run without pruning, the claim is about the rise beyond "
        f"it. The path and the loss are as claimed in {kept} of {len(found)} runs.{rises(found)}",
        "\n".join(lines),
        "![headline](figures/headline.png)",
        "![extremes](figures/extremes.png)",
    ]


def rises(found: dict[str, Long]) -> str:
    """Return when the loss rose too much, and how much was closed then."""
    return "".join(
        f" In {name} the loss rose by a factor of {one.ratio:.2f} in epoch {one.risen}, in which "
        f"{one.closed:.1f} points of the MACs were closed{_warming(name, one)}."
        for name, one in found.items()
        if not one.keeps and one.ratio > RISE
    )


def _warming(name: str, one: Long) -> str:
    warm_up = settings(name)["warm_up"]
    rising = one.risen <= warm_up
    return f" and the learning rate rose (warm-up of {warm_up:g} epochs)" if rising else ""


def earlier() -> list[str]:
    """Return the paragraphs on runs of the earlier version."""
    try:
        found = {name: cut(name) for name in EARLIER}
    except Missing as missing:
        return [f"A run of the earlier version is not stored: {missing}."]
    points = [one["before"] - one["after"] for one in found.values()]
    lines = [
        "| run | epoch of the deadline | MACs before | MACs after | points closed in this epoch "
        "| most in any other epoch | last loss logged before | first loss logged after |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (name, one), gone in zip(found.items(), points, strict=True):
        lines.append(
            f"| {name} | {deadline(settings(name))} | {one['before']:.2f} % | "
            f"{one['after']:.2f} % | {gone:.2f} | {one['other']:.2f} | "
            f"{one['loss before']:.2f} | {one['loss after']:.2f} |"
        )
    return [
        "**An earlier version** closed the remaining channels in one step, at the deadline (dotted "
        f"line): {min(points):.1f} to {max(points):.1f} points of the MACs in a single epoch. The "
        "claim is not about these runs. Their recalibrated loss was logged every ten epochs.",
        "\n".join(lines),
        "![headline_earlier](figures/headline_earlier.png)",
    ]


def section() -> list[str]:
    """Return the paragraphs of the section."""
    rows = list(read().values())
    if not rows:
        return ["Not measured yet."]
    return [
        "With a budget, the cost follows a [planned path](method.md#the-budget) until the "
        "deadline, halfway through the training. The claim: the MACs stay within "
        f"{APART:g} points of this path, at most {LANDED:g} points are closed at once at its end, "
        "and the recalibrated "
        f"test loss never rises by more than a factor of {RISE:g} from one epoch to the next. "
        "Recalibrated means that the statistics of batch norms are estimated again with the "
        "gates of that epoch.",
        f"**Short runs**, measured by [steering.py](../benchmarks/measure/steering.py). "
        f"{scale(rows)} The distance from the path is taken whenever the controller selects gates, "
        "in points of the original MACs.",
        "\n".join(table(rows)),
        " ".join([verdict(rows), *cause(rows)]),
        "![steering](figures/steering.png)",
        *present(),
        *earlier(),
    ]


if __name__ == "__main__":
    drawn = {
        "steering": steering(),
        "headline": headline(),
        "extremes": headline(EXTREMES),
        "headline_earlier": headline(EARLIER),
    }
    for name, figure in drawn.items():
        figure.savefig(figures.OUT / f"{name}.png", dpi=130)
