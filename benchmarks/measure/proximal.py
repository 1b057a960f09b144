"""Claim: a proximal step of 100,000 gates, in up to 1,000 groups, takes at most 5 ms on a CPU.

On a GPU, in a captured step, it takes less than 0.2 ms in up to 1,600 groups. Launched from Python
it takes less than 1 ms in 100 groups, and longer in more, because Python passes the groups one by
one.

Measures the step of `Pruner` (`Stepper`: threshold, floor, ε, written back to the α of every group)
in 100 to 1,600 groups. More groups take longer, and 1,600 exceed the limit. Half of the gates are
shrunk. On a GPU, the step is also replayed from a CUDA graph, and each measurement waits for the
device. All cases take turns; the results are medians. Writes numbers/proximal.json, one part for
each device:

    python -m benchmarks.measure.proximal          # all devices of this machine
    python -m benchmarks.measure.proximal cuda     # one device
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.store import read_numbers, write_numbers
from polarprune import Gate, Schedule
from polarprune.cost.timing import environment
from polarprune.experiments.runs.cuda_graph import CapturedStep
from polarprune.training.stepper import Stepper

NAME = "proximal"
CHANNELS = 100_000
GROUPS = (100, 400, 1000, 1600)
LIMITS = {"cpu": 5.0, "cuda": 1.0}  # milliseconds
TURNS, STEPS = 15, 20
TOTAL = 1_000_000  # announced; nothing closes while it is measured


def stepper(groups: int, device: str) -> Stepper:
    """Return a stepper whose groups each share a cost with the next, as layers of a network do."""
    sizes = [CHANNELS // groups + (k < CHANNELS % groups) for k in range(groups)]
    gates = {f"layer{k}": Gate(size).to(device) for k, size in enumerate(sizes)}
    owner = torch.arange(groups).repeat_interleave(torch.tensor(sizes))
    step = Stepper(gates, owner, Schedule(), TOTAL, proximal=True)
    next_to = torch.ones(groups - 1, dtype=torch.float64)
    step.q.copy_(torch.diag(next_to, 1) + torch.diag(next_to, -1))
    step.b.fill_(1.0)
    step.scale.fill_(1e-12)
    step.pulled[::2] = True
    return step


def turn(step: Callable[[], Any], device: str) -> float:
    """Return the milliseconds of a step."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
        wait()
    return 1e3 * (time.perf_counter() - start) / STEPS


def measure(device: str) -> dict[str, Any]:
    steps: dict[str, Callable[[], Any]] = {}
    for groups in GROUPS:
        steps[f"{groups} groups"] = stepper(groups, device)
        if device == "cuda":
            steps[f"{groups} groups, replayed"] = CapturedStep(stepper(groups, device), True)
    for step in steps.values():
        turn(step, device)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(TURNS):
        for name, step in steps.items():
            times[name].append(turn(step, device))
    return {
        "channels": CHANNELS,
        "limit": LIMITS[device],
        "milliseconds": {name: round(statistics.median(t), 4) for name, t in times.items()},
        "turns": {name: [round(value, 4) for value in found] for name, found in times.items()},
        "steps": STEPS,
        "threads": torch.get_num_threads(),
        **environment(),
    }


if __name__ == "__main__":
    store = read_numbers(NAME)
    for device in sys.argv[1:] or LIMITS:
        if device == "cpu" or torch.cuda.is_available():
            store[device] = measure(device)
            print(device, store[device]["milliseconds"], flush=True)
            write_numbers(NAME, store)
