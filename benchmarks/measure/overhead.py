"""Claim: a gated training step takes at most 8 % longer than a plain one.

Compares, in one run, a complete step (forward, backward, optimizer, proximal step) of the plain
model, of the gated model, and of a naive one that multiplies gates into activations instead of
weights. They take turns, and the ratios are those of medians. Memory: eager code keeps a gated copy
of the weights until the backward pass, which matters for small batches (ResNet-18 with 32 images);
compiled code computes it again. Writes numbers/overhead.json:

    python -m benchmarks.measure.overhead            # CPU cases, and GPU cases if there is one
    python -m benchmarks.measure.overhead resnet56   # one case
"""

import importlib
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polarprune as pp
from benchmarks.measure.import_torchvision import import_torchvision
from benchmarks.store import read_numbers, write_numbers
from polarprune.cli.demo import Block

NAME = "overhead"
STEPS = 1_000_000  # announced; the gates are pulled at, and none closes while it is measured


@dataclass(frozen=True)
class Case:
    """How a network is trained here."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    device: str
    way: str  # eager, captured in a CUDA graph, or compiled
    turns: int
    steps: int  # in a turn


def resnet56() -> nn.Module:
    blocks, wide = [], 16
    for stage, width in enumerate((16, 32, 64)):
        for number in range(9):
            blocks.append(Block(wide, width, 2 if stage and not number else 1))
            wide = width
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def vision(name: str, **options: Any) -> nn.Module:
    """Return a new model of torchvision."""
    models = import_torchvision().models
    model: nn.Module = models.get_model(name, weights=None, **options)
    return model


def from_timm(name: str) -> nn.Module:
    """Return a new model of timm."""
    import_torchvision()
    model: nn.Module = importlib.import_module("timm").create_model(name)
    return model


def mobilenetv2_88m() -> nn.Module:
    """For images of 32 × 32: the first two strides are 1. LeGR's network has one stride less."""
    model = vision("mobilenet_v2", num_classes=10)
    for module in [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2)][
        :2
    ]:
        module.stride = (1, 1)
    return model


CASES = {
    "resnet18": Case(lambda: vision("resnet18"), (256, 3, 224, 224), "cpu", "eager", 3, 1),
    "resnet18 with a small batch": Case(
        lambda: vision("resnet18"), (32, 3, 224, 224), "cpu", "eager", 5, 1
    ),
    "mobilenetv3_small, small images": Case(
        lambda: from_timm("mobilenetv3_small_100"), (32, 3, 64, 64), "cpu", "eager", 60, 1
    ),
    "resnet18d, small images": Case(
        lambda: from_timm("resnet18d"), (16, 3, 64, 64), "cpu", "eager", 60, 1
    ),
    "resnet56": Case(resnet56, (256, 3, 32, 32), "cuda", "captured", 7, 40),
    "mobilenetv2_88m": Case(mobilenetv2_88m, (256, 3, 32, 32), "cuda", "captured", 7, 20),
    "resnet50": Case(lambda: vision("resnet50"), (256, 3, 224, 224), "cuda", "compiled", 7, 8),
    "vit_b_16": Case(lambda: vision("vit_b_16"), (256, 3, 224, 224), "cuda", "compiled", 7, 8),
}


def naive(model: nn.Module, example: Tensor) -> list[nn.Parameter]:
    """Put gates on the activations before every layer that merges channels."""
    graph = pp.trace(model, example)
    gates = {name: pp.Gate(group.size).to(example.device) for name, group in graph.prunable.items()}
    units = {name: range(g.offset, g.offset + g.size) for name, g in graph.prunable.items()}

    def before(gate: pp.Gate, axis: int) -> Callable[..., Any]:
        def multiply(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            shape = [1] * args[0].dim()
            shape[axis] = -1
            return (args[0] * gate.values().to(args[0].dtype).reshape(shape), *args[1:])

        return multiply

    modules = dict(model.named_modules())
    for tensor, axes in graph.sites.items():
        module = modules[tensor.rpartition(".")[0]]
        kept = next(iter(axes.values())).tolist()
        for name, mine in units.items():
            if kept == list(mine) and isinstance(module, (nn.Conv2d, nn.Linear)):
                axis = 1 if isinstance(module, nn.Conv2d) else -1
                module.register_forward_pre_hook(before(gates[name], axis))
    return [gate.alpha for gate in gates.values()]


class Training:
    """One variant of a case, ready to take steps."""

    def __init__(self, case: Case, variant: str) -> None:
        torch.manual_seed(0)
        self.base = _allocated()
        self.pruner: pp.Pruner | None = None
        images = torch.randn(case.shape, device=case.device)
        labels = torch.randint(0, 10, (case.shape[0],), device=case.device)
        model = case.make().to(case.device)
        if case.device == "cuda":
            model, images = (x.to(memory_format=torch.channels_last) for x in (model, images))
        groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "lr": 1e-3}]
        if variant == "gated":
            self.pruner = pp.Pruner(model, images[:2], macs=0.5, steps=STEPS)
            groups = self.pruner.param_groups(lr=1e-3)
        elif variant == "naive":
            groups.append({"params": naive(model, images[:2]), "lr": 1e-4})
        optimizer = torch.optim.SGD(groups, momentum=0.9, foreach=True)
        if self.pruner is not None:
            self.pruner.attach(optimizer)
        model.train()
        run = torch.compile(model, fullgraph=True) if case.way == "compiled" else model

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(case.device, torch.bfloat16, enabled=case.device == "cuda"):
                loss = F.cross_entropy(run(images), labels)
            loss.backward()
            optimizer.step()

        self.peak = 0
        self.step = self.captured(step) if case.way == "captured" else step

    def captured(self, step: Callable[[], None]) -> Callable[[], None]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.reset_peak_memory_stats()
        with torch.cuda.graph(graph):
            step()
        self.peak = torch.cuda.max_memory_allocated() - self.base

        self.held = step  # what a graph reads and writes must not go

        def replay() -> None:
            graph.replay()
            if self.pruner is not None:
                self.pruner.replayed()

        return replay

    def turn(self, steps: int) -> float:
        """Return the milliseconds of a step."""
        _wait()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        _wait()
        return 1e3 * (time.perf_counter() - start) / steps

    def measure_memory(self) -> None:
        """Measure the peak of memory of a step of this variant."""
        if not torch.cuda.is_available():
            self.turn(2)
            self.peak = _resident() - START
        elif not self.peak:
            torch.cuda.reset_peak_memory_stats()
            self.turn(2)
            self.peak = torch.cuda.max_memory_allocated() - self.base


def _resident() -> int:
    """Return the peak of memory of this process so far, in bytes (Linux)."""
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


START = 0 if torch.cuda.is_available() else _resident()  # with all imports


def _allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(name: str) -> dict[str, Any]:
    """Return the medians of all variants, and their ratios to the plain one."""
    case = CASES[name]
    names = ("plain", "gated", "naive")
    memory = {each: peak_of(name, each) for each in names}
    variants = {each: Training(case, each) for each in names}
    for training in variants.values():
        training.turn(2)
    times: dict[str, list[float]] = {each: [] for each in variants}
    for _ in range(case.turns):
        for each, training in variants.items():
            times[each].append(training.turn(case.steps))
    medians = {each: statistics.median(found) for each, found in times.items()}
    return {
        "way": case.way,
        "batch": list(case.shape),
        "milliseconds": {each: round(value, 3) for each, value in medians.items()},
        "ratio": {each: round(medians[each] / medians["plain"], 4) for each in variants},
        "memory_ratio": {each: round(memory[each] / memory["plain"], 4) for each in memory},
        "turns": {each: [round(value, 3) for value in found] for each, found in times.items()},
    }


def peak_of(name: str, variant: str) -> int:
    """Return the peak of memory of a step in a new process, which returns freed memory at once."""
    command = [sys.executable, "-m", "benchmarks.measure.overhead", "--memory", name, variant]
    own = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=own)
    return int(done.stdout.split()[-1])


def machine(device: str) -> str:
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16"
    threads = torch.get_num_threads()
    cores = f"{os.cpu_count()} cores, {threads} thread{'s' * (threads != 1)}"
    return f"{platform.machine()}, {cores}, torch {torch.__version__}"


def cases() -> Iterator[str]:
    wanted = sys.argv[1:] or list(CASES)
    for name in wanted:
        if CASES[name].device == "cpu" or torch.cuda.is_available():
            yield name


if __name__ == "__main__" and sys.argv[1:2] == ["--memory"]:
    training = Training(CASES[sys.argv[2]], sys.argv[3])
    training.turn(1)
    training.measure_memory()
    print(training.peak)
elif __name__ == "__main__":
    store = read_numbers(NAME)
    for name in cases():
        store[name] = {**measure(name), "machine": machine(CASES[name].device)}
        print(name, store[name]["ratio"], store[name]["memory_ratio"], flush=True)
        write_numbers(NAME, store)
        torch._dynamo.reset()
