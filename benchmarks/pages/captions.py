"""Captions of the figures: numbers of the stored runs, compared with the paper's findings."""

import math
import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from benchmarks.measure.experiments import ALPHAS, DECAY, SHORT
from benchmarks.pages.equation_figures import sweeps
from benchmarks.pages.figures import (
    ENDS,
    METHODS,
    PAPER,
    ablations,
    card,
    correlation,
    decays,
    headline,
    is_earlier,
    log,
    norms,
    ratio,
    score,
    starts,
    tables,
    variant_scores,
)
from benchmarks.pages.figures import MAIN as RUN
from benchmarks.pages.significance import SIGMAS, is_sudden, smallest_difference

REFERENCE = "ablation-reference"
AGREES, DISAGREES = "This agrees with the paper.", "This disagrees with the paper."


def verdict(agrees: bool) -> str:
    """Return whether a finding agrees with the paper's, as a sentence."""
    return AGREES if agrees else DISAGREES


def seed_scores() -> list[float]:
    """Return the accuracies of short runs that differ only in the seed."""
    return [score(name, "after removal") for name in (REFERENCE, *ablations("again"))]


def seed_noise() -> str:
    """Return a sentence about the spread over seeds."""
    found = seed_scores()
    return (
        f"The reference has a standard deviation of {statistics.stdev(found):.2f} over "
        f"{len(found)} seeds, so single runs must differ by {smallest_difference(found):.2f} "
        f"points to be told apart."
    )


def mode(name: str) -> str:
    """Return how λ was chosen in a stored run."""
    if "lam" not in card(name)["budget"]:
        return "with a budget"
    plain = card(name)["recipe"]["schedule"].get("reopens", False)
    limits = "with the published proximal step" if plain else "with α limited from both sides"
    return f"with a fixed λ and {limits}"


def gate() -> str:
    return (
        "The gate and its derivative. The smaller ε, the steeper the gate near zero. At zero the "
        "derivative is 0 for every ε, so a closed gate stays closed."
    )


def algorithm1() -> str:
    found = sweeps().values()
    still = max(next(k for k, v in enumerate(values) if v == values[-1]) for values in found)
    ends = {f"{values[-1]:.4f}" for values in found}
    first = " and ".join(f"{values[1]:.4f}" for values in found)
    return (
        f"The paper's example of Algorithm 1, from two initial points. The objective no longer "
        f"changes after {still} sweeps: it is {first} after the first sweep, and "
        f"{' and '.join(sorted(ends))} at the end. {verdict(len(ends) == 1 and still <= 2)} This "
        f"is not the global minimum: x = 0 would give 0.025."
    )


def between(counts: list[int]) -> float:
    """Return the share of gates between 0.05 and 0.95."""
    return sum(counts[1:-1]) / sum(counts)


def deadline(rows: list[dict[str, Any]]) -> int:
    """Return the first epoch, counted from 0, after which the MACs no longer fall."""
    return next(k for k, row in enumerate(rows) if row["macs"] == rows[-1]["macs"])


def histograms() -> str:
    rows = log(RUN)
    at = max(deadline(rows) - 1, 0)
    first, before, last = (between(rows[k]["histogram"]) for k in (0, at, -1))
    return (
        f"The gates of ResNet-56 at 46.65 % of the MACs, epoch by epoch. The share of gates "
        f"between 0.05 and 0.95 is {first:.1%} after the first epoch, {before:.1%} after epoch "
        f"{rows[at]['epoch']}, the last one before the budget was met, and {last:.1%} at the end. "
        f"The value at the end is not a finding: |α| of an open gate has a lower limit, and with "
        f"the final ε every gate above this limit exceeds 0.95. Only the value before the budget "
        f"was met says something about polarization. {closing(RUN)}"
    )


def lasso() -> str:
    name = "resnet56-47-lasso"
    norms = log(name)[-1]["norms"]
    empty = sum(count == 0 for count in norms[1:-1])
    lost = [score(run, "before removal") - score(run, "after removal") for run in (name, RUN)]
    return (
        f"With group lasso, the norms of the channels spread over their whole range: "
        f"{between(norms):.1%} lie between the lowest and the highest twentieth, and only {empty} "
        f"of the 18 bins there are empty. So a threshold has to be chosen. GDP's gates need "
        f"none: they end at 0 or above 0.95 by construction. Removal costs {lost[0]:.2f} points of "
        f"accuracy with group lasso and {lost[1]:.2f} with GDP. {verdict(lost[0] > lost[1])}"
    )


class Course(NamedTuple):
    """What a run did in the epoch in which its budget had to be met."""

    macs: float  # share that was removed in this epoch
    usual: float  # the largest share that was removed in any earlier epoch
    rise: float  # of the training loss, as a factor
    score: float | None  # on the test set in this epoch, if it was scored
    stable: bool


def course(name: str) -> Course:
    """Compare MACs and training loss in the epoch of the deadline with the epochs before it.

    Epochs of the warm-up are left out, because the loss jumps with the learning rate there.
    """
    rows = log(name)
    rows = rows[int(card(name)["recipe"]["warm_up"]) :]
    end = deadline(rows)
    rows = rows[: end + 2]  # a loss is a mean over its epoch, so the next one shows the cut, too
    falls = [before["macs"] - after["macs"] for before, after in pairwise(rows)]
    rises = [after["loss"] - before["loss"] for before, after in pairwise(rows)]
    here = slice(max(end - 1, 0), len(rises))
    smooth = not any(is_sudden(changes, here) for changes in (falls, rises))
    factor = max(b["loss"] / a["loss"] for a, b in pairwise(rows[max(end - 1, 0) :]))
    there = rows[end].get("accuracy")
    return Course(max(falls[here]), max(falls[: here.start]), factor, there, smooth)


def stability() -> str:
    found = {name: course(name) for name in headline()}
    stable = sum(one.stable for one in found.values())
    text = (
        f"What happens in the epoch in which the budget has to be met, for each run of "
        f"[the paper's table](#the-papers-table). In {stable} of {len(found)} runs, the MACs that "
        f"close and the rise of the training loss are within two standard deviations of those in "
        f"earlier epochs, so the training is {'stable' if stable == len(found) else 'not stable'}. "
        f"{verdict(stable == len(found))} {closing(*found)}"
    )
    lines = [
        "| run | MACs closed in this epoch | most in an earlier epoch | ratio of training losses | "
        "test accuracy |",
        "|---|---|---|---|---|",
        *(course_row(name, one) for name, one in found.items()),
    ]
    return text + "\n\n" + "\n".join(lines)


def course_row(name: str, one: Course) -> str:
    """Return the line of a table about the epoch in which the budget of a run had to be met."""
    scored = "–" if one.score is None else f"{100 * one.score:.1f} %"
    return f"| {name} | {one.macs:.1%} | {one.usual:.1%} | {one.rise:.2f} | {scored} |"


def closing(*names: str) -> str:
    """Return how the gates of stored runs closed, which changed between versions."""
    old = [is_earlier(name) for name in names]
    if not any(old):
        return "The gates closed along the planned path, as in the current version."
    which = "This run is" if len(names) == 1 else f"{sum(old)} of {len(old)} runs are"
    return f"{which} of an earlier version, which closed the remaining channels in one step."


def is_same_correlation(found: float, runs: int) -> bool:
    """Return whether a correlation differs from the paper's by chance only, by Fisher's z."""
    difference = abs(math.atanh(found) - math.atanh(PAPER["imagenet"]["correlation"]))
    return difference <= SIGMAS / math.sqrt(runs - 3)


def consistency() -> str:
    found, names = correlation()
    shares = [ratio(name) for name in names]
    first, last = (sorted(names, key=lambda name, at=at: score(name, at)) for at in ENDS)  # type: ignore[misc]
    near = min(names, key=lambda name: abs(ratio(name) - ratio(REFERENCE)))
    return (
        f"{len(names)} values of λ leave {min(shares):.0f} to {max(shares):.0f} % of the MACs. The "
        f"accuracy before removal (the paper's super-net) and the accuracy after removal and "
        f"fine-tuning (its sub-net) have a correlation of {found:.3f} (paper: "
        f"{PAPER['imagenet']['correlation']}), and rank the networks in "
        f"{'the same order' if first == last else 'different orders'}. "
        f"{verdict(is_same_correlation(found, len(names)))} Correlations count as equal if they "
        f"differ by at most two standard deviations of Fisher's z. With a fixed λ, gates close "
        f"until the end of these short runs, so the weights have no time to adapt: the network "
        f"with {ratio(near):.1f} % of the MACs has an accuracy of {score(near, ENDS[0]):.2f} % "
        f"before and {score(near, ENDS[1]):.2f} % after fine-tuning. A run with a budget of "
        f"{ratio(REFERENCE):.1f} %, which is met after half of the epochs, reaches "
        f"{score(REFERENCE, 'after removal'):.2f} % without fine-tuning."
    )


def epsilon() -> str:
    parts = []
    for found, name in ((decays(), "decays"), (starts(), "initial values")):
        parts.append((len(found), name, max(found.values()) - min(found.values())))
    gaps = " and ".join(f"{gap:.2f} points over {count} {name}" for count, name, gap in parts)
    robust = max(gap for *_, gap in parts) <= smallest_difference(seed_scores())
    finding = "within" if robust else "more than"
    return (
        f"Accuracy for different decays and initial values of ε, at the same MACs, with one run "
        f"each. In these short runs, ε ends where the same decay ends after the paper's 140 "
        f"epochs. The largest difference is {gaps}. {seed_noise()} The differences are {finding} "
        f"what seeds explain, so the result is {'robust' if robust else 'not robust'}. "
        f"{verdict(robust)} The runs are {mode(f'ablation-decay{DECAY:.2f}')}; the paper's have a "
        f"fixed λ."
    )


def variants() -> str:
    found = variant_scores()
    limit = smallest_difference(seed_scores())
    others = ("scratch", "kernel-gates", "naive-sl0")
    worse = [name for name in others if found["reference"] - found[name] > limit]
    scores = "; ".join(f"{METHODS[name]}: {value:.2f}" for name, value in found.items())
    tried = [name.removeprefix("ablation-naive-sl0-") for name in ablations("naive-sl0-", 1)]
    gap = found["sweeps3"] - found["reference"]
    return (
        f"Accuracy in percent of short runs at 46.65 % of the MACs, one each. {scores}. For naive "
        f"SL0, this is the best of λ = {', '.join(tried)}. GDP from scratch trains for {SHORT} "
        f"epochs in total; the other runs start from a trained network. The paper found the last "
        f"three worse than GDP; here {len(worse)} of them are worse by more than seeds explain. "
        f"N = 3 changes the accuracy by {gap:+.2f} points; the paper found N = 1 sufficient. "
        f"{seed_noise()} The runs are {mode(REFERENCE)}, or are cut to it at the end; the paper's "
        f"have a fixed λ."
    )


def norm() -> str:
    parts, spreads = [], {"l1": 0.0, "l0": 0.0}
    for (kind, lam), left in norms().items():
        spreads[kind] = max(spreads[kind], max(left.values()) - min(left.values()))
        shares = ", ".join(f"{share:.0f}" for share in left.values())
        parts.append(f"{kind.replace('l', 'ℓ')} with λ = {lam} leaves {shares} %")
    twins = "ablation-lam4", "ablation-l1-lam4-alpha1.0"  # equal up to the fine-tuning
    apart = abs(ratio(twins[0]) - ratio(twins[1]))
    clear = spreads["l0"] - spreads["l1"] > smallest_difference([ratio(name) for name in twins])
    finding = (
        f"With ℓ0, the result depends on the initial α by more than twice that. {AGREES}"
        if clear
        else "Beyond that, neither result depends on the initial α. In the paper, that of ℓ0 does."
    )
    return (
        f"MACs that are left when α starts at {', '.join(f'{a:g}' for a in sorted(ALPHAS))}: "
        f"{'; '.join(parts)}. The runs are {mode(twins[1])}. Two runs with ℓ1 and equal settings "
        f"ended {apart:.0f} points apart. {finding}"
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
        own = [name for name in tables() if card(name)["network"] == network]
        same = [name for name in own if abs(ratio(name) - row["ratio"]) < 0.1]
        if same:
            base, mine = (
                statistics.mean(score(name, stage) for name in same)
                for stage in ("baseline", "after removal")
            )
            both += 1
            higher += mine > row["accuracy"]
            kept += mine - base > row["accuracy"] - row["baseline"]
    return (
        f"Accuracy against the FLOPs that are left, ours and the paper's. Of the paper's "
        f"{len(rows)} GDP results, {both} were run here. Our accuracy is higher in {higher} of "
        f"these {both}; our change, each relative to its own baseline, is better in {kept} of them."
    )


def imagenet() -> str:
    return (
        "The paper's curves for ImageNet, drawn from its tables. We have no runs, because the data "
        "set was not available. The paper trained ResNet-50 with a cosine schedule and label "
        "smoothing. Its accuracies are those after fine-tuning where this can be checked "
        "(MobileNetV2 at 43.8 %)."
    )


CAPTIONS: dict[str, Callable[[], str]] = {
    "gate": gate,
    "algorithm1": algorithm1,
    "histograms": histograms,
    "lasso": lasso,
    "stability": stability,
    "consistency": consistency,
    "accuracy": accuracy,
    "imagenet": imagenet,
    "epsilon": epsilon,
    "variants": variants,
    "norm": norm,
}
TITLES = {
    "gate": "The gate and its derivative",
    "algorithm1": "Convergence of algorithm 1",
    "histograms": "Gates over the epochs",
    "lasso": "Comparison with group lasso",
    "stability": "Stability of the training",
    "consistency": "Accuracy before removal and after fine-tuning",
    "accuracy": "Accuracy against FLOPs",
    "imagenet": "Accuracy on ImageNet in the paper",
    "epsilon": "Robustness to ε",
    "variants": "Variants of the method",
    "norm": "Proximal step with ℓ0 and with ℓ1",
}


def anchor(name: str) -> str:
    """Return the anchor of the heading above a figure."""
    return TITLES[name].lower().replace(" ", "-").replace("'", "")
