"""Claim: with the default of `multiple_of`, a model with half of the MACs is faster than the
original on a CPU, in torch and in ONNX Runtime; with `multiple_of=1`, it may be slower.

The original and models with half of its MACs run in turn in eval mode, on images of one size and in
batches of one size. The channels are not learned: every group keeps the same share, by magnitude.
`8` keeps multiples of 8 in every group. Writes numbers/default_widths.json:

    OMP_NUM_THREADS=1 python -m benchmarks.measure.default_widths
"""

import logging
import warnings

import torch
from torch import nn

from benchmarks.measure.exported import Session, compare, exported, gains, made
from benchmarks.store import write_numbers
from polarprune.cost.timing import environment, side_by_side

NAME = "default_widths"
BATCH = 16
RUNS = {"mobilenet_v3_small": 40, "resnet18": 12, "resnet50": 8, "vit_b_16": 4}
CHOICES: tuple[int | str, ...] = (1, "auto", 8)


def measure(name: str, way: str) -> dict[str, object]:
    """Return the speed-up of every choice over the original, by median times."""
    x = torch.randn(BATCH, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    models: dict[str, nn.Module] = {"plain": made(name)[0]}
    models |= {str(choice): exported(name, choice) for choice in CHOICES}
    ready = models
    if way == "onnxruntime":
        ready = {key: Session(model, x) for key, model in models.items()}
        compare(models, ready, x, 1e-3)
    found = side_by_side(ready, x, runs=RUNS[name], warm_up=2)
    times = {key: timing.milliseconds for key, timing in found.items()}
    return {
        "batch": BATCH,
        "runs": RUNS[name],
        "threads": torch.get_num_threads(),
        "milliseconds": round(found["plain"].median, 2),
        "gain": gains(times, lambda values: sorted(values)[len(values) // 2]),
        "gain_of_fastest": gains(times, min),
        **environment(),
    }


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)  # in torch's exporter
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    store = {}
    for network in RUNS:
        for way in ("eager", "onnxruntime"):
            store[f"{network}, {way}"] = row = measure(network, way)
            print(network, way, row["milliseconds"], row["gain"], flush=True)
            write_numbers(NAME, store)
