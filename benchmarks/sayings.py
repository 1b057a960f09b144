"""What the figures show: sentences with numbers of the stored runs, and did the paper see it."""

import math
import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from experiments import ALPHAS, DECAY, SHORT
from figures import (
    ENDS,
    METHODS,
    PAPER,
    ablations,
    card,
    correlation,
    decays,
    headline,
    log,
    norms,
    ratio,
    score,
    starts,
    sweeps,
    tables,
    ways,
)
from figures import MAIN as RUN
from noise import SIGMAS, far, is_sudden

REFERENCE = "ablation-reference"
AS_PAPER, UNLIKE = "as the paper saw", "unlike what the paper saw"


def verdict(same: bool) -> str:
    return AS_PAPER if same else UNLIKE


def seeds() -> list[float]:
    """Accuracies of short runs that differ in the seed only."""
    return [score(name, "after removal") for name in (REFERENCE, *ablations("again"))]


def noise() -> str:
    """How far runs differ that differ in the seed only."""
    found = seeds()
    return (
        f" (the reference with {len(found)} seeds: ± {statistics.stdev(found):.2f}, so that two "
        f"single runs are told apart by {far(found):.2f} points)"
    )


def mode(name: str) -> str:
    """How a stored run was steered."""
    if "lam" not in card(name)["budget"]:
        return "steered to a budget"
    plain = card(name)["recipe"]["schedule"].get("reopens", False)
    return f"with a fixed λ, {'as published' if plain else 'α capped and floored'}"


def gate() -> str:
    return (
        "The gate and its slope: the smaller ε, the steeper, and all of it near zero; at zero the "
        "slope is 0 for every ε, so that a closed gate stays closed."
    )


def algorithm1() -> str:
    found = sweeps().values()
    still = max(next(k for k, v in enumerate(values) if v == values[-1]) for values in found)
    ends = {f"{values[-1]:.4f}" for values in found}
    ones = " and ".join(f"{values[1]:.4f}" for values in found)
    return (
        f"The paper's example of Algorithm 1: from both starts nothing changes after {still} "
        f"sweeps ({ones} after the first, {' and '.join(sorted(ends))} in the end), "
        f"{verdict(len(ends) == 1 and still <= 2)}. It is not the lowest value there is: giving up "
        f"x would be 0.025."
    )


def between(counts: list[int]) -> float:
    """The share of gates between 0.05 and 0.95."""
    return sum(counts[1:-1]) / sum(counts)


def deadline(rows: list[dict[str, Any]]) -> int:
    """The first epoch, counted from 0, after which no more MACs go."""
    return next(k for k, row in enumerate(rows) if row["macs"] == rows[-1]["macs"])


def histograms() -> str:
    rows = log(RUN)
    at = max(deadline(rows) - 1, 0)
    first, before, last = (between(rows[k]["histogram"]) for k in (0, at, -1))
    return (
        f"Gates of ResNet-56 at 46.65 % of the MACs over the epochs. Between 0.05 and 0.95 are "
        f"{first:.1%} after the first epoch, {before:.1%} after epoch {rows[at]['epoch']}, the "
        f"last before the budget was met, and {last:.1%} at the end. The end is no finding: an "
        f"open |α| is kept above a floor, and with the last ε every gate above it exceeds 0.95. "
        f"What the loss itself polarizes is what is not in between before the budget is met. "
        f"{steering(RUN)}"
    )


def lasso() -> str:
    name = "resnet56-47-lasso"
    norms = log(name)[-1]["norms"]
    empty = sum(count == 0 for count in norms[1:-1])
    lost = [score(run, "before removal") - score(run, "after removal") for run in (name, RUN)]
    return (
        f"Norms under group lasso lie anywhere ({between(norms):.1%} of the channels between the "
        f"lowest and the highest twentieth, {empty} of the 18 bins in between empty), so that a "
        f"threshold has to be chosen. Gates are 0 or above 0.95 at the end by construction. "
        f"Removal takes {lost[0]:.2f} points from the one and {lost[1]:.2f} from the other, "
        f"{verdict(lost[0] > lost[1])}."
    )


class Course(NamedTuple):
    """How a run went through its deadline."""

    macs: float  # that went in the epoch of the deadline
    usual: float  # that went in any other
    rise: float  # of the training loss, as a factor
    score: float | None  # on the test set in the epoch of the deadline, if that was scored
    stable: bool


def course(name: str) -> Course:
    """Are MACs and training loss at the deadline within what they do in the epochs before it?

    Epochs of the warm-up are left out: there the learning rate jumps, and the loss with it.
    """
    rows = log(name)
    rows = rows[int(card(name)["recipe"]["warm_up"]) :]
    end = deadline(rows)
    rows = rows[: end + 2]  # the loss of an epoch is a mean over it: the next one feels the cut
    falls = [before["macs"] - after["macs"] for before, after in pairwise(rows)]
    rises = [after["loss"] - before["loss"] for before, after in pairwise(rows)]
    here = slice(max(end - 1, 0), len(rises))
    smooth = not any(is_sudden(changes, here) for changes in (falls, rises))
    factor = max(b["loss"] / a["loss"] for a, b in pairwise(rows[max(end - 1, 0) :]))
    there = rows[end].get("accuracy")
    return Course(max(falls[here]), max(falls[: here.start]), factor, there, smooth)


def stability() -> str:
    found = {name: course(name) for name in headline()}
    told = []
    for name, one in found.items():
        scored = "" if one.score is None else f", {100 * one.score:.1f} % right then"
        told.append(
            f"{name} loses {one.macs:.1%} of the MACs in the epoch of the deadline (in any other "
            f"at most {one.usual:.1%}), its training loss is {one.rise:.2f} times that of the "
            f"epoch before{scored}"
        )
    stable = sum(one.stable for one in found.values())
    return (
        f"The runs of the table: {'; '.join(told)}. Within two standard deviations of what the "
        f"epochs before do are {stable} of {len(found)} runs: "
        f"{'stable' if stable == len(found) else 'not stable'}, {verdict(stable == len(found))}. "
        f"{steering(*found)}"
    )


def steering(*names: str) -> str:
    """Says so if runs are older than the way in which gates close today."""
    old = ["window" not in card(name)["recipe"]["schedule"] for name in names]
    if not any(old):
        return "Gates closed along the path, as they do today."
    which = "This is a run" if len(names) == 1 else f"{sum(old)} of {len(old)} are runs"
    return f"{which} of an earlier version, which cut what was missing at the deadline."


def alike(found: float, runs: int) -> bool:
    """Is a correlation no farther from the paper's than chance explains, by Fisher's z?"""
    apart = abs(math.atanh(found) - math.atanh(PAPER["imagenet"]["correlation"]))
    return apart <= SIGMAS / math.sqrt(runs - 3)


def consistency() -> str:
    found, names = correlation()
    shares = [ratio(name) for name in names]
    first, last = (sorted(names, key=lambda name, at=at: score(name, at)) for at in ENDS)  # type: ignore[misc]
    near = min(names, key=lambda name: abs(ratio(name) - ratio(REFERENCE)))
    return (
        f"{len(names)} values of λ leave {min(shares):.0f} to {max(shares):.0f} % of the MACs. The "
        f"accuracy of the super-net before removal and that of the sub-net after fine-tuning "
        f"correlate with {found:.3f} (the paper: {PAPER['imagenet']['correlation']}) and put the "
        f"networks {'in the same order' if first == last else 'in different orders'}, "
        f"{verdict(alike(found, len(names)))} (two standard deviations of Fisher's z). "
        f"With a fixed λ gates close until the end of these short runs, "
        f"and the weights have no time to follow: {ratio(near):.1f} % of the MACs have "
        f"{score(near, ENDS[0]):.2f} % before fine-tuning and {score(near, ENDS[1]):.2f} % after "
        f"it; a budget of {ratio(REFERENCE):.1f} %, met at half of as many epochs, has "
        f"{score(REFERENCE, 'after removal'):.2f} % without."
    )


def epsilon() -> str:
    parts = []
    for found, name in ((decays(), "decays"), (starts(), "first values")):
        parts.append((len(found), name, max(found.values()) - min(found.values())))
    told = " and ".join(f"{gap:.2f} points over {count} {name}" for count, name, gap in parts)
    robust = max(gap for *_, gap in parts) <= far(seeds())
    return (
        f"ε ends where it does in the paper's 140 epochs. Accuracies differ by {told}, at the same "
        f"MACs and with one run each{noise()}: "
        f"{'robust' if robust else 'not robust, more than seeds explain'}, {verdict(robust)}. "
        f"Runs are {mode(f'ablation-decay{DECAY:.2f}')}; the paper's have a fixed λ."
    )


def variants() -> str:
    found = ways()
    worse = [name for name in ("scratch", "kernel-gates", "naive-sl0")
             if found["reference"] - found[name] > far(seeds())]  # fmt: skip
    told = ", ".join(f"{METHODS[name]} {value:.2f}" for name, value in found.items())
    tried = [name.removeprefix("ablation-naive-sl0-") for name in ablations("naive-sl0-", 1)]
    gap = found["sweeps3"] - found["reference"]
    return (
        f"Short runs at 46.65 % of the MACs, one each: {told} (the best of λ = "
        f"{', '.join(tried)}); from scratch means {SHORT} epochs in all, the others begin with a "
        f"trained network. The paper found the last three worse than GDP; here {len(worse)} of "
        f"them are, by more than seeds explain. They are {mode(REFERENCE)}, or cut to one; the "
        f"paper's have a fixed λ. N = 3 gives {gap:+.2f} points{noise()}; "
        f"the paper found N = 1 enough."
    )


def norm() -> str:
    told, spreads = [], {"l1": 0.0, "l0": 0.0}
    for (kind, lam), left in norms().items():
        spreads[kind] = max(spreads[kind], max(left.values()) - min(left.values()))
        shares = ", ".join(f"{share:.0f}" for share in left.values())
        told.append(f"{kind.replace('l', 'ℓ')} with λ = {lam} leaves {shares} %")
    twins = "ablation-lam4", "ablation-l1-lam4-alpha1.0"  # but for tuning afterwards
    apart = abs(ratio(twins[0]) - ratio(twins[1]))
    clear = spreads["l0"] - spreads["l1"] > far([ratio(name) for name in twins])
    return (
        f"From α = {', '.join(f'{a:g}' for a in sorted(ALPHAS))}: {'; '.join(told)} of the MACs, "
        f"{mode(twins[1])}. "
        f"Two runs with ℓ1 that differ in nothing ended {apart:.0f} points apart. "
        + (
            f"What ℓ0 leaves depends on the start by more than twice that, {AS_PAPER}."
            if clear
            else "Beyond that, neither depends on the start here; the paper saw it of ℓ0."
        )
    )


def accuracy() -> str:
    higher = kept = both = 0
    rows = [
        (network, row)
        for network in PAPER["cifar10"]
        if network != "source"
        for row in PAPER["cifar10"][network]
        if row["method"] == "GDP"
    ]
    for network, row in rows:
        same = [
            name
            for name in tables()
            if card(name)["network"] == network and abs(ratio(name) - row["ratio"]) < 0.1
        ]
        if same:
            base, mine = (
                statistics.mean(score(name, stage) for name in same)
                for stage in ("baseline", "after removal")
            )
            both += 1
            higher += mine > row["accuracy"]
            kept += mine - base > row["accuracy"] - row["baseline"]
    return (
        f"Accuracy against FLOPs left on CIFAR-10, ours beside what the paper's table has. Ours is "
        f"higher in {higher} of the {both} places where both are (not run: {len(rows) - both} "
        f"of the paper's {len(rows)}); the change against the own baseline is better than the "
        f"paper's in {kept} of them."
    )


def imagenet() -> str:
    return (
        "The paper's curves for ImageNet, from its tables (that of ResNet-50 with a cosine and "
        "label smoothing). Where it can be checked, on MobileNetV2 at 43.8 %, the curve is that "
        "after fine-tuning. There are no runs of ours: the data set was not available."
    )


SAYINGS: dict[str, Callable[[], str]] = {
    "gate": gate, "algorithm1": algorithm1, "histograms": histograms, "lasso": lasso,
    "stability": stability, "consistency": consistency, "accuracy": accuracy,
    "imagenet": imagenet, "epsilon": epsilon, "variants": variants, "norm": norm,
}  # fmt: skip
