"""Time a few steps, to predict how long a training takes and how much memory it needs."""

from __future__ import annotations

import sys
import time

import torch

from ...torch_internals.process_settings import convolutions_tuned
from ..methods.base import Limits
from ..settings import Settings
from .trainer import Trainer

WARM_UP = 5  # steps that are not timed


def time_steps(trainer: Trainer, steps: int) -> dict[str, float | None]:
    """Run some steps and return the seconds a step takes, the number of steps, and the memory."""
    if trainer.on_gpu:
        torch.cuda.reset_peak_memory_stats(trainer.device)
    trainer.batches.shuffle()
    with convolutions_tuned():
        trainer.advance(WARM_UP)
        start = time.perf_counter()
        trainer.advance(steps)  # it reads the loss, which waits for the device
        seconds = (time.perf_counter() - start) / steps
    memory = torch.cuda.max_memory_allocated(trainer.device) if trainer.on_gpu else _peak_memory()
    return {"seconds_a_step": seconds, "steps": trainer.steps, "memory": memory}


def planned_costs(settings: Settings, limits: Limits, steps: int) -> dict[str, list[float]]:
    """Return the planned cost of each resource after every tenth of the steps, as shares."""
    remaining = [settings.schedule.path(k * steps / 10, steps) for k in range(11)]
    return {
        key: [limit + (1 - limit) * share for share in remaining]
        for key, limit in limits.items()
        if key != "lam"
    }


def _peak_memory() -> int | None:
    """Return the most memory that this process had so far, in bytes, if the system says so."""
    try:
        import resource
    except ImportError:
        return None
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else 1024 * found
