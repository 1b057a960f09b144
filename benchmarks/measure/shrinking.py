"""Claim: with `compact="auto"`, a training that prunes takes less time than one that does not.

Two trainings of the same length take steps in turn, on random images: the plain model, and the same
model with a Pruner that prunes to half of the MACs and removes closed channels during training. All
time between the first and the last step counts: the proximal step, the budget, the proof before
each compact(), the choice of new kernels.

On the GPU, the model is compiled and the complete step is captured in a CUDA graph, again after
each compact(). This takes as long as a thousand steps, so the run is too short to be typical.
Shapes change when they would in a long run, and the ratio is extrapolated to 90 epochs of ImageNet:
the measured steps are repeated, and the time outside of steps is added once. This time is stored as
`beside` (controller, proofs, compiling, capturing): 26 seconds with torch's cache of compiled code,
169 in an earlier run without it, which is under 1 % of 90 epochs. All plain steps take the same
time, so on the GPU only one is measured for every five of the others.

Random images do not tell which channels matter. When the stored row on a GPU was measured, the most
expensive ones closed first in this case: those of the first two stages, where most of the time is
spent. The current version closes channels evenly in all groups. exported.json shows the gain if
every layer loses the same share.

Writes numbers/shrinking.json:

    python -m benchmarks.measure.shrinking           # all cases for this machine
    python -m benchmarks.measure.shrinking resnet18
"""

import sys
import time
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
    "resnet18": {"shape": (16, 3, 128, 128), "device": "cpu", "steps": 100, "every": 1},
    "resnet50": {
        "shape": (256, 3, 224, 224),
        "device": "cuda",
        "steps": 300,
        "every": 5,
        "multiple_of": 32,
    },
}
EPOCHS, IMAGES = 90, 1_281_167


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
        self.pruner: pp.Pruner | None = None
        if pruned:
            self.pruner = pp.Pruner(
                self.model,
                self.images[:2],
                macs=0.5,
                steps=case["steps"],
                compact="auto",
                multiple_of=case.get("multiple_of", 1),
            )
            groups = self.pruner.param_groups(lr=1e-3)
        self.optimizer = torch.optim.SGD(groups, lr=1e-3, momentum=0.9)
        if self.pruner is not None:
            self.pruner.attach(self.optimizer)
            if self.device == "cuda":
                self.pruner._compaction.pays = lambda *_: True  # type: ignore[method-assign]
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


def measure(name: str) -> dict[str, Any]:
    case = CASES[name]
    steps, every = case["steps"], case["every"]
    plain, pruned = Training(name, False), Training(name, True)
    for number in range(steps):
        if number % every == 0:
            plain.step()
        pruned.step()
    assert pruned.pruner is not None
    pruned.pruner.export()
    both = {"plain": plain, "pruned": pruned}
    beside = {key: sum(one.seconds) - sum(one.steady) for key, one in both.items()}
    usual = [taken for taken in plain.steady for _ in range(every)]
    steady = {"plain": sum(usual), "pruned": sum(pruned.steady)}
    longer = EPOCHS * IMAGES / case["shape"][0] / steps
    total = {key: steady[key] + beside[key] for key in both}
    epochs = {key: longer * steady[key] + beside[key] for key in both}
    tenth = steps // 10
    return {
        **{key: list(value) if key == "shape" else value for key, value in case.items()},
        "seconds": {key: round(value, 2) for key, value in total.items()},
        "beside": {key: round(value, 2) for key, value in beside.items()},
        "compactions": pruned.compactions,
        "ratio": round(total["pruned"] / total["plain"], 4),
        "ratio_of_90_epochs": round(epochs["pruned"] / epochs["plain"], 4),
        "ratio_by_tenths": [
            round(
                sum(pruned.steady[k * tenth : (k + 1) * tenth])
                / sum(usual[k * tenth : (k + 1) * tenth]),
                3,
            )
            for k in range(10)
        ],
        "macs": pruned.pruner.report().history[-1]["macs"],
        "threads": torch.get_num_threads(),
        "runs": 1,
        **environment(),
    }


if __name__ == "__main__":
    store = read_numbers(NAME)
    for name in sys.argv[1:] or CASES:
        if CASES[name]["device"] == "cpu" or torch.cuda.is_available():
            store[name] = measure(name)
            shown = ("ratio", "ratio_of_90_epochs", "ratio_by_tenths", "beside")
            print(name, *(store[name][key] for key in shown), flush=True)
            write_numbers(NAME, store)
