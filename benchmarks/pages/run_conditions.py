"""The conditions of the stored runs: machines, settings and choices on held-out images."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from benchmarks.pages.segmentation_and_style import NOT_RUN
from benchmarks.pages.stored_runs import StoredRun, flat, grouped
from polarprune.experiments.presets import PRESETS
from polarprune.experiments.settings import Settings

NETWORK_NAMES = {"resnet56": "ResNet-56", "vgg16": "VGG-16", "mobilenetv2": "MobileNetV2"}
OTHER_NETWORKS = {  # networks that the paper does not have, and what they are
    "mobilenetv2_88m": "MobileNetV2 with one more stride, 88 M MACs; not the paper's network"
}
TITLES = NETWORK_NAMES | {name: f"`{name}` ({what})" for name, what in OTHER_NETWORKS.items()}
PAPER_NETWORK = {"mobilenetv2_88m": "mobilenetv2"}  # whose settings in the paper are compared


def differences(run: StoredRun, other: Settings) -> list[str]:
    """Return the settings of a run that differ from others: `epochs 200 (350)`."""
    theirs = flat(dataclasses.asdict(other))
    return [
        f"{key} {_short(value)} ({_short(theirs[key])})"
        for key, value in run.settings("controls", "network").items()
        if key in theirs and value != theirs[key]
    ]


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def conditions(runs: list[StoredRun]) -> list[str]:
    """Return the lines about machines, training time and settings."""
    if not runs:
        return ["No runs."]
    lines = [
        f"[results](../results) contains the {len(runs)} runs of the tables, and further runs for "
        "the figures. If you repeat a run with the same seed, its numbers differ a little: a GPU "
        "adds in a varying order, and since some of these runs, the stages draw other random "
        "numbers.",
    ]
    for kind in grouped(runs, lambda run: [run.card["machine"], run.card["versions"]]):
        versions = ", ".join(f"{name} {v}" for name, v in kind[0].card["versions"].items())
        hours = sum(run.seconds() for run in kind) / 3600
        lines += [
            "",
            f"- {len(kind)} runs on {kind[0].card['machine']} ({versions}): {hours:.1f} hours of "
            "training in total. Several runs shared the machine.",
        ]
    lines += [
        "",
        "The list below has the settings of our runs that differ from the paper's, with the "
        "paper's value in brackets. The paper gives the epochs while pruning, ε, the learning rate "
        "of the gates, crops and flips. Where it gives none (learning rate, batch size, weight "
        "decay, epochs of the baseline), the value in brackets is the usual one. In addition, a "
        "budget decides which gates close instead of λ (in runs of the earlier version, λ was "
        "steered, and 0 once the budget was met), ε decays at every step, and matrix products are "
        "in bfloat16.",
        "",
    ]
    return lines + _settings(runs)


def _settings(runs: list[StoredRun]) -> list[str]:
    lines = []
    ours = [run for run in runs if run.method == "gdp"]
    for kind in grouped(ours, lambda run: [run.network, run.settings("controls", "tune")]):
        network = kind[0].network
        paper = PRESETS.get(f"{PAPER_NETWORK.get(network, network)}-paper")
        if paper is not None:
            found = differences(kind[0], paper)
            count = f"{len(kind)} run{'s' * (len(kind) > 1)}"
            lines.append(f"- {TITLES[network]}, {count}: {', '.join(found) or 'none'}")
    return lines


def held_out(folder: Path) -> list[str]:
    """Return tables of the baselines that were scored on held-out training images."""
    found = []
    for file in sorted(folder.glob("held-out-*/run.json")):
        settings = flat(json.loads(file.read_text(encoding="utf-8")))
        last = json.loads(file.with_name("log.jsonl").read_text().splitlines()[-1])
        found.append((settings, 100 * last["accuracy"]))
    lines: list[str] = []
    for network in dict.fromkeys(settings["network"] for settings, _ in found):
        lines += _held_out_table([one for one in found if one[0]["network"] == network])
    return lines[:-1] or [NOT_RUN]


def _held_out_table(runs: list[tuple[dict[str, Any], float]]) -> list[str]:
    """Return a table with the settings that vary, and the accuracy."""
    first = runs[0][0]
    varied = [key for key in first if len({str(settings[key]) for settings, _ in runs}) > 1]
    lines = [
        f"{TITLES[first['network']]}, {first['baseline_epochs']} epochs, {first['hold_out']:,} "
        "images held out:",
        "",
        f"| {' | '.join(varied)} | accuracy |",
        "|---" * (len(varied) + 1) + "|",
    ]
    for settings, score in sorted(runs, key=lambda one: [one[0][key] for key in varied]):
        lines.append(f"| {' | '.join(str(settings[key]) for key in varied)} | {score:.2f} |")
    return [*lines, ""]
