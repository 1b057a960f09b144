"""What the figures show: sentences with numbers of the stored runs, and did the paper see it."""

import statistics
from collections.abc import Callable
from itertools import pairwise

from experiments import ALPHAS, SHORT
from figures import (
    ENDS,
    METHODS,
    PAPER,
    ablations,
    card,
    correlation,
    decays,
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

REFERENCE = "ablation-reference"
AS_PAPER, UNLIKE = "as the paper saw", "unlike what the paper saw"


def verdict(same: bool) -> str:
    return AS_PAPER if same else UNLIKE


def noise() -> str:
    """How far runs differ that differ in the seed only."""
    found = [score(name, "after removal") for name in (REFERENCE, *ablations("again", 0))]
    if len(found) < 2:
        return ""
    return f" (the reference with {len(found)} seeds: ± {statistics.stdev(found):.2f})"


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


def histograms() -> str:
    rows = log(RUN)
    first, last = rows[0]["histogram"], rows[-1]["histogram"]
    half = rows[len(rows) // 2]["histogram"]
    between = [sum(counts[1:-1]) / sum(counts) for counts in (first, half, last)]
    return (
        f"Gates of ResNet-56 at 46.65 % of the MACs over the epochs. Between 0.05 and 0.95 are "
        f"{between[0]:.1%} after the first epoch, {between[1]:.1%} at half of the run and "
        f"{between[2]:.1%} at the end: polarized, {verdict(between[2] < 0.01)}."
    )


def lasso() -> str:
    norms, gates = log("resnet56-47-lasso")[-1]["norms"], log(RUN)[-1]["histogram"]
    gaps = [sum(counts[1:-1]) / sum(counts) for counts in (norms, gates)]
    empty = sum(count == 0 for count in norms[1:-1])
    return (
        f"Norms under group lasso lie anywhere ({gaps[0]:.1%} of the channels between the lowest "
        f"and the highest twentieth, {empty} of the 18 bins in between empty), gates do not "
        f"({gaps[1]:.1%}): a threshold has to be chosen for the one and not for the other, "
        f"{verdict(gaps[0] > 10 * gaps[1])}."
    )


def stability() -> str:
    rows = [row for row in log(REFERENCE) if "recalibrated_loss" in row]
    losses = [row["recalibrated_loss"] for row in rows]
    rise = max(after / before for before, after in pairwise(losses))
    steps = [before["macs"] - after["macs"] for before, after in pairwise(rows)]
    stable = rise < 1.5 and min(steps) >= 0
    return (
        f"{len(rows)} epochs without a teacher: in one, at most {max(steps):.1%} of the MACs go, "
        f"{'none' if min(steps) >= 0 else 'some'} come back, and the loss on the test set, batch "
        f"norms recalibrated, rises from {losses[0]:.2f} to {max(losses):.2f} while channels go, "
        f"falls to {losses[-1]:.2f}, and "
        f"is at most {rise:.2f} times what it was an epoch before: "
        f"{'stable' if stable else 'not stable'}, {verdict(stable)}."
    )


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
        f"{verdict(found > 0.95)}. With a fixed λ gates close until the end of these short runs, "
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
    robust = max(gap for *_, gap in parts) < 1.0
    return (
        f"ε ends where it does in the paper's 140 epochs. Accuracies differ by {told}, at the same "
        f"MACs and with one run each{noise()}: {'robust' if robust else 'not robust'}, "
        f"{verdict(robust)}."
    )


def variants() -> str:
    found = ways()
    worse = [name for name in ("scratch", "kernel-gates", "naive-sl0")
             if found[name] < found["reference"]]  # fmt: skip
    told = ", ".join(f"{METHODS[name]} {value:.2f}" for name, value in found.items())
    tried = [name.removeprefix("ablation-naive-sl0-") for name in ablations("naive-sl0-", 1)]
    gap = found["sweeps3"] - found["reference"]
    return (
        f"Short runs at 46.65 % of the MACs, one each: {told} (the best of λ = "
        f"{', '.join(tried)}); from scratch means {SHORT} epochs in all, the others begin with a "
        f"trained network. The paper found the last three worse than GDP; here {len(worse)} of "
        f"them are. N = 3 gives {gap:+.2f} points{noise()}; the paper found N = 1 enough."
    )


def norm() -> str:
    told, spreads = [], {"l1": 0.0, "l0": 0.0}
    for (kind, lam), left in norms().items():
        spreads[kind] = max(spreads[kind], max(left.values()) - min(left.values()))
        shares = ", ".join(f"{share:.0f}" for share in left.values())
        told.append(f"{kind.replace('l', 'ℓ')} with λ = {lam} leaves {shares} %")
    alike = "ablation-lam4", "ablation-l1-lam4-alpha1.0"  # but for tuning afterwards
    apart = abs(ratio(alike[0]) - ratio(alike[1]))
    clear = spreads["l0"] - spreads["l1"] > apart
    return (
        f"From α = {', '.join(f'{a:g}' for a in sorted(ALPHAS))}: {'; '.join(told)} of the MACs. "
        f"Two runs with ℓ1 that differ in nothing ended {apart:.0f} points apart. "
        + (
            f"What ℓ0 leaves depends on the start by more than that, {AS_PAPER}."
            if clear
            else "Beyond that, neither depends on the start here; the paper saw it of ℓ0."
        )
    )


def accuracy() -> str:
    higher, both = 0, 0
    rows = [(network, row) for network in PAPER["cifar10"] if network != "source"
            for row in PAPER["cifar10"][network] if row["method"] == "GDP"]  # fmt: skip
    for network, row in rows:
        same = [name for name in tables() if card(name)["network"] == network]
        mine = [score(name, "after removal") for name in same
                if abs(ratio(name) - row["ratio"]) < 0.1]  # fmt: skip
        both += bool(mine)
        higher += bool(mine) and statistics.mean(mine) > row["accuracy"]
    return (
        f"Accuracy against FLOPs left on CIFAR-10, ours beside what the paper's table has. Ours is "
        f"higher in {higher} of the {both} places where both are (not run: {len(rows) - both} "
        f"of the paper's {len(rows)})."
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
