"""accelerate: count the optimizer steps of all processes together, and attach a pruner."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from ..errors import PruneError
from ..training.pruner import Pruner
from ..validation.optional_packages import missing_package

try:
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
except ImportError as error:
    raise missing_package(
        "accelerate", needed_for="polarprune.integrations.accelerate", extra="accelerate"
    ) from error


def optimizer_steps(accelerator: Accelerator, loader: Iterable[object], epochs: int) -> int:
    """Return how many optimizer steps a training takes: `steps` of a `Pruner`.

    Each process gets a part of the batches, and gradients may be accumulated, so there are fewer
    steps than `epochs * len(loader)`.

    Args:
        accelerator: The accelerator of the training.
        loader: The data loader, before or after `accelerator.prepare`.
        epochs: How often the training goes through the loader.

    Returns:
        The number of optimizer steps, the same in all processes.

    Raises:
        PruneError: If the loader has no length.

    Example:
        >>> import polarprune as pp
        >>> from accelerate import Accelerator
        >>> from polarprune.integrations.accelerate import optimizer_steps
        >>> accelerator = Accelerator()
        >>> steps = optimizer_steps(accelerator, loader, epochs=10)
        >>> pruner = pp.Pruner(model, example, macs=0.5, steps=steps)
    """
    batches = _batches(accelerator, loader)
    every: int = accelerator.gradient_accumulation_steps
    if accelerator.gradient_state.sync_with_dataloader:  # a step ends every epoch
        return epochs * math.ceil(batches / every)
    return epochs * batches // every


def attach(
    pruner: Pruner,
    accelerator: Accelerator,
    optimizer: Optimizer,
    *others: Optimizer,
    loader: Iterable[object],
    epochs: int,
) -> None:
    """Attach a pruner as `Pruner.attach` does, after a check of the announced steps.

    Args:
        pruner: The pruner.
        accelerator: The accelerator of the training.
        optimizer: Holds the gates; before or after `accelerator.prepare`.
        *others: Optimizers of other parameters.
        loader: The data loader, before or after `accelerator.prepare`.
        epochs: How often the training goes through the loader.

    Raises:
        PruneError: If the training takes another number of steps than `pruner.steps`, or as
            `Pruner.attach` does.

    Example:
        >>> from polarprune.integrations.accelerate import attach
        >>> optimizer = torch.optim.SGD(pruner.param_groups(lr=0.1))
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> attach(pruner, accelerator, optimizer, loader=loader, epochs=10)
    """
    steps = optimizer_steps(accelerator, loader, epochs)
    if pruner.steps != steps:
        raise PruneError(
            f"attach: steps={pruner.steps} were announced, but {epochs} epochs take {steps} "
            f"optimizer steps, with {accelerator.num_processes} processes and gradients "
            f"accumulated over {accelerator.gradient_accumulation_steps} batches. Build the Pruner "
            f"with steps=optimizer_steps(accelerator, loader, epochs)."
        )
    pruner.attach(optimizer, *others)


def _batches(accelerator: Accelerator, loader: Any) -> int:
    """Return how many batches each process gets in an epoch."""
    try:
        batches: int = len(loader)
    except TypeError as error:
        raise PruneError(
            "optimizer_steps: the data loader has no length; count the optimizer steps yourself, "
            "and give them to Pruner(steps=...)."
        ) from error
    if isinstance(loader, (DataLoaderShard, DataLoaderDispatcher)) or accelerator.split_batches:
        return batches
    processes: int = accelerator.num_processes
    if getattr(loader, "drop_last", False):
        return batches // processes
    return math.ceil(batches / processes)
