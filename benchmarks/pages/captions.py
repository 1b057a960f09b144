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
        f"The paper's example of Algorithm 1. From both initial points, the value no longer "
        f"changes after {still} sweeps: {first} after the first sweep, "
        f"{' and '.join(sorted(ends))} at the end. {verdict(len(ends) == 1 and still <= 2)} It is "
        f"not the global minimum: x = 0 would give 0.025."
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
        f"Gates of ResNet-56 at 46.65 % of the MACs over the epochs. Gates between 0.05 and 0.95: "
        f"{first:.1%} after the first epoch, {before:.1%} after epoch {rows[at]['epoch']}, the "
        f"last one before the budget was met, and {last:.1%} at the end. The value at the end is "
        f"not a finding: |α| of an open gate has a lower limit, and with the final ε every gate "
        f"above this limit exceeds 0.95. Only the gates outside of this range before the budget is "
        f"met were polarized by the loss itself. {closing(RUN)}"
    )


def lasso() -> str:
    name = "resnet56-47-lasso"
    norms = log(name)[-1]["norms"]
    empty = sum(count == 0 for count in norms[1:-1])
    lost = [score(run, "before removal") - score(run, "after removal") for run in (name, RUN)]
    return (
        f"With group lasso, the norms spread over the whole range: {between(norms):.1%} of the "
        f"channels lie between the lowest and the highest twentieth, and {empty} of the 18 bins "
        f"there are empty. So a threshold has to be chosen. GDP's gates are 0 or above 0.95 at the "
        f"end by construction. Removal costs {lost[0]:.2f} points with group lasso and "
        f"{lost[1]:.2f} with GDP. {verdict(lost[0] > lost[1])}"
    )


class Course(NamedTuple):
    """What a run did in the epoch of its deadline."""

    macs: float  # share that was removed in this epoch
    usual: float  # the largest share that was removed in any earlier epoch
    rise: float  # of the training loss, as a factor
    score: float | None  # on the test set in this epoch, if it was scored
    stable: bool


def course(name: str) -> Course:
    """Compare MACs and training loss at the deadline with the epochs before it.

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
    parts = []
    for name, one in found.items():
        scored = "" if one.score is None else f", test accuracy {100 * one.score:.1f} %"
        parts.append(
            f"{name}: {one.macs:.1%} of the MACs removed (at most {one.usual:.1%} in earlier "
            f"epochs), training loss × {one.rise:.2f}{scored}"
        )
    stable = sum(one.stable for one in found.values())
    return (
        f"The runs of the table in the epoch of their deadline. {'; '.join(parts)}. In {stable} of "
        f"{len(found)} runs, both changes are within two standard deviations of those in earlier "
        f"epochs, so the training is {'stable' if stable == len(found) else 'not stable'}. "
        f"{verdict(stable == len(found))} {closing(*found)}"
    )


def closing(*names: str) -> str:
    """Return how the gates of stored runs closed, which changed between versions."""
    old = [is_earlier(name) for name in names]
    if not any(old):
        return "Gates closed along the planned path, as in the current version."
    which = "This run is" if len(names) == 1 else f"{sum(old)} of {len(old)} runs are"
    return f"{which} of an earlier version, which closed all missing channels at the deadline."


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
        f"{len(names)} values of λ, which leave {min(shares):.0f} to {max(shares):.0f} % of the "
        f"MACs. The accuracy of the super-net before removal and that of the sub-net after "
        f"fine-tuning have a correlation of {found:.3f} (paper: "
        f"{PAPER['imagenet']['correlation']}) and rank the networks in "
        f"{'the same order' if first == last else 'different orders'}. "
        f"{verdict(is_same_correlation(found, len(names)))} The comparison allows two standard "
        f"deviations of Fisher's z. With a fixed λ, gates close until the end of these short runs, "
        f"and the weights cannot adapt: the network with {ratio(near):.1f} % of the MACs has an "
        f"accuracy of {score(near, ENDS[0]):.2f} % before and {score(near, ENDS[1]):.2f} % after "
        f"fine-tuning. A run with a budget of {ratio(REFERENCE):.1f} %, which is met after half of "
        f"the epochs, has {score(REFERENCE, 'after removal'):.2f} % without fine-tuning."
    )


def epsilon() -> str:
    parts = []
    for found, name in ((decays(), "decays"), (starts(), "initial values")):
        parts.append((len(found), name, max(found.values()) - min(found.values())))
    gaps = " and ".join(f"{gap:.2f} points over {count} {name}" for count, name, gap in parts)
    robust = max(gap for *_, gap in parts) <= smallest_difference(seed_scores())
    finding = "within" if robust else "more than"
    return (
        f"The decay and the initial value of ε, which ends at the same value as after the paper's "
        f"140 epochs. Accuracies differ by {gaps}, at the same MACs and with one run each. "
        f"{seed_noise()} The differences are {finding} what seeds explain, so the result is "
        f"{'robust' if robust else 'not robust'}. {verdict(robust)} The runs are "
        f"{mode(f'ablation-decay{DECAY:.2f}')}; the paper's have a fixed λ."
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
        f"Short runs at 46.65 % of the MACs, one each. {scores}. Naive SL0 has the best λ of "
        f"{', '.join(tried)}. GDP from scratch trains for {SHORT} epochs in total; the others "
        f"start from a trained network. The paper found the last three worse than GDP; here "
        f"{len(worse)} of them are worse by more than seeds explain. The runs are "
        f"{mode(REFERENCE)} or are cut to it at the end; the paper's have a fixed λ. N = 3 changes "
        f"the accuracy by {gap:+.2f} points; the paper found N = 1 sufficient. {seed_noise()}"
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
        f"Remaining MACs for an initial α of {', '.join(f'{a:g}' for a in sorted(ALPHAS))}: "
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
        f"Accuracy over the remaining FLOPs on CIFAR-10, ours and the paper's. Of the paper's "
        f"{len(rows)} GDP results, {both} were run here. Our accuracy is higher in {higher} of "
        f"these {both}; our change against the own baseline is better in {kept} of them."
    )


def imagenet() -> str:
    return (
        "The paper's curves for ImageNet, from its tables; that of ResNet-50 is with a cosine "
        "schedule and label smoothing. Where it can be checked (MobileNetV2 at 43.8 %), the "
        "accuracy is that after fine-tuning. We have no runs, because the data set was not "
        "available."
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
