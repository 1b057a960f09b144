"""How long models take, side by side: turns alternate, medians are compared."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..surgery.proof import count_macs
from ..tracing.model_state import Example, as_call, named_tensors, tensors_in

_IN_TURN = 4  # runs of a model that are timed, until it is the next one's turn


@dataclass(frozen=True)
class Timing:
    """Of one model: milliseconds of its runs, and what a run costs."""

    milliseconds: list[float]
    macs: int
    params: int
    batch: int

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)

    @property
    def throughput(self) -> float:
        """Samples a second."""
        return 1e3 * self.batch / self.median


def side_by_side(
    models: Mapping[str, nn.Module], example: Example, *, runs: int = 60, warm_up: int = 10
) -> dict[str, Timing]:
    """Time forward passes in eval mode, the models in turn; they are left in the mode they had."""
    times = take_turns(models, example, runs=runs, warm_up=warm_up)
    args, kwargs = as_call(example)
    first = next(iter(tensors_in((args, kwargs))), None)
    batch = first.shape[0] if first is not None and first.dim() else 1
    return {
        name: Timing(
            times[name],
            count_macs(getattr(model, "_orig_mod", model), example),  # compiled or not
            sum(parameter.numel() for parameter in model.parameters()),
            batch,
        )
        for name, model in models.items()
    }


def take_turns(
    models: Mapping[str, nn.Module], example: Example, *, runs: int, warm_up: int = 3
) -> dict[str, list[float]]:
    """Milliseconds of forward passes in eval mode, the models in turn.

    A turn is a few runs, of which the first does not count: it finds caches and memory as another
    model left them, which a model that runs by itself never does.
    """
    modes = {name: [m.training for m in model.modules()] for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    try:
        for model in models.values():
            model.eval()
            _run(model, example, warm_up)
        while any(len(taken) < runs for taken in times.values()):
            for name, model in models.items():
                times[name] += _run(model, example, 1 + _IN_TURN)[1:]
    finally:
        for name, model in models.items():
            for module, training in zip(model.modules(), modes[name], strict=True):
                module.training = training
    return {name: taken[:runs] for name, taken in times.items()}


@torch.inference_mode()
def _run(model: nn.Module, example: Example, times: int) -> list[float]:
    args, kwargs = as_call(example)
    found = []
    for _ in range(times):
        wait(model)
        start = time.perf_counter()
        model(*args, **kwargs)
        wait(model)
        found.append(1e3 * (time.perf_counter() - start))
    return found


def wait(model: nn.Module) -> None:
    """Until the device is done."""
    first = next(named_tensors(model), None)
    if first is not None and first[1].is_cuda:
        torch.cuda.synchronize()


def environment() -> dict[str, Any]:
    """Machine and versions, for a figure that others are to trust."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU only"
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {device}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
