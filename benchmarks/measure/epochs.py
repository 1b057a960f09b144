"""How long an epoch of CIFAR-10 takes on a GPU.

Measures the seconds of an epoch of `polarprune train` on 50,000 random images. Crops and flips are
made on the device, and the complete step is captured in a CUDA graph. The network is plain, gated,
or gated with a teacher, with or without torch.compile. Several trainings can run at once, each in
its own process (start NVIDIA's multi-process service to let their kernels share the GPU). The first
epoch, in which code is compiled and captured, is not counted. Writes numbers/epochs.json:

    python -m benchmarks.measure.epochs resnet56 --kind plain
    python -m benchmarks.measure.epochs resnet56 --kind taught --compiled --together 4
"""

import argparse
import statistics
import subprocess
import sys
import time

import torch

from benchmarks.store import read_numbers, write_numbers
from polarprune import Pruner
from polarprune.cost.timing import environment
from polarprune.experiments.data.images import Batches, Images, normalised
from polarprune.experiments.networks.table import NETWORKS
from polarprune.experiments.presets import preset
from polarprune.experiments.runs.trainer import Trainer

NAME = "epochs"
KINDS = ("plain", "gated", "taught")
EPOCHS = 200  # of a run, for its schedule


def seconds(given: argparse.Namespace) -> float:
    """Return the seconds of an epoch in this process."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    count, network = given.images, given.network
    x = torch.randint(0, 256, (count, 32, 32, 3), dtype=torch.uint8)
    images = Images(x, torch.randint(0, 10, (count,))).to(device)
    model, teacher = (
        NETWORKS[network]().to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for _ in range(2)
    )
    batches = Batches(images, given.batch)
    wanted = preset(network, batch=given.batch, compiled=given.compiled)
    pruner = None
    if given.kind != "plain":
        steps = EPOCHS * batches.per_epoch
        pruner = Pruner(model, normalised(images.x[:2]), macs=0.4665, steps=steps)
    trainer = Trainer(
        model,
        batches,
        wanted,
        epochs=EPOCHS,
        lr=0.01,
        pruner=pruner,
        teacher=teacher if given.kind == "taught" else None,
    )
    trainer.epoch()
    taken = []
    for _ in range(given.epochs):
        start = time.perf_counter()
        trainer.epoch()  # waits for the device to read the loss
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("network", choices=sorted(NETWORKS))
    parser.add_argument("--kind", choices=KINDS, default="gated")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--epochs", type=int, default=5, help="that are timed")
    parser.add_argument("--together", type=int, default=1, help="processes")
    parser.add_argument("--here", action="store_true", help="in this process, nothing is stored")
    given = parser.parse_args()
    if given.here:
        print(seconds(given))
        return
    own = [sys.executable, "-m", "benchmarks.measure.epochs", *sys.argv[1:], "--here"]
    started = [
        subprocess.Popen(own, stdout=subprocess.PIPE, text=True) for _ in range(given.together)
    ]
    found = [float(one.communicate()[0].split()[-1]) for one in started]
    row = {
        "seconds": round(statistics.median(found), 3),
        "seconds_for_each": round(statistics.median(found) / given.together, 3),
        **{key: value for key, value in vars(given).items() if key != "here"},
        **environment(),
    }
    way = "compiled" if given.compiled else "captured"
    name = f"{given.network}, {given.kind}, {way}, batch {given.batch}, {given.together} at once"
    store = read_numbers(NAME)
    store[name] = row
    write_numbers(NAME, store)
    print(name, row["seconds"], row["seconds_for_each"])


if __name__ == "__main__":
    main()
