"""The section of docs/results.md on the paper's settings: full trainings and ablations."""

import json
from pathlib import Path
from typing import Any

from benchmarks.measure.experiments import CLAIMS, EXPERIMENTS, SEARCHED, TUNED, percent
from benchmarks.pages.paper_table import CLAIMS as PUBLISHED
from benchmarks.pages.paper_table import Claim
from benchmarks.pages.run_conditions import NETWORK_NAMES
from benchmarks.pages.segmentation_and_style import NOT_RUN, where
from polarprune.experiments.presets import PRESETS

STAGES = ("before removal", "after removal", "after fine-tuning")
MODES = {"plain": "fixed λ", "budget": "budget"}
Card = dict[str, Any]


def section(folder: Path) -> list[str]:
    """Return the paragraphs of the section."""
    rows = [_row(folder, network, macs, mode) for network, macs in CLAIMS for mode in MODES]
    return [
        _settings(folder),
        "\n".join(
            [
                "| network | paper: baseline | FLOPs left | pruned | change | ours: mode | "
                f"baseline | MACs left | {' | '.join(STAGES)} | change |",
                "|---" * 12 + "|",
                *rows,
            ]
        ),
        *_searched(folder),
        *_ablations(folder),
    ]


def stored(folder: Path, name: str) -> Card | None:
    """Return the card of a run, or None if it is not stored."""
    file = folder / name / "card.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def _settings(folder: Path) -> str:
    """Return what the runs have in common."""
    preset = PRESETS["resnet56-plain"]
    cards = [stored(folder, file.parent.name) for file in sorted(folder.glob("paper-*/card.json"))]
    machines = "; ".join(dict.fromkeys(where(card) for card in cards if card))
    return (
        f"Runs with the paper's settings: {preset.baseline_epochs} epochs for the baseline and "
        f"{preset.epochs} while pruning, ε × {preset.schedule.decay} an epoch, random crops and "
        f"flips, no teacher, no cutout, and {TUNED} epochs of fine-tuning after removal. The paper "
        f"does not give the learning rate and the batch size; here they are {preset.lr:g} with a "
        f"cosine schedule, and {preset.batch}. With a fixed λ, the proximal step is exactly the "
        "published one; λ is chosen by short runs. A budget changes the method "
        f"([how](differences.md)). One run each{f', on {machines}' if machines else ''}."
    )


def _row(folder: Path, network: str, macs: float, mode: str) -> str:
    cells = [NETWORK_NAMES[network], *_published(_claim(network, macs))]
    card = stored(folder, f"paper-{network}-{percent(macs)}-{mode}")
    if card is None:
        return f"| {' | '.join([*cells, MODES[mode], NOT_RUN])} |{' – |' * 5}"
    scores = {row["stage"]: 100 * row["accuracy"] for row in card["table"]}
    kind = MODES[mode] + (f" {card['budget']['lam']:.3g}" if mode == "plain" else "")
    cells += [kind, f"{scores['baseline']:.2f}", f"{100 * card['macs_share']:.2f}"]
    cells += [f"{scores[stage]:.2f}" for stage in STAGES]
    return f"| {' | '.join(cells)} | {scores['after removal'] - scores['baseline']:+.2f} |"


def finished(folder: Path) -> list[str]:
    """Return how the runs that are stored ended, beside the paper's change."""
    found = []
    for network, macs in CLAIMS:
        for mode, name in MODES.items():
            card = stored(folder, f"paper-{network}-{percent(macs)}-{mode}")
            if card is not None:
                scores = {row["stage"]: 100 * row["accuracy"] for row in card["table"]}
                claim = _claim(network, macs)
                found.append(
                    f"{NETWORK_NAMES[network]} at {claim.macs} % ({name}) changes by "
                    f"{scores['after removal'] - scores['baseline']:+.2f} points (the paper's by "
                    f"{claim.accuracy - claim.baseline:+.2f})"
                )
    return found


def _claim(network: str, macs: float) -> Claim:
    return next(c for c in PUBLISHED if (c.network, c.macs) == (network, round(100 * macs, 2)))


def _published(claim: Claim) -> list[str]:
    change = claim.accuracy - claim.baseline
    numbers = (claim.baseline, claim.macs, claim.accuracy)
    return [*(f"{number:.2f}" for number in numbers), f"{change:+.2f}"]


def _searched(folder: Path) -> list[str]:
    """Return what the short runs left, from which λ is read."""
    found = []
    for network, lambdas in SEARCHED.items():
        cards = {lam: stored(folder, f"search-{network}-lam{lam}") for lam in lambdas}
        left = [f"{100 * card['macs_share']:.1f} % ({lam})" for lam, card in cards.items() if card]
        if left:
            epochs = next(card for card in cards.values() if card)["recipe"]["epochs"]
            found.append(
                f"{NETWORK_NAMES[network]}: short runs of {epochs} epochs, by which λ is chosen, "
                f"leave these shares of the MACs (λ in brackets): {', '.join(left)}."
            )
    return found


def _ablations(folder: Path) -> list[str]:
    """Return a table of the ablations in plain mode."""
    names = [name for name in EXPERIMENTS if name.startswith("plain-")]
    cards = {name: stored(folder, name) for name in names}
    missing = [name for name, card in cards.items() if card is None]
    if len(missing) == len(names):
        return [f"The {len(names)} ablations with the published proximal step were not run yet."]
    lines = [
        "| ablation | λ or budget | MACs left (%) | accuracy after removal (%) |",
        "|---|---|---|---|",
    ]
    for name, card in cards.items():
        if card is not None:
            goal = ", ".join(f"{key} {value:g}" for key, value in card["budget"].items())
            score = next(r["accuracy"] for r in card["table"] if r["stage"] == "after removal")
            lines.append(
                f"| {name} | {goal} | {100 * card['macs_share']:.2f} | {100 * score:.2f} |"
            )
    text = [f"{NOT_RUN.capitalize()}: {', '.join(missing)}."] if missing else []
    return ["\n".join(lines), *text]
