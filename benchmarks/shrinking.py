"""Claim: with `compact="auto"`, a training that prunes takes less time than one that does not.

Two trainings of the same length take steps in turn, on random images: the plain model, and the
same with a Pruner to half of the MACs that takes out closed channels as it goes. Every second
between the first step and the last counts: the proximal step, the budget, the proof before each
compact(), kernels chosen anew. Writes shrinking.json beside this file:

    python benchmarks/shrinking.py           # what this machine has
    python benchmarks/shrinking.py resnet18
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from overhead import vision
from torch import nn

import polarprune as pp
from polarprune.bench import environment, wait

STORE = Path(__file__).with_suffix(".json")
CASES: dict[str, dict[str, Any]] = {
    "resnet18": {"shape": (16, 3, 128, 128), "device": "cpu", "steps": 100},
    "resnet50": {"shape": (128, 3, 224, 224), "device": "cuda", "steps": 1000},
}


class Training:
    """Steps of one of the two, and the seconds that they took."""

    def __init__(self, name: str, pruned: bool) -> None:
        case = CASES[name]
        self.device = case["device"]
        torch.manual_seed(0)
        self.model: nn.Module = vision(name).to(self.device)
        self.images = torch.randn(case["shape"], device=self.device)
        self.labels = torch.randint(0, 1000, (len(self.images),), device=self.device)
        groups: Any = self.model.parameters()
        self.pruner: pp.Pruner | None = None
        if pruned:
            self.pruner = pp.Pruner(
                self.model, self.images[:2], macs=0.5, steps=case["steps"], compact="auto"
            )
            groups = self.pruner.param_groups(lr=1e-3)
        self.optimizer = torch.optim.SGD(groups, lr=1e-3, momentum=0.9)
        if self.pruner is not None:
            self.pruner.attach(self.optimizer)
        self.model.train()
        self.run: Any = self.model
        if self.device == "cuda":
            self.run = torch.compile(self.model, fullgraph=True)
        self.seconds: list[float] = []

    def step(self) -> None:
        wait(self.model)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            loss = F.cross_entropy(self.run(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        wait(self.model)
        self.seconds.append(time.perf_counter() - start)


def measure(name: str) -> dict[str, Any]:
    both = {"plain": Training(name, False), "pruned": Training(name, True)}
    for _ in range(CASES[name]["steps"]):
        for training in both.values():
            training.step()
    pruner = both["pruned"].pruner
    assert pruner is not None
    pruner.export()
    total = {key: sum(training.seconds) for key, training in both.items()}
    tenth = CASES[name]["steps"] // 10
    return {
        **{key: list(value) if key == "shape" else value for key, value in CASES[name].items()},
        "seconds": {key: round(value, 2) for key, value in total.items()},
        "ratio": round(total["pruned"] / total["plain"], 4),
        "ratio_by_tenths": [
            round(sum(both["pruned"].seconds[k * tenth : (k + 1) * tenth])
                  / sum(both["plain"].seconds[k * tenth : (k + 1) * tenth]), 3)
            for k in range(10)
        ],
        "macs": pruner.report().history[-1]["macs"],
        "threads": torch.get_num_threads(),
        "runs": 1,
        **environment(),
    }  # fmt: skip


if __name__ == "__main__":
    store = json.loads(STORE.read_text()) if STORE.exists() else {}
    for name in sys.argv[1:] or CASES:
        if CASES[name]["device"] == "cpu" or torch.cuda.is_available():
            store[name] = measure(name)
            print(name, store[name]["ratio"], store[name]["ratio_by_tenths"], flush=True)
            STORE.write_text(json.dumps(store, indent=1, sort_keys=True) + "\n")
