"""Claim: a latency set in advance is the latency of the exported model, within 5 %.

Trains a model for a short time on random images with `latency=0.6`. Then the exported model and the
original are timed in turn (`polarprune.cost.timing`), five times. The MACs are stored, too, to show
that latency is not proportional to them. On a CPU, glibc may return memory between layers and
request it again, which changes the time of memory-bound networks from run to run (MobileNetV2 by
half). The variables below prevent this, and are stored with the result. Writes
numbers/latency.json:

    export MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_MMAP_THRESHOLD_=4000000000 OMP_NUM_THREADS=1
    python -m benchmarks.measure.latency             # all cases for this machine
    python -m benchmarks.measure.latency resnet50
"""

import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F

import polarprune as pp
from benchmarks.measure.overhead import vision
from benchmarks.store import read_numbers, write_numbers
from polarprune.cost.timing import environment, side_by_side

NAME = "latency"
STEPS, RUNS, REPEATS = 60, 40, 5
CASES: dict[str, dict[str, Any]] = {
    "resnet18": {"batch": 4, "device": "cpu", "latency": 0.6},
    "resnet50": {"batch": 1, "device": "cpu", "latency": 0.6},
    "mobilenet_v2": {"batch": 4, "device": "cpu", "latency": 0.6},
    "vit_b_16": {"batch": 1, "device": "cpu", "latency": 0.6},
    "resnet50 on the GPU": {"batch": 64, "device": "cuda", "latency": 0.6, "multiple_of": 16},
    "mobilenet_v2 on the GPU": {"batch": 64, "device": "cuda", "latency": 0.8, "multiple_of": 16},
    "vit_b_16 on the GPU": {"batch": 32, "device": "cuda", "latency": 0.6, "multiple_of": 16},
}


def measure(name: str) -> dict[str, Any]:
    case = CASES[name]
    torch.manual_seed(0)
    model = vision(name.split()[0]).to(case["device"])
    images = torch.randn(case["batch"], 3, 224, 224, device=case["device"])
    start = time.perf_counter()
    grid = case.get("multiple_of", 1)
    try:
        pruner = pp.Pruner(model, images, latency=case["latency"], steps=STEPS, multiple_of=grid)
    except pp.PruneError as error:
        return {**case, "refused": str(error), **environment()}
    ready = time.perf_counter() - start
    assert pruner._run.stopwatch is not None
    original = pruner._run.stopwatch.model
    optimizer = torch.optim.SGD(pruner.param_groups(lr=1e-3), momentum=0.9)
    pruner.attach(optimizer)
    model.train()
    few = images[:2] if "vit" in name else images[:4, :, :64, :64]
    few = few.repeat(2, 1, 1, 1)  # a batch norm needs more than one
    for _ in range(STEPS):
        optimizer.zero_grad()
        labels = torch.arange(len(few), device=few.device)
        F.cross_entropy(model(few), labels).backward()
        optimizer.step()
    small = pruner.export()
    both = {"before": original, "after": small}
    found = [side_by_side(both, images, runs=RUNS) for _ in range(REPEATS)]
    shares = sorted(one["after"].median / one["before"].median for one in found)
    share, last = statistics.median(shares), found[-1]
    return {
        **case,
        "milliseconds": {key: round(one.median, 3) for key, one in last.items()},
        "share": round(share, 4),
        "shares": [round(one, 4) for one in shares],
        "off": round(share / case["latency"] - 1, 4),
        "macs": round(last["after"].macs / last["before"].macs, 4),
        "ready_seconds": round(ready, 1),
        "threads": torch.get_num_threads(),
        "runs": RUNS,
        "malloc": {key: value for key, value in os.environ.items() if key.startswith("MALLOC_")},
        **environment(),
    }


if __name__ == "__main__":
    store = read_numbers(NAME)
    for name in sys.argv[1:] or CASES:
        if CASES[name]["device"] == "cpu" or torch.cuda.is_available():
            store[name] = measure(name)
            print(name, *(store[name].get(key) for key in ("share", "macs", "refused")), flush=True)
            write_numbers(NAME, store)
