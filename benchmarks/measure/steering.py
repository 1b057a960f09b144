"""Claim: with `macs=` the MACs stay within 2 points of their path, the landing closes at most 0.5
points of them, and the recalibrated test loss never rises by more than a fifth from one epoch to
the next.

Trains and prunes each combination of a network, a number of epochs and a budget as `polarprune
train` does, from a baseline that is trained first. Measures the MACs and their path at every step
of the controller, what the landing closed, and, after every epoch, the half-open gates (values
between 0.05 and 0.95), ε, and accuracy and loss on the test images. For the loss, the statistics of
batch norms are estimated again on training images with the present gates. Writes
numbers/steering.json; stored combinations are not run again, unless `--again` is given:

    python -m benchmarks.measure.steering --networks resnet56 vgg16 mobilenetv2 \\
        --epochs 20 100 200 350 --macs 0.7 0.5 0.3 0.2 0.1 --data cifar10:DIR --device cuda
    python -m benchmarks.measure.steering --networks resnet20 vgg_small mobilenetv2_small \\
        --epochs 10 20 --macs 0.7 0.5 0.3 0.1 --data cifar10:DIR --baseline-epochs 10 \\
        --images 2000 --test-images 1000 --size 16 --batch 50
"""

import argparse
import dataclasses
import json
import subprocess
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from benchmarks.store import ROOT, number_file
from polarprune import Schedule
from polarprune.cost.timing import environment
from polarprune.experiments.data.cifar10 import Cifar10, open_cifar10
from polarprune.experiments.data.images import Images
from polarprune.experiments.networks.small_images import VGG, MobileNetV2
from polarprune.experiments.networks.table import NETWORKS
from polarprune.experiments.presets import PRESETS
from polarprune.experiments.runs.run import Run
from polarprune.experiments.settings import Settings

STORE = number_file("steering")
RUNS = ROOT / "runs" / "steering"
APART, LANDED, RISE = 2.0, 0.5, 1.2  # points, points, ratio: what the claim allows
WARM_UP = 0.025  # of the epochs, as in the presets with 200 epochs


class SmallVGG(VGG):
    """Ten convolutions, for images of 16 × 16."""

    widths = (16, 16, 0, 32, 32, 0, 64, 64, 64, 0, 128, 128, 128)


class SmallMobileNetV2(MobileNetV2):
    """A MobileNetV2 of seven blocks, half as wide."""

    stages = ((1, 8, 1), (6, 12, 2), (6, 16, 2), (6, 32, 2))

    def __init__(self) -> None:
        super().__init__(strides=(1, 1, 2, 2), dropout=0.0)


NETWORKS |= {"vgg_small": SmallVGG, "mobilenetv2_small": SmallMobileNetV2}


# --- running --------------------------------------------------------------------------------------


def smaller(images: Images, count: int | None, size: int | None) -> Images:
    """Return the first images, scaled down by averaging squares of pixels."""
    images = images.pick(slice(count))
    if size is None or size == images.x.shape[1]:
        return images
    x = F.interpolate(images.x.permute(0, 3, 1, 2).float(), size=(size, size), mode="area")
    return Images(x.round().byte().permute(0, 2, 3, 1).contiguous(), images.y)


def settings_for(network: str, epochs: int, given: argparse.Namespace) -> Settings:
    """Return the settings of the network's preset, with learning rates scaled with the batch."""
    usual = PRESETS.get(network, Settings(network))
    batch = given.batch or usual.batch
    share = batch / usual.batch
    return dataclasses.replace(
        usual,
        epochs=epochs,
        baseline_epochs=given.baseline_epochs or usual.baseline_epochs,
        batch=batch,
        lr=share * usual.lr,
        baseline_lr=share * usual.baseline_lr,
        warm_up=WARM_UP * epochs,
        scored=1,
        seed=given.seed,
    )


def measure(
    settings: Settings, macs: float, data: Cifar10, given: argparse.Namespace
) -> dict[str, Any]:
    """Train and prune one combination."""
    kind = f"{settings.network}-{len(data.train)}-{data.train.x.shape[1]}-seed{settings.seed}"
    out = given.runs / f"{kind}-{settings.epochs}-{macs:g}"
    run = Run(settings, data, out, device=given.device)
    baseline = run.baseline(given.runs / f"{kind}-{settings.baseline_epochs}.safetensors")
    card = run.prune(baseline, macs=macs)
    history = json.loads((out / "report.json").read_text(encoding="utf-8"))["history"]
    lines = (out / "log.jsonl").read_text(encoding="utf-8").splitlines()
    log = {row["epoch"]: row for row in map(json.loads, lines) if row["stage"] == "prune"}
    steps = settings.epochs * run.batches.per_epoch
    rows = [log[epoch] for epoch in sorted(log)]
    return {
        "network": settings.network,
        "macs": macs,
        "steps": steps,
        **summary(history, rows, macs, settings.schedule, steps),
        "landing": card["landing"],
        "accuracy": card["accuracy"],
        "baseline": card["table"][0]["accuracy"],
        "curves": curves(rows, macs, settings.schedule, run.batches.per_epoch, steps),
        "images": len(data.train),
        "test_images": len(data.test),
        "size": data.train.x.shape[1],
        "recipe": dataclasses.asdict(settings),
        **environment(),
        "commit": commit(),
    }


def path(schedule: Schedule, step: int, steps: int, macs: float) -> float:
    """Return the share of the MACs that the schedule plans after a number of steps."""
    return macs + (1 - macs) * schedule.path(step, steps)


def summary(
    history: list[dict[str, Any]],
    rows: list[dict[str, Any]],
    macs: float,
    schedule: Schedule,
    steps: int,
) -> dict[str, float]:
    """Return the largest distances from the path, drop of the MACs, and rise of the loss."""
    apart = [row["macs"] - path(schedule, row["step"], steps, macs) for row in history]
    losses = [row["recalibrated_loss"] for row in rows]
    falls = [
        (old["macs"] - new["macs"], new["closed"] - old["closed"]) for old, new in pairwise(history)
    ]
    return {
        "largest_fall": 100 * max(falls)[0],  # between two looks
        "channels_in_it": max(falls)[1],
        "above_path": 100 * max(apart),
        "below_path": 100 * max(-distance for distance in apart),
        "loss_ratio": max(later / before for before, later in pairwise(losses)),
    }


def curves(
    rows: list[dict[str, Any]], macs: float, schedule: Schedule, per_epoch: int, steps: int
) -> dict[str, list[float]]:
    """Return the curves of a run, with one value for each epoch."""
    found: dict[str, list[float]] = {
        key: [row[key] for row in rows]
        for key in ("epoch", "macs", "eps", "recalibrated_loss", "accuracy")
    }
    found["path"] = [path(schedule, row["epoch"] * per_epoch, steps, macs) for row in rows]
    found["half_open"] = [sum(row["histogram"][1:-1]) for row in rows]
    found["gates"] = [sum(row["histogram"]) for row in rows]
    return {key: [_short(value) for value in values] for key, values in found.items()}


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.4g}")


def commit() -> str:
    """Return the commit of the code, with a plus if files were changed since."""
    asked = (["git", "rev-parse", "--short", "HEAD"], ["git", "status", "--porcelain", "src"])
    found = [subprocess.run(one, cwd=ROOT, capture_output=True, text=True) for one in asked]
    return found[0].stdout.strip() + "+" * bool(found[1].stdout.strip())


# --- what came out --------------------------------------------------------------------------------


def broken(row: dict[str, Any]) -> list[str]:
    """Return the parts of the claim that do not hold for a run."""
    parts = {
        "path": max(row["above_path"], row["below_path"]) <= APART,
        "landing": 100 * row["landing"]["macs"] <= LANDED,
        "loss": row["loss_ratio"] <= RISE,
    }
    return [name for name, kept in parts.items() if not kept]


def read(file: Path = STORE) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = (
        json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    )
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The steering of budgets.")
    parser.add_argument("--networks", nargs="+", choices=sorted(NETWORKS), required=True)
    parser.add_argument("--epochs", nargs="+", type=int, required=True)
    parser.add_argument("--macs", nargs="+", type=float, required=True, help="budgets")
    parser.add_argument("--data", required=True, help="cifar10:DIR")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, help="to learn from; all, if not given")
    parser.add_argument("--test-images", type=int)
    parser.add_argument("--size", type=int, help="pixels of a side")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--baseline-epochs", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="repeat stored combinations")
    parser.add_argument("--runs", type=Path, default=RUNS, help="for logs and checkpoints")
    parser.add_argument("--store", type=Path, default=STORE)
    given = parser.parse_args(arguments)
    whole = open_cifar10(Path(given.data.removeprefix("cifar10:")))
    data = Cifar10(
        smaller(whole.train, given.images, given.size),
        smaller(whole.test, given.test_images, given.size),
    )
    for network, epochs, macs in product(given.networks, given.epochs, given.macs):
        name = f"{network}, {epochs} epochs, macs={macs:g}, {len(data.train)} images"
        name += f" of {data.train.x.shape[1]}, seed {given.seed}"
        if name in read(given.store) and not given.again:
            continue
        row = measure(settings_for(network, epochs, given), macs, data, given)
        store = {**read(given.store), name: row}
        given.store.write_text(json.dumps(store) + "\n", encoding="utf-8")
        print(
            f"{name}: {row['above_path']:+.2f} and {-row['below_path']:+.2f} points, landing "
            f"{100 * row['landing']['macs']:.2f}, loss × {row['loss_ratio']:.2f}, accuracy "
            f"{row['accuracy']:.3f}; broken: {broken(row)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
