"""Time models: several models side by side, or the modules of one model.

Models take turns, so that a change of the machine's speed affects all of them alike.
"""

from __future__ import annotations

import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..surgery.proof import count_macs
from ..torch_internals.markers import uncompiled
from ..tracing.model_state import Example, as_call, named_tensors, tensors_in

_IN_TURN = 4  # timed runs of a model before it is the next model's turn
_HEAD_START = 100_000_000  # GPU cycles of sleep, so that the GPU never waits for Python


@dataclass(frozen=True)
class Timing:
    """The times of one model's runs in milliseconds, and what a run costs."""

    milliseconds: list[float]
    macs: int
    params: int
    batch: int

    @property
    def median(self) -> float:
        """The median time of a run, in milliseconds."""
        return statistics.median(self.milliseconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The times that a quarter and three quarters of the runs do not exceed."""
        ordered = sorted(self.milliseconds)
        last = len(ordered) - 1
        return ordered[round(last / 4)], ordered[round(3 * last / 4)]

    @property
    def spread(self) -> float:
        """Half of the distance between the quartiles, in milliseconds."""
        low, high = self.quartiles
        return (high - low) / 2

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return 1e3 * self.batch / self.median


def side_by_side(
    models: Mapping[str, nn.Module], example: Example, *, runs: int = 60, warm_up: int = 10
) -> dict[str, Timing]:
    """Time forward passes of several models in eval mode; their modes are restored."""
    times = take_turns(models, example, runs=runs, warm_up=warm_up)
    first = next(iter(tensors_in(as_call(example))), None)
    batch = first.shape[0] if first is not None and first.dim() else 1
    return {
        name: Timing(
            times[name],
            count_macs(uncompiled(model), example),
            sum(parameter.numel() for parameter in model.parameters()),
            batch,
        )
        for name, model in models.items()
    }


def compare_speed(
    before: nn.Module, after: nn.Module, example: Example, *, runs: int = 60
) -> dict[str, float | int]:
    """Return the median milliseconds of two models: `latency_ms` in the results of a report."""
    found = side_by_side({"before": before, "after": after}, example, runs=runs)
    medians = {name: one.median for name, one in found.items()}
    return {**medians, "runs": runs, "batch": found["after"].batch}


def take_turns(
    models: Mapping[str, nn.Module], example: Example, *, runs: int, warm_up: int = 3
) -> dict[str, list[float]]:
    """Return the milliseconds of forward passes in eval mode; the models run in turns.

    The first run of a turn does not count: another model has just used the caches and the memory.
    """
    modes = {name: [m.training for m in model.modules()] for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    try:
        for model in models.values():
            model.eval()
            _time_runs(model, example, warm_up)
        while any(len(taken) < runs for taken in times.values()):
            for name, model in models.items():
                times[name] += _time_runs(model, example, 1 + _IN_TURN)[1:]
    finally:
        for name, model in models.items():
            for module, training in zip(model.modules(), modes[name], strict=True):
                module.training = training
    return {name: taken[:runs] for name, taken in times.items()}


@torch.inference_mode()
def _time_runs(model: nn.Module, example: Example, times: int) -> list[float]:
    """Return the milliseconds of each of several runs."""
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
    """Wait until the model's device has finished its work."""
    first = next(named_tensors(model), None)
    if first is not None and first[1].is_cuda:
        torch.cuda.synchronize()


def module_times(model: nn.Module, example: Example, names: Sequence[str]) -> list[float]:
    """Run the model once; return the milliseconds of each named module without its children."""
    args, kwargs = as_call(example)
    with ModuleTimer(model) as timer, torch.inference_mode():
        if torch.cuda.is_available():
            torch.cuda._sleep(_HEAD_START)
        model(*args, **kwargs)
        wait(model)
    spent = dict.fromkeys(names, 0.0)
    for name, milliseconds in timer.intervals():
        if name in spent:
            spent[name] += milliseconds
    return list(spent.values())


class ModuleTimer:
    """Context manager: note the time whenever a module is entered or left."""

    def __init__(self, model: nn.Module) -> None:
        first = next(model.parameters(), None)
        self._model = model
        self._on_gpu = first is not None and first.is_cuda
        self._running: list[str] = []  # modules that were entered and not yet left
        self._names: list[str] = []  # for each mark, the module that ran until then
        self._seconds: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> ModuleTimer:
        for name, module in self._model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(self._enter(name)),
                module.register_forward_hook(self._leave, always_call=True),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def intervals(self) -> list[tuple[str, float]]:
        """Return, for each interval between two marks, the module that ran and its milliseconds."""
        if self._on_gpu:
            pairs = itertools.pairwise(self._events)
            times = [start.elapsed_time(end) for start, end in pairs]
        else:
            times = [1e3 * (end - start) for start, end in itertools.pairwise(self._seconds)]
        return list(zip(self._names[1:], times, strict=True))

    def _mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._seconds.append(time.perf_counter())
        self._names.append(self._running[-1] if self._running else "")

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            self._mark()
            self._running.append(name)

        return hook

    def _leave(self, *_: object) -> None:
        self._mark()
        self._running.pop()


def environment() -> dict[str, str | dict[str, str]]:
    """Return the machine and the versions, to be stored beside measured figures."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU only"
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {device}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
