"""The table of docs/results.md and README.md that puts our runs beside the paper's results."""

import dataclasses
from typing import Any, NamedTuple

from benchmarks.pages.figures import PAPER
from benchmarks.pages.run_conditions import NETWORK_NAMES, OTHER_NETWORKS, differences
from benchmarks.pages.segmentation_and_style import NOT_RUN
from benchmarks.pages.stored_runs import (
    TEST_SET,
    StoredRun,
    grouped,
    mean_and_deviation,
    mean_score,
)
from polarprune.experiments.presets import PRESETS


class Claim(NamedTuple):
    """A row of the paper's table for CIFAR-10, in percent."""

    network: str
    baseline: float
    macs: float
    accuracy: float

    def matches(self, run: StoredRun) -> bool:
        """Return whether a run has the network and the budget of this row."""
        budget = {key: round(100 * share, 4) for key, share in run.card["budget"].items()}
        return run.network == self.network and budget == {"macs": self.macs}


CLAIMS = [
    Claim(network, row["baseline"], row["ratio"], row["accuracy"])
    for network in NETWORK_NAMES
    for row in sorted(PAPER["cifar10"][network], key=lambda row: -float(row["ratio"]))
    if row["method"] == "GDP"
]


EARLIER = "earlier version"


def is_only_ours(run: StoredRun) -> bool:
    """Return whether a run has a network or a budget that the paper's table does not have."""
    known = run.network in NETWORK_NAMES and not any(claim.matches(run) for claim in CLAIMS)
    return run.is_tabled and (known or run.network in OTHER_NETWORKS)


def table(runs: list[StoredRun], superseded: bool = True) -> list[str]:
    """Return the lines of the table.

    Args:
        runs: All runs.
        superseded: Whether to keep rows of an earlier version that later runs have replaced.
    """
    lines = [
        "| network | paper: baseline | FLOPs left | pruned | change | ours: baseline | MACs left | "
        "after removal | change | runs |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for claim in CLAIMS:
        own = [run for run in runs if run.is_tabled and claim.matches(run)]
        kinds = grouped(own, lambda run: run.settings("tune", "controls"))
        kinds.sort(key=lambda kind: kind[0].is_earlier)
        current = [kind for kind in kinds if not kind[0].is_earlier]
        for kind in (kinds if superseded else current or kinds) or [[]]:
            lines.append(_claim_row(claim, kind, several=len(current) > 1))
    for kind in grouped(filter(is_only_ours, runs), _budget_and_settings):
        name = OTHER_NETWORKS.get(kind[0].network) or _with_epochs(kind[0])
        name += f" ({EARLIER})" if kind[0].is_earlier else ""
        lines.append(f"| {name} | – | – | – | – | {_own_cells(kind)}")
    return lines


def _with_epochs(run: StoredRun) -> str:
    return f"{NETWORK_NAMES[run.network]} in {run.card['recipe']['epochs']} epochs"


def _budget_and_settings(run: StoredRun) -> Any:
    return [run.card["budget"], run.settings("tune", "controls")]


def _claim_row(claim: Claim, runs: list[StoredRun], several: bool) -> str:
    name = NETWORK_NAMES[claim.network]
    paper = (
        f"{claim.baseline:.2f} | {claim.macs:.2f} | {claim.accuracy:.2f} | "
        f"{claim.accuracy - claim.baseline:+.2f}"
    )
    if not runs:
        return f"| {name} | {paper} | {NOT_RUN} | – | {NOT_RUN} | – | 0 |"
    if runs[0].is_earlier:
        name += f" ({EARLIER})"
    elif several:
        name += f" ({preset_name(runs[0])})"
    return f"| {name} | {paper} | {_own_cells(runs)}"


def _own_cells(runs: list[StoredRun]) -> str:
    shares: list[float | None] = [100 * run.card["macs_share"] for run in runs]
    stages = ("baseline", "after removal")
    scores = [[run.score(at) for run in runs] for at in stages]
    base, after = map(mean_and_deviation, (_once(scores[0]), scores[1]))
    change = mean_score(runs, "after removal") - mean_score(runs, "baseline")
    return f"{base} | {mean_and_deviation(shares)} | **{after}** | {change:+.2f} | {len(runs)} |"


def _once(scores: list[float | None]) -> list[float | None]:
    """Return one score if all are equal: the runs have one baseline."""
    return scores[:1] if len(set(scores)) == 1 else scores


def preset_name(run: StoredRun) -> str:
    """Return the preset of a run, or how its settings differ from that of its network."""
    own = run.settings("tune", "controls")
    for name, known in PRESETS.items():
        other = StoredRun({"recipe": dataclasses.asdict(known)}, [])
        if other.settings("tune", "controls") == own:
            return name
    return "changed: " + "; ".join(differences(run, PRESETS[run.network]))


def notes(runs: list[StoredRun]) -> str:
    """Return the notes below the table."""
    own = [run for run in runs if run.is_tabled and any(c.matches(run) for c in CLAIMS)]
    if not own:
        return "The pruned networks were not fine-tuned."
    every = [*own, *filter(is_only_ours, runs)]
    same = sum(run.card.get("identical_predictions", False) for run in every)
    sentences = [
        "**Units.** FLOPs and MACs are both shares of the original network, so they can be "
        "compared. The pruned networks were not fine-tuned.",
        "**Training and pruning are mixed.** Our networks were trained with cutout and with their "
        "baseline as teacher, and our baselines are better than the paper's. So the table does not "
        "show which part of a difference is due to pruning. The runs with "
        "[the paper's settings](#the-papers-settings) do.",
        "**Loss of accuracy.** Relative to its own baseline, the paper's network loses less "
        f"accuracy in {_lost(own)} rows for which we have runs.",
        "**Removal.** Predictions before and after removal are identical on all "
        f"{TEST_SET:,} test images in {same} of {len(every)} runs.",
    ]
    if any(run.is_earlier for run in every):
        sentences.append(
            "**Earlier version.** Runs in rows with this mark reached the budget in one step: all "
            "channels that were still missing closed at once, and the accuracy recovered "
            "afterwards ([steering](#steering))."
        )
    tuned = [run for run in own if run.score("after fine-tuning")]
    for kind in grouped(tuned, lambda run: [run.network, run.card["budget"]]):
        sentences.append(_fine_tuned(kind))
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _fine_tuned(runs: list[StoredRun]) -> str:
    card = runs[0].card
    scores = mean_and_deviation([run.score("after fine-tuning") for run in runs])
    return (
        f"**Fine-tuning.** {NETWORK_NAMES[card['network']]} at {100 * card['budget']['macs']:.2f} "
        f"%{f' ({EARLIER})' if runs[0].is_earlier else ''} was then fine-tuned for "
        f"{card['recipe']['tune_epochs']} epochs without the teacher and reached {scores} %."
    )


def _lost(runs: list[StoredRun]) -> str:
    """Return in how many rows with runs of ours the paper's network lost less than ours."""
    found = []
    for claim in CLAIMS:
        own = [run for run in runs if claim.matches(run)]
        own = [run for run in own if not run.is_earlier] or own
        if own:
            lost = mean_score(own, "baseline") - mean_score(own, "after removal")
            found.append(claim.baseline - claim.accuracy < lost)
    return f"{sum(found)} of {len(found)}"
