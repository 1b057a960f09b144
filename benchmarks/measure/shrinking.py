"""Claim: with `compact="auto"`, a training that prunes takes three quarters of the time or less.

Two trainings of the same length take steps in turn, on random images: the plain model, and the same
model with a Pruner that prunes to half of the MACs and removes closed channels during training.
Everything counts: the construction of the Pruner, the proximal step, the controller, the proof
before each compact(), the choice of new kernels, compiling, and export() with its proof. `setup`
and `export` are the seconds of the first and the last; `beside` is the time that steps took in
addition to that of a usual step of the same shapes.

On the GPU, the model is compiled and the complete step is captured in a CUDA graph, again after
each compact(). All plain steps take the same time, so on the GPU only one is measured for every ten
of the others. Random images do not tell which channels matter, so every group loses a similar
share.

Writes numbers/shrinking.json:

    python -m benchmarks.measure.shrinking           # all cases for this machine
    python -m benchmarks.measure.shrinking resnet18
"""

import sys
import time
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import polarprune as pp
from benchmarks.measure.overhead import vision
from benchmarks.store import read_numbers, write_numbers
from polarprune.cost.timing import environment, wait
from polarprune.experiments.runs.cuda_graph import CapturedStep

NAME = "shrinking"
CASES: dict[str, dict[str, Any]] = {
    "resnet18": {
        "shape": (16, 3, 128, 128),
        "device": "cpu",
        "steps": 1000,
        "every": 1,
        "multiple_of": 32,
    },
    "resnet50": {
        "shape": (256, 3, 224, 224),
        "device": "cuda",
        "steps": 6000,
        "every": 10,
        "multiple_of": 32,
    },
}


class Training:
    """The steps of one training, and the seconds that they took."""

    def __init__(self, name: str, pruned: bool) -> None:
        case = CASES[name]
        self.device = case["device"]
        torch.manual_seed(0)
        self.model: nn.Module = vision(name).to(self.device)
        self.images = torch.randn(case["shape"], device=self.device)
        if self.device == "cuda":
            self.model.to(memory_format=torch.channels_last)
            self.images = self.images.to(memory_format=torch.channels_last)
        self.labels = torch.randint(0, 1000, (len(self.images),), device=self.device)
        groups: Any = self.model.parameters()
        start = self.now()
        self.pruner: pp.Pruner | None = None
        if pruned:
            self.pruner = pp.Pruner(
                self.model,
                self.images[:2],
                macs=0.5,
                steps=case["steps"],
                compact="auto",
                multiple_of=case["multiple_of"],
            )
            groups = self.pruner.param_groups(lr=1e-3)
        self.optimizer = torch.optim.SGD(groups, lr=1e-3, momentum=0.9)
        if self.pruner is not None:
            self.pruner.attach(self.optimizer)
            if self.device == "cuda":
                self.pruner._run.compaction.pays = lambda *_: True  # type: ignore[method-assign]
        self.setup = self.now() - start
        self.model.train()
        self.run: Any = self.model
        if self.device == "cuda":
            torch._dynamo.config.recompile_limit = 64
            self.run = torch.compile(self.model, fullgraph=True)
        self.captured = CapturedStep(self.forward_and_back, self.device == "cuda")
        self.compactions = 0
        self.seconds: list[float] = []  # of every step, with all that came with it
        self.steady: list[float] = []  # of those that were nothing but a step

    def forward_and_back(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            loss = F.cross_entropy(self.run(self.images), self.labels)
        loss.backward()
        self.optimizer.step()

    def step(self) -> None:
        start = self.now()
        known = self.captured.graph is not None
        replayed = self.captured()
        between = self.now()
        if self.pruner is not None:
            if replayed:
                self.pruner.replayed()
            if self.pruner.compactions > self.compactions:
                self.compactions = self.pruner.compactions
                self.captured.discard()
        self.seconds.append(self.now() - start)
        if known or self.device == "cpu":
            missed = len(self.seconds) - len(self.steady)  # the first ones with these shapes
            self.steady += [between - start] * missed

    def now(self) -> float:
        wait(self.model)
        return time.perf_counter()

    def export(self) -> float:
        """Export the model, and return the seconds that it took."""
        start = self.now()
        if self.pruner is not None:
            self.pruner.export()
        return self.now() - start


def measure(name: str) -> dict[str, Any]:
    case = CASES[name]
    steps, every = case["steps"], case["every"]
    plain, pruned = Training(name, False), Training(name, True)
    for number in range(steps):
        if number % every == 0:
            plain.step()
        pruned.step()
    assert pruned.pruner is not None
    both = {"plain": plain, "pruned": pruned}
    exported = {key: one.export() for key, one in both.items()}
    beside = {key: sum(one.seconds) - sum(one.steady) for key, one in both.items()}
    usual = [taken for taken in plain.steady for _ in range(every)]
    steady = {"plain": usual, "pruned": pruned.steady}
    total = {
        key: one.setup + sum(steady[key]) + beside[key] + exported[key] for key, one in both.items()
    }
    tenths = [slice(k * steps // 10, (k + 1) * steps // 10) for k in range(10)]
    return {
        **{key: list(value) if key == "shape" else value for key, value in case.items()},
        "seconds": {key: round(value, 2) for key, value in total.items()},
        "setup": round(pruned.setup, 2),
        "export": round(exported["pruned"], 2),
        "beside": {key: round(value, 2) for key, value in beside.items()},
        "compactions": pruned.compactions,
        "ratio": round(total["pruned"] / total["plain"], 4),
        "ratio_by_tenths": [round(sum(pruned.steady[t]) / sum(usual[t]), 3) for t in tenths],
        "macs": pruned.pruner.report().history[-1]["macs"],
        "mean_macs": round(mean_macs(pruned.pruner, steps), 4),
        "threads": torch.get_num_threads(),
        "runs": 1,
        **environment(),
    }


def mean_macs(pruner: pp.Pruner, steps: int) -> float:
    """Return the share of the MACs that was left, on average over all steps."""
    rows = [*pruner.report().history, {"step": steps, "macs": 0.0}]
    return sum(row["macs"] * (after["step"] - row["step"]) for row, after in pairwise(rows)) / steps


if __name__ == "__main__":
    store = read_numbers(NAME)
    for name in sys.argv[1:] or CASES:
        if CASES[name]["device"] == "cpu" or torch.cuda.is_available():
            store[name] = measure(name)
            shown = ("ratio", "ratio_by_tenths", "setup", "beside", "export", "mean_macs")
            print(name, *(store[name][key] for key in shown), flush=True)
            write_numbers(NAME, store)
