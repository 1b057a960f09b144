"""Compares plain and gated training in images per second, at 224 × 224.

The images are random and stay on the device, so the speed of data loading is not measured. The
steps are those of `polarprune train` on ImageNet, without a CUDA graph. Writes
numbers/throughput.json:

    python -m benchmarks.measure.throughput                 # all networks, on a GPU
    python -m benchmarks.measure.throughput resnet50 --batch 64
"""

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.store import read_numbers, write_numbers
from polarprune import Pruner
from polarprune.cost.timing import environment
from polarprune.experiments.data.distillation import classification_loss
from polarprune.experiments.data.task import InMemoryStream
from polarprune.experiments.networks.table import NETWORKS
from polarprune.experiments.presets import preset
from polarprune.experiments.runs.trainer import Trainer
from polarprune.experiments.settings import Settings

NAME = "throughput"
CASES = ("mobilenet_v1", "mobilenet_v2", "resnet50")
ROUNDS, STEPS, WARM = 7, 10, 5


class FixedBatch(InMemoryStream):
    """The same random batch at every step."""

    captured = False  # as with a loader

    def __init__(self, batch: int, side: int, device: torch.device) -> None:
        super().__init__(1000 * batch, batch, device)
        shape = (batch, 3, side, side)
        self.x = torch.randn(shape, device=device).to(memory_format=torch.channels_last)
        self.y = torch.randint(0, 1000, (batch,), device=device)

    def next(self) -> tuple[Tensor, Tensor]:
        return self.x, self.y

    def loss(
        self, output: Tensor, target: Tensor, teacher: Tensor | None, settings: Settings
    ) -> Tensor:
        return classification_loss(output, target, teacher, settings)

    def accuracy(self, output: Tensor, target: Tensor) -> Tensor:
        return (output.argmax(1) == target).float().mean()


def measure(network: str, batch: int, side: int, compiled: bool) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    settings = preset(network, batch=batch, compiled=compiled)
    images = FixedBatch(batch, side, device)
    trainers = {}
    for kind in ("plain", "gated"):
        torch.manual_seed(0)
        model: Any = NETWORKS[network]().to(device)
        model = model.to(memory_format=torch.channels_last)
        pruner = None
        if kind == "gated":
            pruner = Pruner(model, images.x[:2], macs=0.5, steps=140 * 5000)
        trainers[kind] = Trainer(model, images, settings, epochs=140, lr=0.01, pruner=pruner)
        trainers[kind].advance(WARM)
    taken: dict[str, list[float]] = {kind: [] for kind in trainers}
    for _ in range(ROUNDS):
        for kind, trainer in trainers.items():
            start = time.perf_counter()
            trainer.advance(STEPS)  # waits for the device to read the loss
            taken[kind].append(time.perf_counter() - start)
    seconds = {kind: statistics.median(times) for kind, times in taken.items()}
    ratios = [gated / plain for plain, gated in zip(taken["plain"], taken["gated"], strict=True)]
    return {
        "images_a_second": {kind: round(batch * STEPS / s) for kind, s in seconds.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(min(ratios), 3), round(max(ratios), 3)],
        "batch": batch,
        "side": side,
        "compiled": compiled,
        "rounds": ROUNDS,
        "steps": STEPS,
        **environment(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("networks", nargs="*", default=CASES)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--compiled", action="store_true")
    given = parser.parse_args()
    store = read_numbers(NAME)
    for network in given.networks:
        row = measure(network, given.batch, given.side, given.compiled)
        store[network + ("-compiled" if given.compiled else "")] = row
        print(network, row["images_a_second"], row["ratio"], flush=True)
        write_numbers(NAME, store)


if __name__ == "__main__":
    main()
